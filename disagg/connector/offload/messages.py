"""Messages between the scheduler and the worker half, one each way per engine step.

Pickled by vLLM between its own processes, so these are plain dataclasses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from disagg.store.base import Key, Slot

SLOW = "slow"
"""Reason of a load, and of its reads, that took longer than to compute the prompt."""


@dataclass(frozen=True)
class Store:
    """Scheduler -> worker: copy blocks into slots, a chunk's blocks per slot.

    Null blocks at a chunk's beginning stand for blocks that are not stored. complete: earlier steps
    computed the blocks, so that the copy need not wait for the end of this one.
    """

    job: int
    slots: list[Slot]
    block_ids: list[int]
    complete: bool = False


@dataclass(frozen=True)
class Filling:
    """For one KV cache group: fill `block_ids` from slots, in prompt order. skip: the first slot's
    blocks to skip."""

    slots: list[Slot]
    skip: int
    block_ids: list[int]


@dataclass(frozen=True)
class TierLoad:
    """Scheduler -> worker: fill blocks of all groups. from_shared: slots to read from the shared
    tier first. limit_s: how long these reads may take together; then the load fails (`SLOW`)."""

    job: int
    request_id: str
    fillings: list[Filling]
    from_shared: frozenset[Key] = frozenset()
    limit_s: float = math.inf


@dataclass(frozen=True)
class Write:
    """Scheduler -> worker: write slots into the shared tier."""

    job: int
    slots: list[Slot]


@dataclass
class OffloadWork(KVConnectorMetadata):
    """Scheduler -> worker: everything to do in this step.

    flush: stores to finish before the step, as its forward pass overwrites their blocks.
    overwritten: by store, the blocks that vLLM may have overwritten before the worker gets this.
    Their chunks fail, unless the worker knows that the store ended before. touched: keys that were
    used; what the shared tier has of them is marked as used. layout: in the first step, the
    scheduler half's `SlotLayout`.
    """

    stores: list[Store] = field(default_factory=list)
    loads: list[TierLoad] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)
    overwritten: dict[int, set[int]] = field(default_factory=dict)
    touched: list[Key] = field(default_factory=list)
    layout: str = ""


@dataclass(frozen=True)
class Done:
    """Worker -> scheduler: one rank's job ended.

    medium: vLLM's `transfer_type`, such as `GPU_to_CPU`. failed: the keys that were not moved.
    reason: of the first of them.
    """

    job: int
    medium: str
    num_bytes: int
    seconds: float
    failed: frozenset[Key] = frozenset()
    reason: str = ""


@dataclass(frozen=True)
class Read:
    """Worker -> scheduler: one rank's read of one slot's file ended."""

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
    """What ended since the last step, over all ranks. evicted: of the shared tier, chunks that
    this engine removed to free space."""

    done: list[Done] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    evicted: list[Key] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, OffloadReport)
        evicted = self.evicted + other.evicted
        return OffloadReport(self.done + other.done, self.reads + other.reads, evicted)
