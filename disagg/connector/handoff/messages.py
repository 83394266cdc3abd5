"""What the two halves tell each other, once per engine step.

Pickled by vLLM between its own processes, so these are plain dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from disagg.transport.control.client import Endpoint


@dataclass(frozen=True)
class Grant:
    """Scheduler -> worker: keep these blocks under a lease."""

    lease: int
    request_id: str
    block_ids: list[int]
    seconds: float


@dataclass(frozen=True)
class HandoffLoad:
    """Scheduler -> worker: fill `block_ids` with the lease's `spans`, counted in units.

    A unit is `unit` tokens; the first one is unit `first` of `block_ids`, which cover all of them.
    `endpoints` has one entry per rank of the producer, one pipeline stage after the other;
    `layers` says how many regions each stage has, the producer's and then ours. `problem` marks a
    load that was refused already and is only to be reported as failed (strict mode).
    """

    request_id: str
    lease: int
    endpoints: list[Endpoint]
    layers: tuple[list[int], list[int]]
    unit: int
    spans: tuple[tuple[int, int], ...]
    first: int
    block_ids: list[int]
    problem: str | None = None


@dataclass(frozen=True)
class LeaseMessage:
    """Scheduler -> worker: end or renew a lease that another engine holds for us."""

    lease: int
    endpoints: list[Endpoint]


@dataclass
class StepWork(KVConnectorMetadata):
    """Everything the scheduler half wants done in this step. `revoked`: all leases below that
    number end, whoever waits for them."""

    grants: list[Grant] = field(default_factory=list)
    loads: list[HandoffLoad] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[LeaseMessage] = field(default_factory=list)
    renewals: list[LeaseMessage] = field(default_factory=list)
    revoked: int = 0


@dataclass(frozen=True)
class LoadReport:
    """Worker -> scheduler: how one rank's load ended. `outcome`: loaded, failed or aborted."""

    request_id: str
    outcome: str
    transport: str
    num_bytes: int
    seconds: float
    reason: str | None = None


@dataclass(frozen=True)
class LeaseReport:
    """Worker -> scheduler: one rank's lease ended. `outcome`: fetched, aborted or expired."""

    request_id: str
    outcome: str


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What ended since the last step, over all ranks."""

    loads: list[LoadReport] = field(default_factory=list)
    leases: list[LeaseReport] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        return StepReport(self.loads + other.loads, self.leases + other.leases)


@dataclass(frozen=True)
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once: where this rank's control channel listens, if it produces, and how
    many regions its cache has."""

    endpoint: Endpoint | None
    regions: int
