"""The YAML that describes one deployment: one pydantic model per section, and its loading.

Imports neither torch, vLLM nor Ray, so that reading a file costs milliseconds, and must never
decide what needs the machine: ports, folders' rights and vLLM's own argument names are
checked in `disagg.preflight.checks`, secrets are read in `disagg.credentials`. Unknown keys are
refused; nothing wrong becomes a default.

A relative path in the file is taken from the folder in which `disagg` was started, as one on
the command line is. Loading makes it absolute, because engines run in other folders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from disagg.config_file import explain, read_mapping
from disagg.errors import ConfigError
from disagg.transport.names import PREFERENCE, TransportName

Role = Literal["prefill", "decode"]
# Whose contract of `kv_transfer_params` the engines behind a router speak.
ConnectorName = Literal["disagg", "nixl", "example"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_local(checkpoint: str) -> bool:
    """Whether a checkpoint is a folder (there, or meant to be) rather than a hub's name."""
    return _HUB_NAME.fullmatch(checkpoint) is None or Path(checkpoint).is_dir()


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _absolute_checkpoint(checkpoint: str) -> str:
    return str(_absolute(Path(checkpoint))) if is_local(checkpoint) else checkpoint


def _numbers_as_text(env: Any) -> Any:
    # YAML reads `OMP_NUM_THREADS: 1` as a number. A bool has no one spelling: it is refused.
    if not isinstance(env, dict):
        return env
    return {
        name: str(value) if type(value) in (int, float) else value for name, value in env.items()
    }


def _each_once(names: list[TransportName]) -> list[TransportName]:
    if len(set(names)) != len(names):
        raise ValueError("names one twice; keep the first of each")
    return names


LocalPath = Annotated[Path, AfterValidator(_absolute)]
Checkpoint = Annotated[str, Field(min_length=1), AfterValidator(_absolute_checkpoint)]
Environment = Annotated[dict[str, str], BeforeValidator(_numbers_as_text)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which checkpoint to serve."""

    path: Checkpoint = Field(description="Checkpoint folder, or a hub name")
    served_name: str | None = Field(None, description="Name in the API; the path if not given")
    tokenizer: Checkpoint | None = None
    revision: str | None = None
    trust_remote_code: bool = False


class ResourcesSection(Section):
    """What one engine asks of Ray."""

    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    custom: dict[str, float] = Field(default_factory=dict, description="Ray's custom resources")
    labels: dict[str, str] = Field(
        default_factory=dict, description="Labels that its Ray node must have, as Ray selects them"
    )


class EngineSection(Section):
    """What all engines share; a pool's own values win."""

    args: dict[str, Any] = Field(
        default_factory=dict, description="vLLM engine arguments by their own names"
    )
    env: Environment = Field(default_factory=dict)
    startup_timeout_s: float = Field(600.0, gt=0)
    hang_timeout_s: float = Field(
        120.0,
        gt=3,
        description="An engine that makes no step for so long is ended and started again",
    )
    max_restarts: int = Field(
        5, ge=0, description="How often in a row an engine that dies is started again"
    )
    drain_timeout_s: float = Field(
        300.0, ge=0, description="How long an engine that goes may serve what it has"
    )
    placement: Literal["near", "spread"] = Field(
        "near", description="near: prefill and decode share nodes where there is room"
    )


class AutoscaleSection(Section):
    """How many engines a pool has, by what they have to do."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1)
    target_queue: float = Field(
        8.0, gt=0, description="Requests that one engine should have, running and waiting"
    )
    target_kv_usage: float = Field(0.8, gt=0, le=1, description="Of an engine's KV cache")
    cooldown_s: float = Field(
        60.0, ge=0, description="An engine goes when it was not needed for so long"
    )

    @model_validator(mode="after")
    def _in_order(self) -> AutoscaleSection:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        return self


class PoolSection(Section):
    """The engines of one role."""

    replicas: int = Field(1, ge=1, description="With autoscale: at the start")
    autoscale: AutoscaleSection | None = None
    resources: ResourcesSection = ResourcesSection()
    args: dict[str, Any] = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)

    @model_validator(mode="after")
    def _within(self) -> PoolSection:
        scale = self.autoscale
        if scale and not scale.min_replicas <= self.replicas <= scale.max_replicas:
            raise ValueError(
                f"replicas ({self.replicas}) is not within autoscale.min_replicas and "
                f"max_replicas ({scale.min_replicas} to {scale.max_replicas})"
            )
        return self


class StorageSection(Section):
    """The folder that handoff files pass through."""

    path: LocalPath | None = Field(
        None, description="Default: a folder of this user's in the temp dir"
    )
    max_bytes: int = Field(8 << 30, gt=0, description="A handoff that would pass it is refused")
    fsync: bool = False


class TransferSection(Section):
    """How KV blocks move."""

    transports: Annotated[list[TransportName], AfterValidator(_each_once)] = Field(
        default=list(PREFERENCE), min_length=1
    )
    storage: StorageSection = StorageSection()
    staging_bytes: int = Field(
        64 << 20,
        gt=0,
        description="On GPUs: set aside for transfers, of each rank; as much of the host is pinned",
    )
    lease_s: float = Field(30.0, gt=0, le=3600)
    load_deadline_s: float = Field(30.0, gt=0, le=3600)
    host: str | None = Field(
        None, description="Address of the control channel; default: the node's"
    )
    secret_env: str | None = Field(None, description="Environment variable with the secret")
    secret_file: LocalPath | None = None
    strict: bool = Field(False, description="Refuse a request for which no KV could be loaded")


class HostTierSection(Section):
    """Blocks that left the accelerator, in host memory."""

    max_bytes: int = Field(4 << 30, gt=0, description="Of each worker rank, taken at start")
    eviction: Literal["lru", "arc"] = "lru"


class DirectoryTierSection(Section):
    """Blocks in files that engines share, and that outlive them."""

    path: LocalPath = Field(description="A folder that all engines see")
    max_bytes: int = Field(64 << 30, gt=0, description="Of all files in it together")
    reset_keeps_files: bool = Field(
        False, description="Weights never change here: after a reset files are used as before"
    )


class TiersSection(Section):
    """Where KV blocks rest below the accelerator; without a tier they are computed again."""

    host: HostTierSection | None = None
    directory: DirectoryTierSection | None = Field(
        None, description="Goes through the host tier, a small one if none is given"
    )
    blocks_per_chunk: int = Field(1, ge=1, description="Blocks that are kept and moved as one")


class LimitsSection(Section):
    """Bounds of the router, each process's own."""

    max_body_bytes: int = Field(32 << 20, gt=0)
    max_prompt_tokens: int | None = Field(
        None, gt=0, description="Longest prompt; of text, four characters are taken for a token"
    )
    max_in_flight: int = Field(4096, gt=0, description="Requests in all; more wait")
    max_in_flight_per_engine: int = Field(512, gt=0)
    max_queued: int = Field(1024, ge=0, description="Requests that wait; more get 429")
    queue_timeout_s: float = Field(30.0, gt=0, description="Longest wait, then 429")
    connect_timeout_s: float = Field(5.0, gt=0)
    prefill_timeout_s: float = Field(300.0, gt=0)
    first_byte_timeout_s: float = Field(600.0, gt=0)
    between_bytes_timeout_s: float = Field(120.0, gt=0)
    receive_timeout_s: float = Field(60.0, gt=0, description="A client sends its request in it")
    unread_timeout_s: float = Field(
        120.0, gt=0, description="How long a client may read nothing of its answer"
    )
    drain_s: float = Field(
        30.0, ge=0, description="How long running requests may go on after SIGTERM"
    )


PolicyName = Literal["round_robin", "least_loaded", "prefix_affinity", "session_affinity"]


class PairingSection(Section):
    """How the router chooses an engine of each pool."""

    prefill: PolicyName = "least_loaded"
    decode: PolicyName = "least_loaded"
    session_header: str = Field(
        "x-session-id", pattern=r"^[A-Za-z0-9-]+$", description="What session_affinity goes by"
    )
    local_prefill_tokens: int = Field(
        64, ge=0, description="Decode computes up to so many tokens itself: no handoff"
    )
    prefill_wait_share: float | None = Field(
        None,
        ge=0,
        description="Decode computes a prompt itself that would wait longer for prefill, by this "
        "share of the time to read it for each request that the decode engine has, or by four "
        "times as much if it would not be among the slowest tenth; without it, never",
    )
    first_token: Role = Field(
        "decode",
        description="Whose first token a stream begins with: prefill's is there a handoff sooner",
    )
    first_token_hold_s: float = Field(
        0.0,
        ge=0,
        description="How long prefill's first token may wait for decode's: so much shorter is the "
        "pause behind it; not of who waited longer than most",
    )

    @model_validator(mode="after")
    def _holds_prefills(self) -> PairingSection:
        if self.first_token_hold_s and self.first_token != "prefill":
            raise ValueError(
                f"first_token_hold_s ({self.first_token_hold_s:g}) holds prefill's first token, "
                "and streams begin with decode's; set first_token: prefill, or leave it out"
            )
        return self


class RouterSection(Section):
    """The OpenAI endpoint."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    api_keys_env: str | None = Field(
        None, description="Environment variable: NAME=KEY, or bare keys, with commas between"
    )
    api_keys_file: LocalPath | None = Field(None, description="The same, or one a line")
    tls_cert_file: LocalPath | None = Field(None, description="PEM; https with tls_key_file")
    tls_key_file: LocalPath | None = None
    processes: int = Field(1, ge=1, le=64, description="Router processes that share the port")
    probe_interval_s: float = Field(2.0, gt=0, description="How often engines are asked for health")
    migration_limit: int = Field(
        1, ge=0, description="How often a stream whose engine died goes on elsewhere"
    )
    access_log: bool = Field(True, description="One JSON line a request on standard output")
    pairing: PairingSection = PairingSection()
    limits: LimitsSection = LimitsSection()


class Deployment(Section):
    """The whole file."""

    name: str = Field("disagg", pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    model: ModelSection
    engine: EngineSection = EngineSection()
    prefill: PoolSection = PoolSection()
    decode: PoolSection = PoolSection()
    transfer: TransferSection = TransferSection()
    tiers: TiersSection = TiersSection()
    router: RouterSection = RouterSection()

    def pool(self, role: Role) -> PoolSection:
        """The section of one role."""
        return self.prefill if role == "prefill" else self.decode

    def args(self, role: Role) -> dict[str, Any]:
        """The user's engine arguments of one role: the pool's own win."""
        return {**self.engine.args, **self.pool(role).args}

    def spreads_ranks(self, role: Role) -> bool:
        """Whether an engine's ranks are Ray's to place, on several nodes if need be."""
        return self.args(role).get("distributed_executor_backend") == "ray"

    def with_replicas(self, replicas: Mapping[Role, int]) -> Deployment:
        """The same with other numbers of engines."""
        pools: dict[str, Any] = {
            role: self.pool(role).model_copy(update={"replicas": count})
            for role, count in replicas.items()
        }
        return self.model_copy(update=pools)


def load_router(path: Path | None, options: Mapping[str, Any]) -> RouterSection:
    """The settings of a router that stands alone: a file with what else is in `router`, and
    options, which win. Raises ConfigError with one line for each problem."""
    content = read_mapping(path) if path is not None else {}
    pairing = content.get("pairing", {})
    if isinstance(pairing, dict):
        pairing = {**pairing, **options.get("pairing", {})}
    try:
        return RouterSection.model_validate({**content, **options, "pairing": pairing})
    except ValidationError as error:
        raise ConfigError(explain(error, RouterSection)) from error


def load(path: str | Path) -> Deployment:
    """Read one file. Raises ConfigError with one line for each problem."""
    content = read_mapping(Path(path))
    try:
        return Deployment.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explain(error, Deployment)) from error


def replicas_of(words: Sequence[str]) -> dict[Role, int]:
    """Of `prefill=3`, `decode=2`. Raises ConfigError."""
    found: dict[Role, int] = {}
    for word in words:
        role, _, count = word.partition("=")
        if role not in ("prefill", "decode"):
            raise ConfigError(f"{word!r}: write prefill=N or decode=N")
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"{role}: {count!r} — must be a whole number, at least 1")
        if role in found:
            raise ConfigError(f"{role}: given twice; keep one")
        found["prefill" if role == "prefill" else "decode"] = int(count)
    return found
