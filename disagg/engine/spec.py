"""What travels between the cluster and an engine's actor: plain, picklable values.

Never holds a live object, and never imports vLLM or Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.config import Deployment, PoolSection, Role


@dataclass(frozen=True)
class EngineSpec:
    """One engine to start, as the cluster asks for it."""

    deployment: Deployment
    role: Role
    index: int
    run_id: str
    """Unique for one run of one deployment."""
    storage_path: str
    """Folder of this run for handoff files."""
    loopback: bool
    """Everything is on one machine: listen on 127.0.0.1 only."""
    secret: str = field(repr=False)
    engine_key: str = field(repr=False)
    """What the router shows to the engines, and nobody else has."""

    @property
    def name(self) -> str:
        """The engine's name, as people see it: `prefill-0`."""
        return f"{self.role}-{self.index}"

    @property
    def pool(self) -> PoolSection:
        """The YAML's section of its role."""
        return self.deployment.pool(self.role)


@dataclass(frozen=True)
class EngineHome:
    """Where an engine's process lives; known before vLLM is imported."""

    node_id: str
    address: str
    pid: int
    """The actor's process, and the process group of all of vLLM's."""
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
    """What vLLM resolved: `name`, `root`, `dtype`, `max_model_len`, `block_size`, `num_blocks`."""
    startup_s: float


@dataclass(frozen=True)
class EngineFailure:
    """Why an engine did not start, or ended: one line, and its last log lines."""

    cause: str
    log_tail: str
