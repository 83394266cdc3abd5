"""Messages between the scheduler and the worker half, one each way per engine step.

Pickled by vLLM between its own processes, so these are plain dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from disagg.transport.control.client import Endpoint
from disagg.transport.fetch import LeaseName


@dataclass(frozen=True)
class Grant:
    """Scheduler -> worker: keep these blocks under a lease."""

    lease: int
    request_id: str
    block_ids: list[int]
    seconds: float


@dataclass(frozen=True)
class Growing:
    """Scheduler -> worker: this request's prompt is begun. A lease of so many blocks grows."""

    lease: int
    request_id: str
    stream: bytes
    prompt: bytes
    blocks: int


@dataclass(frozen=True)
class Grown:
    """Scheduler -> worker: once all earlier steps are done, so many of a growing lease's tokens are
    final. epoch: how often its request has lost its blocks and begun anew. blocks: those added, as
    (position of the first, ids); none if it just began anew. is_traced: report when that was."""

    lease: int
    epoch: int
    tokens: int
    blocks: list[tuple[int, list[int]]]
    is_traced: bool = False


class SpanGrowth(NamedTuple):
    """How a span of a load grows. before: the unit with which its KV cache group begins. unit,
    block: tokens of a unit, and of the producer's block; the block is 0 if the span goes last."""

    before: int
    unit: int
    block: int

    def final(self, tokens: int) -> int:
        """The unit up to which it is final, when so many tokens are."""
        return self.before + tokens // self.block * (self.block // self.unit) if self.block else 0


@dataclass(frozen=True)
class HandoffLoad:
    """Scheduler -> worker: fill `block_ids` with the lease's `spans`, counted in units.

    unit: tokens per unit. first: the unit of `block_ids` that takes the first one. endpoints: one
    per producer rank, one pipeline stage after the other. layers: how many regions each stage has,
    the producer's and then ours. problem: the load was refused before; the worker only reports it
    as failed (strict mode). stream: of a lease that is to be followed; prompt: that prompt's
    digest; per_block: the units of one of our blocks; growth: of each span. is_traced: report what
    happens to it.
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
    stream: bytes = b""
    prompt: bytes = b""
    per_block: int = 1
    growth: tuple[SpanGrowth, ...] = ()
    is_traced: bool = False


@dataclass(frozen=True)
class Watch:
    """Scheduler -> worker: report when this request's stream begins. endpoint: the producer's first
    rank."""

    request_id: str
    endpoint: Endpoint
    stream: bytes
    prompt: bytes


@dataclass(frozen=True)
class LeaseMessage:
    """Scheduler -> worker: release or renew a lease that another engine holds for us."""

    lease: int
    endpoints: list[Endpoint]
    stream: bytes = b""

    @property
    def name(self) -> LeaseName:
        """What its producer knows it by."""
        return LeaseName(self.lease, self.stream)


@dataclass
class StepWork(KVConnectorMetadata):
    """Scheduler -> worker: everything to do in this step. queued: streams whose prompts wait for
    their first step. stopped: leases that no longer grow, and will not be granted. unwanted:
    streams that will never begin. watches: report when these streams begin. unwatched, cancels:
    request ids. revoked: end all leases with a lower number, even if a consumer still wants them.
    taken_back: end these."""

    queued: list[bytes] = field(default_factory=list)
    growing: list[Growing] = field(default_factory=list)
    grown: list[Grown] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    unwanted: list[bytes] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    unwatched: list[str] = field(default_factory=list)
    loads: list[HandoffLoad] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    releases: list[LeaseMessage] = field(default_factory=list)
    renewals: list[LeaseMessage] = field(default_factory=list)
    revoked: int = 0
    taken_back: list[int] = field(default_factory=list)


class LoadEvent(NamedTuple):
    """Of a traced load, on one rank. name: `chunk`: bytes came, in so many seconds; `grown` or
    `whole`: news of the lease that it follows. at_ns: since 1970. tokens: of the prompt, final by
    then; 0 unless `grown`: all. epoch: as in `Grown`."""

    name: str
    at_ns: int
    rank: int
    tokens: int
    epoch: int
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class LoadReport:
    """Worker -> scheduler: one rank's load ended. outcome: loaded, failed or aborted. hidden_bytes:
    those that came while prefill still computed the prompt. invalid: of a load that failed, the
    blocks that have to be computed, if those before them are right; none if all have to be. events:
    if it is traced."""

    request_id: str
    outcome: str
    transport: str
    num_bytes: int
    seconds: float
    reason: str | None = None
    hidden_bytes: int = 0
    invalid: tuple[int, ...] = ()
    events: tuple[LoadEvent, ...] = ()


@dataclass(frozen=True)
class LeaseReport:
    """Worker -> scheduler: one rank's lease ended, with its outcome (`LeaseTable`)."""

    request_id: str
    outcome: str


@dataclass(frozen=True)
class BegunReport:
    """Worker -> scheduler: a stream has begun, or never will."""

    request_id: str
    problem: str | None = None


@dataclass(frozen=True)
class GrownReport:
    """Worker -> scheduler: the first rank's lease has grown, if it is traced. at_ns: since 1970."""

    lease: int
    epoch: int
    tokens: int
    at_ns: int


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """What came to be since the last step, over all ranks. moved: request ids whose loads got on.
    whole: those whose prompts are computed."""

    loads: list[LoadReport] = field(default_factory=list)
    leases: list[LeaseReport] = field(default_factory=list)
    begun: list[BegunReport] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    grown: list[GrownReport] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, StepReport)
        return StepReport(
            self.loads + other.loads,
            self.leases + other.leases,
            self.begun + other.begun,
            self.moved + other.moved,
            self.grown + other.grown,
            self.whole + other.whole,
        )

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        parts = self.loads, self.leases, self.begun, self.moved, self.grown, self.whole
        return not any(parts)


@dataclass(frozen=True)
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once. endpoint: this rank's control channel, if it is a producer's.
    regions: how many its cache has."""

    endpoint: Endpoint | None
    regions: int
