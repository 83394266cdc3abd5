"""Copies between blocks on a device and the slots of pinned host memory in which tiers keep them.

A slot holds some blocks: region by region, and within a region block by block. One launch gathers
or scatters as many slots as fit into a chunk of staging memory, for all regions; each slot is then
one copy between chunk and slot. A slot larger than a chunk is copied in several parts.
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

# Columns of a move's table: the stride between slots, on the read and on the written side.
_FROM_SLOT, _TO_SLOT = 2, 7


class OffloadCopy(NamedTuple):
    """A slot's address, and the blocks that belong to it after its first `skip`."""

    address: int
    skip: int
    block_ids: Sequence[int]


class OffloadCopier:
    """Copies for one cache, with `blocks` blocks per slot. A chunk of the staging memory holds at
    least that many blocks of any layer. Safe for use from any thread."""

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
        """Copy blocks into their slots, after the event `after`.

        Complete when it returns; if it raises `TransferError`, nothing is written after that.
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
        """Copy slots into their blocks, likewise."""
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
        """The parts to put on the stream: rows of the loaded move, the address of a chunk for them,
        and the slots whose bytes from `Chunk.at` on they are. Ends when all work is done."""
        wait = Wait(deadline)
        # Not on the stream: work that waits there cannot be cancelled at the deadline.
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
    """Regions [first, end) of a slot: its bytes [at, at + size)."""

    regions: tuple[int, int]
    at: int
    size: int


def _spans(region_bytes: Sequence[int], limit: int) -> list[_Span]:
    """All regions of a slot, in spans of at most `limit` bytes."""
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
    """A move of one slot, changed to move several consecutive slots of a chunk."""
    table = move.table.copy()
    table[:, column] = move.size
    return replace(move, table=table)


def _with_units(move: Move, kept: Sequence[OffloadCopy]) -> Move:
    """The same move for other blocks; everything that does not depend on them is reused."""
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
