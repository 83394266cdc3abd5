"""The keys of `kv_connector_extra_config` of `DisaggOffloadConnector`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from disagg.checksums import ChecksumName
from disagg.connector.extra_config import parse
from disagg.errors import ConfigError


class ObjectSettings(BaseModel):
    """The tier of an object store; see docs/tiers.md."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(description="s3://bucket/prefix, or valkey://host:port/database")
    endpoint: str | None = Field(None, description="S3: the server's URL")
    region: str | None = None
    max_bytes: int | None = Field(None, gt=0, description="S3: all objects below the prefix")
    ttl_s: float | None = Field(None, gt=0, description="Seconds after which an object goes")
    checksum: ChecksumName = "keyed"
    connect_timeout_s: float = Field(2.0, gt=0)
    timeout_s: float = Field(5.0, gt=0, description="For one object")
    credentials_file: Path | None = None
    ca_file: Path | None = None
    reset_keeps_objects: bool = False


class OffloadSettings(BaseModel):
    """The keys of `kv_connector_extra_config`; sizes are per worker rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_bytes: int = Field(256 << 20, gt=0, description="The host memory tier's pool")
    eviction: Literal["turns", "lru", "arc"] = "turns"
    directory: Path | None = Field(None, description="The directory tier's folder; none: no tier")
    directory_bytes: int = Field(64 << 30, gt=0, description="All files of the folder together")
    directory_checksum: ChecksumName = Field(
        "keyed", description="keyed: files by holders of the deployment's secret only"
    )
    reset_keeps_files: bool = Field(
        False, description="Weights never change here: after a reset files are used as before"
    )
    objects: ObjectSettings | None = Field(None, description="In place of the directory")
    blocks_per_chunk: int = Field(1, ge=1, description="Engine blocks that are moved as one")
    load_deadline_s: float = Field(30.0, gt=0, description="Then the prompt is computed")
    staging_bytes: int = Field(
        64 << 20, gt=0, description="Of a GPU's memory, for blocks on their way to and from tiers"
    )
    lookup_deadline_s: float = Field(1.0, gt=0, description="Longest wait for the shared tier")
    engine_name: str | None = Field(None, description="Name in logs")

    @property
    def reset_keeps_chunks(self) -> bool:
        """Whether the shared tier's chunks are used after a reset."""
        if self.objects is not None:
            return self.objects.reset_keeps_objects
        return self.reset_keeps_files

    @property
    def checksum(self) -> ChecksumName:
        """Of the shared tier."""
        return self.directory_checksum if self.objects is None else self.objects.checksum


def read_settings(extra_config: dict[str, Any]) -> OffloadSettings:
    """Parse the extra config; raises `ConfigError`."""
    settings = parse(OffloadSettings, extra_config)
    if settings.directory is not None and settings.objects is not None:
        raise ConfigError(
            "kv_connector_extra_config: directory and objects are both set; remove one of them"
        )
    return settings
