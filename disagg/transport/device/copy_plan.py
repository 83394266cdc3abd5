"""Plans the kernel's copies: its tables, and the chunks of a fetch.

A selection's rows are numbered region by region, unit by unit: row = region * units + unit. Their
bytes in this order are the wire order that all transports share. Pure arithmetic: it accesses no
blocks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.transport.blocks import BlockCache, Ints, Selection

# The kernel's table, int64 [regions, COLUMNS]: base, block, unit, outer and inner stride of the
# read side, the same of the written side, pieces per inner axis, bytes per piece, bytes per row.
COLUMNS = 13
WORDS = (16, 8, 4, 2, 1)
_MAX_UNITS = 2**31 - 1

Units = npt.NDArray[np.int32]


class Chunk(NamedTuple):
    """Rows [first, first + rows): the bytes [at, at + size) of the wire."""

    first: int
    rows: int
    at: int
    size: int


@dataclass(frozen=True, eq=False)
class Move:
    """Rows from one side to the other. A side is a cache, or a chunk whose address comes with the
    launch. table: int64 [regions, COLUMNS]; from_units, to_units: int32 [units, 2], None for a
    chunk; row_bytes: int64 [regions]; word: bytes that one thread copies at once."""

    table: Ints
    from_units: Units | None
    to_units: Units | None
    units: int
    row_bytes: Ints
    word: int

    @property
    def size(self) -> int:
        """Bytes in total."""
        return int(self.row_bytes.sum()) * self.units

    @property
    def whole(self) -> Chunk:
        """All rows as one chunk."""
        return Chunk(0, self.units * len(self.row_bytes), 0, self.size)

    def chunks(self, limit: int) -> list[Chunk]:
        """All rows in order, in chunks of at most `limit` bytes.

        Raises `ValueError` if a single row is larger.
        """
        if self.units and self.size <= limit:
            return [self.whole]
        found: list[Chunk] = []
        first = rows = at = size = 0
        for region, row in enumerate(self.row_bytes.tolist()):
            if row > limit:
                raise ValueError(f"a row of {row} bytes does not fit a chunk of {limit}")
            left = self.units
            while left:
                take = min(left, (limit - size) // row)
                if take == 0:
                    found.append(Chunk(first, rows, at, size))
                    first, rows, at, size = first + rows, 0, at + size, 0
                    continue
                rows, size, left = rows + take, size + take * row, left - take
            assert first + rows == (region + 1) * self.units
        if rows:
            found.append(Chunk(first, rows, at, size))
        return found


@dataclass(frozen=True)
class _Side:
    """Per region: the address of its first row, and strides of blocks, units, heads and tokens."""

    base: list[int]
    strides: list[tuple[int, int, int, int]]


@dataclass(frozen=True, eq=False)
class _Route:
    """A move without its units, for any blocks. wire: the table's column of a chunk's bases, which
    are given for one unit per region; None between two caches."""

    table: Ints
    wire: int | None
    row_bytes: Ints
    word: int

    def move(self, count: int, from_units: Units | None, to_units: Units | None) -> Move:
        if count > _MAX_UNITS:
            raise ValueError(f"{count} units are more than {_MAX_UNITS}")
        table = self.table
        if self.wire is not None:
            table = table.copy()
            table[:, self.wire] *= count
        return Move(table, from_units, to_units, count, self.row_bytes, self.word)


# Cached per cache: computing a route takes longer than copying some blocks.
_routes: weakref.WeakKeyDictionary[BlockCache, dict[Hashable, _Route]] = weakref.WeakKeyDictionary()
_MOST_ROUTES = 64


def gather(cache: BlockCache, selection: Selection) -> Move:
    """From blocks to chunks."""

    def make() -> _Route:
        return _route(cache, selection, _of_cache(cache, selection), _of_wire(cache, selection), 5)

    route = _known(cache, ("gather", *_kind(selection)), make)
    return route.move(selection.count, _units(cache, selection), None)


def scatter(cache: BlockCache, selection: Selection) -> Move:
    """From chunks to blocks."""

    def make() -> _Route:
        return _route(cache, selection, _of_wire(cache, selection), _of_cache(cache, selection), 0)

    route = _known(cache, ("scatter", *_kind(selection)), make)
    return route.move(selection.count, None, _units(cache, selection))


def across(
    ours: BlockCache,
    mine: Selection,
    theirs: BlockCache,
    its: Selection,
    addresses: Sequence[int],
) -> Move:
    """From another cache's blocks, whose regions are mapped at `addresses`, to our own.

    Raises `ValueError` unless both selections mean the same bytes.
    """

    def make() -> _Route:
        if _rows(ours, mine) != _rows(theirs, its):
            raise ValueError("the two sides do not mean the same selection")
        return _route(ours, mine, _of_cache(theirs, its, addresses), _of_cache(ours, mine), None)

    if (mine.unit, mine.count) != (its.unit, its.count):
        raise ValueError("the two sides do not mean the same selection")
    key = (weakref.ref(ours), tuple(addresses), *_kind(mine), *_kind(its))
    route = _known(theirs, key, make)
    return route.move(mine.count, _units(theirs, its), _units(ours, mine))


def _known(cache: BlockCache, key: Hashable, make: Callable[[], _Route]) -> _Route:
    routes = _routes.setdefault(cache, {})
    found = routes.get(key)
    if found is None:
        if len(routes) >= _MOST_ROUTES:
            routes.clear()
        found = routes[key] = make()
    return found


def _kind(selection: Selection) -> tuple[Hashable, ...]:
    """The part of a selection that its route depends on."""
    return selection.unit, selection.heads, selection.regions


def _units(cache: BlockCache, selection: Selection) -> Units:
    """int32 [units, 2]: each unit's block, and its number within the block."""
    per_block = cache.block_size // selection.unit
    ids = np.asarray(selection.block_ids, dtype=np.int32)
    found = np.zeros((selection.count, 2), np.int32)
    if per_block == 1:
        found[:, 0] = ids[selection.first : selection.first + selection.count]
        return found
    units = np.arange(selection.first, selection.first + selection.count)
    found[:, 0], found[:, 1] = ids[units // per_block], units % per_block
    return found


def _rows(cache: BlockCache, selection: Selection) -> list[int]:
    """Bytes per row of each covered region."""
    return [cache.row_bytes(index, selection) for index in cache.covered(selection)]


def _of_cache(
    cache: BlockCache, selection: Selection, addresses: Sequence[int] | None = None
) -> _Side:
    first = selection.heads[0] if selection.heads else 0
    base, strides = [], []
    for index in cache.covered(selection):
        region = cache.regions[index]
        block, head, token, _ = region.memory.stride()
        address = addresses[index] if addresses is not None else region.memory.data_ptr()
        base.append(address + first * head)
        strides.append((block, selection.unit * token, head, token))
    return _Side(base, strides)


def _of_wire(cache: BlockCache, selection: Selection) -> _Side:
    """Consecutive rows from the wire's byte 0 on, as if each region had one row."""
    base, strides, at = [], [], 0
    for index in cache.covered(selection):
        region = cache.regions[index]
        heads, content = cache.head_count(index, selection), region.memory.shape[3]
        row = cache.row_bytes(index, selection)
        if region.is_token_major:
            head, token = content, heads * content
        else:
            head, token = selection.unit * content, content
        base.append(at)
        strides.append((row, 0, head, token))
        at += row
    return _Side(base, strides)


def _route(
    cache: BlockCache, selection: Selection, source: _Side, target: _Side, wire: int | None
) -> _Route:
    rows = _rows(cache, selection)
    table = np.zeros((len(rows), COLUMNS), np.int64)
    for number, index in enumerate(cache.covered(selection)):
        region, heads = cache.regions[index], cache.head_count(index, selection)
        axes = [
            (heads, 2),
            (selection.unit, 3),
        ]  # size, and index of its stride in a side's strides
        if region.is_token_major:
            axes.reverse()
        piece = region.memory.shape[3]
        sides = (source.strides[number], target.strides[number])
        # An axis whose pieces are adjacent on both sides becomes one longer piece.
        while axes and (axes[-1][0] == 1 or all(side[axes[-1][1]] == piece for side in sides)):
            piece *= axes.pop()[0]
        axes = [(1, -1)] * (2 - len(axes)) + axes
        row = table[number]
        for at, side, strides in ((0, source, sides[0]), (5, target, sides[1])):
            inner = [0 if axis < 0 else strides[axis] for _, axis in axes]
            row[at : at + 5] = (side.base[number], strides[0], strides[1], *inner)
        row[10:] = axes[1][0], piece, rows[number]
    word = math.gcd(*np.delete(table, 10, axis=1).reshape(-1).tolist(), WORDS[0])
    return _Route(
        table, wire, np.array(rows, np.int64), next(size for size in WORDS if word % size == 0)
    )
