"""The values that the cluster and an engine's actor exchange. All are plain and picklable.

They must never hold a live object. This module must never import vLLM or Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.config import Deployment, PoolSection, Role


@dataclass(frozen=True)
class EngineSpec:
    """One engine to start."""

    deployment: Deployment
    role: Role
    index: int
    run_id: str
    """Unique for each run of a deployment."""
    storage_path: str
    """The run's folder for handoff files."""
    loopback: bool
    """The whole deployment is on one machine: listen on 127.0.0.1 only."""
    secret: str = field(repr=False)
    engine_key: str = field(repr=False)
    """The bearer key that the router sends to the engines. Nobody else has it."""
    rank: int = 0
    """Its data parallel rank. The ranks of a group have consecutive indices."""

    @property
    def name(self) -> str:
        """The engine's name in logs and dashboards, such as `prefill-0`."""
        return f"{self.role}-{self.index}"

    @property
    def ranks(self) -> int:
        """Data parallel ranks of its group; 1: it is alone."""
        return self.deployment.data_parallel_size(self.role)

    @property
    def group(self) -> str:
        """The name of its group, which is that of the group's first rank."""
        return f"{self.role}-{self.index - self.rank}"

    @property
    def pool(self) -> PoolSection:
        """The engine's section of the YAML: `prefill` or `decode`."""
        return self.deployment.pool(self.role)


@dataclass(frozen=True)
class EngineHome:
    """Where an engine's process runs. Known before vLLM is imported."""

    node_id: str
    address: str
    pid: int
    """The actor's process. It is also the process group of vLLM's processes."""
    guardian_pid: int
    log_path: str


@dataclass(frozen=True)
class EngineInfo:
    """A ready engine."""

    name: str
    role: Role
    url: str
    pid: int
    node_id: str
    model: dict[str, str | int]
    """Values that vLLM resolved: `name`, `root`, `dtype`, `max_model_len`, `block_size`,
    `num_blocks`."""
    startup_s: float
    kv_events: str | None = None
    kv_events_replay: str | None = None
    """ZMQ addresses at which it publishes KV events, and sends them again."""


@dataclass(frozen=True)
class EngineFailure:
    """Why an engine did not start, or ended. cause: one line. log_tail: its last log lines."""

    cause: str
    log_tail: str
