"""The sections of KV blocks: how they move, and where they rest."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from disagg.checksums import ChecksumName
from disagg.config.base import Environment, LocalPath, Section
from disagg.config_units import Bytes, Seconds
from disagg.object_urls import ObjectUrl, check_endpoint, check_options, parse_object_url
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


class ObjectTierSection(Section):
    """Tier of KV blocks in an object store, which engines on several machines share."""

    url: str = Field(
        description="s3://bucket/prefix, valkey://host:port/database (valkeys:// with TLS; "
        "redis:// and rediss:// are the same), or mooncake://master:port; without a user or a "
        "password"
    )
    endpoint: str | None = Field(
        None, description="S3: the server's URL; default: that of AWS in the region"
    )
    region: str | None = Field(None, description="S3: default: that of the environment")
    max_bytes: Bytes | None = Field(
        None,
        gt=0,
        description="S3: limit of all objects below the prefix together; default: 64 GiB. Valkey: "
        "set the server's maxmemory instead",
    )
    ttl_s: Seconds | None = Field(
        None,
        gt=0,
        description="Seconds after which an object goes. Valkey: since it was used, S3: since it "
        "was written; Mooncake has none",
    )
    checksum: ChecksumName = Field(
        "keyed",
        description="keyed: only objects of engines with the same secret are used; fast: all "
        "undamaged objects are used",
    )
    connect_timeout_s: Seconds = Field(
        2.0, gt=0, le=60, description="Seconds to connect; then the store counts as out"
    )
    timeout_s: Seconds = Field(
        5.0, gt=0, le=600, description="Seconds for one object; then the store counts as out"
    )
    credentials_file: LocalPath | None = Field(
        None,
        description="File of mode 600 on each node with lines NAME=VALUE: AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or VALKEY_USERNAME and VALKEY_PASSWORD; "
        "default: the engines' environment",
    )
    ca_file: LocalPath | None = Field(
        None, description="PEM file of the authority that signed the store's certificate"
    )
    reset_keeps_objects: bool = Field(
        False,
        description="Use the objects also after a reset of the prefix cache; only for weights that "
        "never change",
    )

    @field_validator("url")
    @classmethod
    def _is_an_object_url(cls, url: str) -> str:
        parse_object_url(url)
        return url

    @field_validator("endpoint")
    @classmethod
    def _is_an_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is not None:
            check_endpoint(endpoint)
        return endpoint

    @model_validator(mode="after")
    def _fits_its_kind(self) -> ObjectTierSection:
        check_options(self.parsed_url, dict(self))
        return self

    @property
    def parsed_url(self) -> ObjectUrl:
        """What the URL says."""
        return parse_object_url(self.url)


class TiersSection(Section):
    """Tiers for KV blocks outside the GPU. Blocks that no tier has are computed again."""

    host: HostTierSection | None = None
    directory: DirectoryTierSection | None = Field(
        None, description="Needs the host tier; without one, a small host tier is made"
    )
    objects: ObjectTierSection | None = Field(
        None, description="In place of the directory, for engines without a folder in common"
    )
    blocks_per_chunk: int = Field(1, ge=1, description="Blocks that are stored and moved together")

    @model_validator(mode="after")
    def _one_shared_tier(self) -> TiersSection:
        if self.directory is not None and self.objects is not None:
            raise ValueError(
                "tiers.directory and tiers.objects are both set; engines share one tier, so remove "
                "one of them"
            )
        return self

    @property
    def any(self) -> bool:
        """Whether there is a tier."""
        return bool(self.host or self.directory or self.objects)
