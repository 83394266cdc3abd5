"""The keys of `kv_connector_extra_config`. Every key has a default that works on one host.

The secret is not among them, since vLLM logs them (see `transport/control/secret.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from disagg.checksums import Checksum, ChecksumName
from disagg.connector.extra_config import parse
from disagg.private_files import folder_or_own
from disagg.transport.names import PREFERENCE, TransportName
from disagg.transport.nixl.settings import NixlSettings
from disagg.transport.shared_storage import Storage

# NCCL itself allocates about 40 MB per joined worker; this is enough for three.
NCCL_RESERVE_BYTES = 128 << 20


class ConnectorSettings(BaseModel):
    """The keys of `kv_connector_extra_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine_name: str | None = Field(None, description="Name in logs; the engine id if not given")
    host: str | None = Field(
        "127.0.0.1",
        description="Address the control channel listens on; null: what vLLM takes for the host's",
    )
    port: int = Field(0, ge=0, le=65535, description="First rank's port; 0: any free one")
    transports: list[TransportName] = Field(default=list(PREFERENCE), min_length=1)
    nixl_backend: str = "UCX"
    nixl_params: dict[str, str] = Field(default_factory=dict)
    nixl_num_threads: int = Field(0, ge=0, le=64)
    nixl_tcp: bool = False
    storage_path: Path | None = None
    storage_max_bytes: int = Field(8 << 30, gt=0)
    storage_fsync: bool = False
    storage_checksum: ChecksumName = "keyed"
    staging_bytes: int = Field(
        64 << 20, gt=0, description="On GPUs: device memory for transfers; as much is pinned"
    )
    lease_s: float = Field(30.0, gt=0)
    lease_limit_s: float = Field(
        600.0, gt=0, description="A lease's total life, however often its consumer renews it"
    )
    load_deadline_s: float = Field(30.0, gt=0)
    load_threads: int = Field(8, ge=1, le=256, description="Loads at once from one producer")
    strict: bool = False
    stream: bool = Field(
        True, description="Decode may fetch a prompt's blocks while prefill still computes it"
    )

    @property
    def device_bytes(self) -> int:
        """Bytes per GPU that transfers may use, in addition to the cache."""
        return self.staging_bytes + ("nccl" in self.transports) * NCCL_RESERVE_BYTES

    @property
    def nixl(self) -> NixlSettings:
        """The settings of the transport nixl."""
        return NixlSettings(
            self.nixl_backend, self.nixl_params, self.nixl_num_threads, self.nixl_tcp
        )

    def storage(self, secret: bytes) -> Storage:
        """Folder and limits of the shared storage transport. secret: the deployment's."""
        return Storage(
            folder_or_own(self.storage_path, "handoffs"),
            self.storage_max_bytes,
            self.storage_fsync,
            Checksum.named(self.storage_checksum, b"disagg handoff files", secret),
        )


def read_settings(extra_config: dict[str, Any]) -> ConnectorSettings:
    """Parse the extra config; raises `ConfigError`."""
    return parse(ConnectorSettings, extra_config)
