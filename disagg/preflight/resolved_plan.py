"""The resolved plan of a deployment: what `disagg serve` would start, as plain data.

It must never contain a secret, nor a value that differs from the value that the cluster or an
engine uses. A value that is known only at start, or that looks like a credential, is a description
in angle brackets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.config import Deployment, ModelLimitsSection, Role, RouterSection
from disagg.engine.args import (
    KEY_ENV,
    SECRET_ENV,
    engine_args,
    engine_env,
    kv_event_endpoints,
)
from disagg.engine.spec import EngineSpec
from disagg.preflight.checks import storage_folder
from disagg.private_files import user_folder
from disagg.redaction import hidden

_ANY_PORT = "<any free port>"


def resolve_all(deployments: Sequence[Deployment]) -> dict[str, Any]:
    """The plan of a file with one deployment or several."""
    first = deployments[0]
    if not first.group:
        return resolve(first)
    models = {model.name: model for model in first.router.models}
    each = [
        {
            **_engines(deployment),
            "limits": first.router.of_model(models[deployment.name]).limits.model_dump(
                include=set(ModelLimitsSection.model_fields)
            ),
        }
        for deployment in deployments
    ]
    return {"deployments": each, "router": _router(first.router)}


def resolve(deployment: Deployment) -> dict[str, Any]:
    """The plan in values for JSON and YAML, in the order of the deployment's file."""
    return {**_engines(deployment), "router": _router(deployment.router)}


def _engines(deployment: Deployment) -> dict[str, Any]:
    transfer = deployment.transfer
    return {
        "name": deployment.name,
        "model": deployment.model.model_dump(exclude_none=True),
        "prefill": _pool(deployment, "prefill"),
        "decode": _pool(deployment, "decode"),
        "transfer": {
            "transports": list(transfer.transports),
            "storage_path": str(storage_folder(deployment)),
            "storage_max_bytes": transfer.storage.max_bytes,
            "storage_checksum": transfer.storage.checksum,
            **({"nixl": transfer.nixl.model_dump()} if "nixl" in transfer.transports else {}),
            "staging_bytes": transfer.staging_bytes,
            "lease_s": transfer.lease_s,
            "lease_limit_s": transfer.lease_limit_s,
            "load_deadline_s": transfer.load_deadline_s,
            "strict": transfer.strict,
            "stream": transfer.stream,
            "control_channel": f"{transfer.host or '<address of the node>'}:{_ANY_PORT}",
            "secret": _secret_source(deployment),
        },
        "tiers": deployment.tiers.model_dump(mode="json", exclude_none=True),
    }


def _router(router: RouterSection) -> dict[str, Any]:
    scheme = "http" if router.tls_cert_file is None else "https"
    return {
        "endpoint": f"{scheme}://{router.host}:{router.port or _ANY_PORT}/v1",
        "processes": router.processes,
        "api_keys": router.api_keys_env is not None or router.api_keys_file is not None,
        "admin_keys": router.admin_keys_env is not None or router.admin_keys_file is not None,
        "admin_socket": str(router.admin_socket or user_folder().path / "router-{port}.sock"),
        "limits": router.limits.model_dump(),
    }


def _pool(deployment: Deployment, role: Role) -> dict[str, Any]:
    spec = EngineSpec(
        deployment=deployment,
        role=role,
        index=0,
        run_id="<fresh>",
        storage_path="<folder of the run>",
        loopback=False,
        secret="",
        engine_key="",
    )
    pool = deployment.pool(role)
    meeting = "<address of the first rank>", 0
    args = engine_args(spec, host="<address of the node>", engine_id="<fresh>", meeting=meeting)
    env = engine_env(spec, scratch="<scratch folder>")
    del env[SECRET_ENV], env[KEY_ENV]
    plan = {
        "replicas": pool.replicas,
        "engines": pool.replicas * spec.ranks,
        "resources": pool.resources.model_dump(),
        "port": _ANY_PORT,
        "args": hidden(args),
        "env": hidden(env),
    }
    endpoints = {
        f"{role}-{index}": hidden(kv_event_endpoints(deployment, role, index))
        for index in range(pool.replicas * spec.ranks)
    }
    return plan | ({"kv_events": endpoints} if all(endpoints.values()) else {})


def _secret_source(deployment: Deployment) -> str:
    transfer = deployment.transfer
    if transfer.secret_env is not None:
        return f"<from the variable {transfer.secret_env}>"
    if transfer.secret_file is not None:
        return f"<from {transfer.secret_file}>"
    return "<fresh random one>"
