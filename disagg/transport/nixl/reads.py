"""What a fetch asks NIXL for: the pieces of memory on both sides, in reads of limited size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from disagg.errors import DataCorrupt
from disagg.transport.blocks import Alike, BlockCache, Ints, Selection
from disagg.transport.host.helper_threads import THREAD_BYTES

# One read ends soon, even where the call that begins it copies: 64 MiB take 20 ms. Plugins slow
# down with more pieces than this.
_READ_BYTES, _READ_PIECES = 64 << 20, 8192
# Merging neighbouring pieces pays only below this many bytes: within one host a piece costs UCX 3
# us besides its bytes, a third of the time that 64 KiB take.
_LONG = 256 << 10


class Pieces(NamedTuple):
    """Pieces of one read: int64 [n] addresses here and there, and lengths; one number if equal."""

    near: Ints
    far: Ints
    lengths: Ints | int


class Side(NamedTuple):
    """A selection of one side's cache, whose regions lie at these addresses."""

    cache: BlockCache
    addresses: Ints
    blocks: Selection

    def covered(self) -> Ints:
        """The addresses of the regions that the selection covers."""
        return self.addresses[slice(*(self.blocks.regions or (None,)))]


def reads(near: Side, far: Side, threads: int) -> Iterator[Pieces]:
    """All bytes of both selections, for so many threads. Short pieces that lie side by side on both
    sides are one. Raises `DataCorrupt` if the two do not mean the same bytes."""
    ours, theirs = near.cache.alike(near.blocks), far.cache.alike(far.blocks)
    if ours is None or theirs is None or ours.length != theirs.length:
        return _any_reads(_Stream(near), _Stream(far), threads)
    here, there = near.covered(), far.covered()
    if len(here) != len(there) or len(ours.begins) != len(theirs.begins):
        raise _mismatch()
    return _alike_reads((here, ours), (there, theirs), threads)


def _read_bytes(total: int, threads: int) -> int:
    """Bytes of one read. More reads than threads, as some threads start late or are slow."""
    if threads == 1:
        return _READ_BYTES
    return min(_READ_BYTES, max(THREAD_BYTES, -(-total // (2 * threads))))


def _alike_reads(
    near: tuple[Ints, Alike], far: tuple[Ints, Alike], threads: int
) -> Iterator[Pieces]:
    """The common case, with few numpy calls: each takes 10 to 20 us when cold."""
    (here, ours), (there, theirs) = near, far
    at_ours = (here[:, None] + ours.begins).reshape(-1)
    at_theirs = (there[:, None] + theirs.begins).reshape(-1)
    read_bytes = _read_bytes(len(at_ours) * ours.length, threads)
    most = max(1, min(-(-read_bytes // ours.length), _READ_PIECES))
    if ours.length < _LONG and len(at_ours):
        yield from _merged(at_ours, at_theirs, ours, most)
        return
    for first in range(0, len(at_ours), most):
        some = slice(first, first + most)
        yield Pieces(at_ours[some], at_theirs[some], ours.length)


def _merged(at_ours: Ints, at_theirs: Ints, alike: Alike, most: int) -> Iterator[Pieces]:
    """Pieces of these blocks, `most` blocks in each read; none reaches into another region."""
    length, count = alike.length, len(at_ours)
    is_first = np.ones(count, np.bool_)
    is_first[1:] = (np.diff(at_ours) != length) | (np.diff(at_theirs) != length)
    is_first[:: len(alike.begins)] = is_first[::most] = True
    firsts = np.flatnonzero(is_first)
    lengths = np.diff(firsts, append=count) * length
    at_ours, at_theirs = at_ours[firsts], at_theirs[firsts]
    bounds = np.searchsorted(firsts, np.arange(0, count, most)).tolist()
    for first, last in itertools.pairwise([*bounds, len(firsts)]):
        some = slice(first, last)
        yield Pieces(at_ours[some], at_theirs[some], lengths[some])


class _Stream:
    """One side's pieces, in wire order, as one stream of bytes. per_region: bytes of each."""

    def __init__(self, side: Side) -> None:
        every = side.cache.all_runs(side.blocks)
        self.begins: Ints = np.concatenate(
            [at + runs.offsets for at, runs in zip(side.covered(), every, strict=True)]
        )
        lengths = np.concatenate([runs.lengths for runs in every])
        self.ends: Ints = np.cumsum(lengths)
        self.skip: Ints = self.begins - (self.ends - lengths)
        sums = {id(runs): int(runs.lengths.sum()) for runs in every}
        self.per_region = [sums[id(runs)] for runs in every]

    def at(self, positions: Ints) -> Ints:
        """The addresses of these bytes of the stream."""
        found: Ints = positions + self.skip[np.searchsorted(self.ends, positions, "right")]
        return found


def _any_reads(near: _Stream, far: _Stream, threads: int) -> Iterator[Pieces]:
    """Cut where either side's pieces end."""
    if near.per_region != far.per_region:
        raise _mismatch()
    total = int(near.ends[-1]) if len(near.ends) else 0
    read_bytes = _read_bytes(total, threads)
    limits = np.arange(read_bytes, total, read_bytes)
    ends = np.union1d(np.union1d(near.ends, far.ends), limits)
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    lengths = ends - begins
    here, there = near.at(begins), far.at(begins)
    bounds = [0, *np.searchsorted(ends, limits, "right").tolist(), len(ends)]
    for first, last in itertools.pairwise(bounds):
        for at in range(first, last, _READ_PIECES):
            some = slice(at, min(last, at + _READ_PIECES))
            yield Pieces(here[some], there[some], lengths[some])


def _mismatch() -> DataCorrupt:
    return DataCorrupt("the two sides do not mean the same selection", reason="range")
