"""The sections of KV blocks: how they move, and where they rest."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
)

from disagg.checksums import ChecksumName
from disagg.config.base import Environment, LocalPath, Section
from disagg.config_units import Bytes, Seconds
from disagg.transport.names import PREFERENCE, TransportName


def _each_once(names: list[TransportName]) -> list[TransportName]:
    if len(set(names)) != len(names):
        raise ValueError("names a transport twice; keep the first one")
    return names


class StorageSection(Section):
    """The folder for handoff files of the transport shared_storage."""

    path: LocalPath | None = Field(
        None, description="Default: this user's folder in the temporary directory"
    )
    max_bytes: Bytes = Field(
        8 << 30, gt=0, description="Limit of all files; a handoff that would exceed it is refused"
    )
    fsync: bool = False
    checksum: ChecksumName = Field(
        "keyed",
        description="keyed: files that another user put there are refused; fast: found damage only",
    )


class NixlSection(Section):
    """NIXL, of the transport nixl."""

    backend: str = Field("UCX", min_length=1, description="NIXL's plugin")
    params: Environment = Field(
        default_factory=dict, description="Parameters that NIXL's plugin is given"
    )
    num_threads: int = Field(0, ge=0, le=64, description="The plugin's own threads in each worker")
    tcp: bool = Field(
        False,
        description="Whether blocks may go over UCX's TCP too; there a consumer that dies or gives "
        "up while it fetches can end the producer's process",
    )


class TransferSection(Section):
    """How KV blocks move."""

    transports: Annotated[list[TransportName], AfterValidator(_each_once)] = Field(
        default=list(PREFERENCE), min_length=1
    )
    storage: StorageSection = StorageSection()
    nixl: NixlSection = NixlSection()
    staging_bytes: Bytes = Field(
        64 << 20,
        gt=0,
        description="On GPUs: bytes that each rank reserves on its GPU for transfers; it pins as "
        "many bytes of host memory",
    )
    lease_s: Seconds = Field(
        30.0, gt=0, le=3600, description="Seconds that prefill keeps a prompt's blocks for decode"
    )
    lease_limit_s: Seconds = Field(
        600.0,
        gt=0,
        le=86400,
        description="Seconds that prefill keeps a prompt's blocks at most, while decode's queue "
        "renews their lease",
    )
    load_deadline_s: Seconds = Field(
        30.0, gt=0, le=3600, description="Seconds after which a load of KV blocks fails"
    )
    host: str | None = Field(
        None, description="Address of the control channel; default: the node's address"
    )
    secret_env: str | None = Field(
        None, description="Environment variable with the deployment's secret"
    )
    secret_file: LocalPath | None = Field(None, description="File with the deployment's secret")
    strict: bool = Field(False, description="Refuse a request whose KV cache cannot be loaded")
    stream: bool = Field(
        True, description="Move blocks while prefill still computes a prompt of several steps"
    )


class HostTierSection(Section):
    """Tier of KV blocks in host memory."""

    max_bytes: Bytes = Field(
        4 << 30, gt=0, description="Bytes that each worker rank allocates at its start"
    )
    eviction: Literal["turns", "lru", "arc"] = "turns"


class DirectoryTierSection(Section):
    """Tier of KV blocks in files, which engines share and which outlive them."""

    path: LocalPath = Field(description="A folder that all engines can read and write")
    max_bytes: Bytes = Field(
        64 << 30, gt=0, description="Limit of all files in the folder together"
    )
    checksum: ChecksumName = Field(
        "keyed",
        description="keyed: only files of engines with the same secret are used; fast: all "
        "undamaged files are used",
    )
    reset_keeps_files: bool = Field(
        False,
        description="Use the files also after a reset of the prefix cache; only for weights that "
        "never change",
    )


class TiersSection(Section):
    """Tiers for KV blocks outside the GPU. Blocks that no tier has are computed again."""

    host: HostTierSection | None = None
    directory: DirectoryTierSection | None = Field(
        None, description="Needs the host tier; without one, a small host tier is made"
    )
    blocks_per_chunk: int = Field(1, ge=1, description="Blocks that are stored and moved together")
