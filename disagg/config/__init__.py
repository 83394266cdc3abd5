"""The YAML that describes one deployment or several: one pydantic model per section, its loading.

Imports neither torch, vLLM nor Ray, so reading a file takes milliseconds. It must never check
anything that depends on the machine: `disagg.preflight.checks` checks ports, the rights of folders
and vLLM's argument names, and `disagg.credentials` reads secrets. Unknown keys are refused. A wrong
value is never replaced by a default.

A relative path in the file is relative to the folder in which `disagg` was started, as on the
command line, or to `DISAGG_FOLDER`. Loading makes it absolute: engines run in other folders.
"""

from __future__ import annotations

from disagg.config.base import (
    FOLDER_ENV,
    MAX_REPLICAS,
    Checkpoint,
    ConnectorName,
    Environment,
    LocalPath,
    Role,
    Section,
    absolute,
    is_local,
)
from disagg.config.deployment import (
    Deployment,
    DeploymentSection,
    ModelAndEngines,
    RaySection,
    SeveralDeployments,
)
from disagg.config.engines import (
    AutoscaleSection,
    EngineSection,
    ModelSection,
    PoolSection,
    ResourcesSection,
)
from disagg.config.loading import load, load_all, load_router, read, replicas_of, schema
from disagg.config.requests import (
    OTHERS,
    Follow,
    LimitsSection,
    MediaSection,
    ModelLimitsSection,
    PairingSection,
    PolicyName,
    ShareSection,
)
from disagg.config.router import (
    CorsSection,
    EngineListSection,
    EngineUrlsSection,
    KubernetesSection,
    KvEventsSection,
    ModelRouteSection,
    ProxiesSection,
    RouterSection,
    ServedModelSection,
)
from disagg.config.transfer import (
    DirectoryTierSection,
    HostTierSection,
    NixlSection,
    StorageSection,
    TiersSection,
    TransferSection,
)

__all__ = [
    "FOLDER_ENV",
    "MAX_REPLICAS",
    "OTHERS",
    "AutoscaleSection",
    "Checkpoint",
    "ConnectorName",
    "CorsSection",
    "Deployment",
    "DeploymentSection",
    "DirectoryTierSection",
    "EngineListSection",
    "EngineSection",
    "EngineUrlsSection",
    "Environment",
    "Follow",
    "HostTierSection",
    "KubernetesSection",
    "KvEventsSection",
    "LimitsSection",
    "LocalPath",
    "MediaSection",
    "ModelAndEngines",
    "ModelLimitsSection",
    "ModelRouteSection",
    "ModelSection",
    "NixlSection",
    "PairingSection",
    "PolicyName",
    "PoolSection",
    "ProxiesSection",
    "RaySection",
    "ResourcesSection",
    "Role",
    "RouterSection",
    "Section",
    "ServedModelSection",
    "SeveralDeployments",
    "ShareSection",
    "StorageSection",
    "TiersSection",
    "TransferSection",
    "absolute",
    "is_local",
    "load",
    "load_all",
    "load_router",
    "read",
    "replicas_of",
    "schema",
]
