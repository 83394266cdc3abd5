"""The keys of `kv_connector_extra_config` of `DisaggOffloadConnector`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from disagg.checksums import ChecksumName
from disagg.connector.extra_config import parse


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
    blocks_per_chunk: int = Field(1, ge=1, description="Engine blocks that are moved as one")
    load_deadline_s: float = Field(30.0, gt=0, description="Then the prompt is computed")
    staging_bytes: int = Field(
        64 << 20, gt=0, description="Of a GPU's memory, for blocks on their way to and from tiers"
    )
    lookup_deadline_s: float = Field(1.0, gt=0, description="Longest wait for the directory")
    engine_name: str | None = Field(None, description="Name in logs")


def read_settings(extra_config: dict[str, Any]) -> OffloadSettings:
    """Parse the extra config; raises `ConfigError`."""
    return parse(OffloadSettings, extra_config)
