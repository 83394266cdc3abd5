"""Copies between blocks on a device and slots of pinned host memory, where tiers keep them.

A slot holds some blocks, region after region and of each region block after block. As many slots
as a chunk of staging memory holds are gathered or scattered by one launch, for all regions, and
each of them is one copy between chunk and slot; a slot larger than a chunk goes in several parts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from disagg.transport.blocks import BlockCache
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device import copy_plan
from disagg.transport.device.base import Wait
from disagg.transport.device.copy_plan import Chunk, Move, Units
from disagg.transport.device.staging import DEPTH, Slot, Staging

# Of a move's table: the stride between slots, of the side that is read and of the one written.
_FROM_SLOT, _TO_SLOT = 2, 7


class OffloadCopy(NamedTuple):
    """The address of a slot, and the blocks that belong to it after its first `skip`."""

    address: int
    skip: int
    block_ids: Sequence[int]


class OffloadCopier:
    """Copies for one cache, whose slots hold `blocks` blocks each; a chunk of the staging memory
    has room for that many of any layer. Safe for use from any thread."""

    def __init__(self, staging: Staging, cache: BlockCache, blocks: int) -> None:
        self._staging = staging
        slot = cache.whole(range(blocks))
        out, back = copy_plan.gather(cache, slot), copy_plan.scatter(cache, slot)
        self.slot_bytes = out.size
        self._out, self._back = _of_slots(out, _TO_SLOT), _of_slots(back, _FROM_SLOT)
        self._at_once = max(1, staging.chunk_bytes // self.slot_bytes)
        self._spans = _spans((out.row_bytes * blocks).tolist(), staging.chunk_bytes)

    def store(
        self, kept: Sequence[OffloadCopy], deadline: Deadline, after: Event | None = None
    ) -> None:
        """Copy blocks into their slots, behind `after`.

        All is there when it returns; when it raises (`TransferError`), nothing more will come.
        """
        with self._staging.sending.take(deadline) as slot:
            for chunk, memory, group in self._parts(slot, self._out, kept, deadline, after):
                slot.stream.launch(chunk, to_shift=memory - chunk.at)
                for number, one in enumerate(group):
                    device = memory + number * self.slot_bytes
                    slot.stream.copy(one.address + chunk.at, device, chunk.size)

    def load(
        self, kept: Sequence[OffloadCopy], deadline: Deadline, after: Event | None = None
    ) -> None:
        """The reverse, under the same terms."""
        with self._staging.receiving.take(deadline) as slot:
            for chunk, memory, group in self._parts(slot, self._back, kept, deadline, after):
                for number, one in enumerate(group):
                    device = memory + number * self.slot_bytes
                    slot.stream.copy(device, one.address + chunk.at, chunk.size)
                slot.stream.launch(chunk, from_shift=memory - chunk.at)

    def _parts(
        self,
        slot: Slot,
        move: Move,
        kept: Sequence[OffloadCopy],
        deadline: Deadline,
        after: Event | None,
    ) -> Iterator[tuple[Chunk, int, Sequence[OffloadCopy]]]:
        """What is to be put on the stream: rows of the loaded move, the address of a chunk for
        them, and the slots whose bytes from `Chunk.at` on they are. Ends when all is done."""
        wait = Wait(deadline)
        # Here, not on the stream: what waits there can't be taken back at the deadline.
        if after is not None:
            wait.until(after.is_done)
        memory, under_way = itertools.cycle(slot.chunks), deque[Event]()
        for first in range(0, len(kept), self._at_once):
            group = kept[first : first + self._at_once]
            of_group = _with_units(move, group)
            slot.stream.load(of_group)
            for regions, at, size in self._spans:
                if len(under_way) == DEPTH:
                    wait.until(under_way.popleft().is_done)
                rows = [region * of_group.units for region in regions]
                chunk = Chunk(rows[0], rows[1] - rows[0], at, size)
                yield chunk, next(memory).address, group
                under_way.append(slot.stream.record())
        while under_way:
            wait.until(under_way.popleft().is_done)


class _Span(NamedTuple):
    """Regions [first, end) of a slot, which are its bytes [at, at + size)."""

    regions: tuple[int, int]
    at: int
    size: int


def _spans(region_bytes: Sequence[int], limit: int) -> list[_Span]:
    """All regions of a slot, as many at a time as `limit` bytes hold."""
    spans: list[_Span] = []
    first = at = size = 0
    for region, more in enumerate(region_bytes):
        assert more <= limit
        if size + more > limit:
            spans.append(_Span((first, region), at, size))
            first, at, size = region, at + size, 0
        size += more
    return [*spans, _Span((first, len(region_bytes)), at, size)]


def _of_slots(move: Move, column: int) -> Move:
    """A move from or to one slot, as one of several that follow one another in a chunk."""
    table = move.table.copy()
    table[:, column] = move.size
    return replace(move, table=table)


def _with_units(move: Move, kept: Sequence[OffloadCopy]) -> Move:
    """The same move of other blocks: whatever of it does not depend on them is worked out once."""
    cache = [(block, 0) for one in kept for block in one.block_ids]
    slots = [
        (one.skip + place, number)
        for number, one in enumerate(kept)
        for place in range(len(one.block_ids))
    ]
    sides = _units(cache), _units(slots)
    from_units, to_units = sides if move.to_units is None else sides[::-1]
    return replace(move, from_units=from_units, to_units=to_units, units=len(cache))


def _units(places: list[tuple[int, int]]) -> Units:
    return np.array(places, np.int32).reshape(-1, 2)
