"""What the two halves tell each other, once per engine step.

Pickled by vLLM between its own processes, so these are plain dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from disagg.store.base import Key, Slot


@dataclass(frozen=True)
class Store:
    """Scheduler -> worker: copy blocks into slots, as many for each slot as a chunk has.

    The null block stands at a chunk's beginning for blocks that are not kept.
    """

    job: int
    slots: list[Slot]
    block_ids: list[int]


@dataclass(frozen=True)
class Filling:
    """Of one KV cache group: `block_ids`, to be filled from slots in prompt order. `skip`: blocks
    of the first slot that are not wanted."""

    slots: list[Slot]
    skip: int
    block_ids: list[int]


@dataclass(frozen=True)
class TierLoad:
    """Scheduler -> worker: fill blocks of all groups. `from_files`: slots to be read from the
    directory before."""

    job: int
    request_id: str
    fillings: list[Filling]
    from_files: frozenset[Key] = frozenset()


@dataclass(frozen=True)
class Write:
    """Scheduler -> worker: write slots into the directory."""

    job: int
    slots: list[Slot]


@dataclass
class OffloadWork(KVConnectorMetadata):
    """Everything the scheduler half wants done in this step.

    `flush`: stores whose blocks are about to be overwritten, and must be done before. `touched`:
    keys of which files, if there are any, were of use.
    """

    stores: list[Store] = field(default_factory=list)
    loads: list[TierLoad] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)
    touched: list[Key] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """Worker -> scheduler: how one rank's job, or one slot's read, ended.

    `medium`: `GPU_to_CPU` and its like, vLLM's `transfer_type`. `failed`: the keys that did not
    arrive. `reason` of the first of them.
    """

    job: int
    medium: str
    num_bytes: int
    seconds: float
    failed: frozenset[Key] = frozenset()
    reason: str = ""


@dataclass(frozen=True)
class Read:
    """Worker -> scheduler: one rank has read one slot's file, or could not."""

    job: int
    slot: Slot
    num_bytes: int
    seconds: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the slot holds the chunk."""
        return not self.reason


@dataclass
class OffloadReport(KVConnectorWorkerMetadata):
    """What ended since the last step, over all ranks. `evicted`: files that this engine removed to
    make room."""

    done: list[Done] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    evicted: list[Key] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, OffloadReport)
        evicted = self.evicted + other.evicted
        return OffloadReport(self.done + other.done, self.reads + other.reads, evicted)
