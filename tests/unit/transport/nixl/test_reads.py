"""The pieces that NIXL is asked for, copied one by one in place of NIXL, against plain indexing."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport import caches
from transport.caches import Shape

from disagg.errors import DataCorrupt
from disagg.transport.blocks import BlockCache
from disagg.transport.nixl import reads as module
from disagg.transport.nixl.reads import Pieces, Side, reads

# A block of a layer: 128 bytes, 8 KiB, 32 KiB, 256 KiB.
SIZES = [(2, 64), (64, 128), (64, 512), (128, 2048)]
LAYOUTS = [["LBHNC", "BLHNC"], ["LBNHC", "BLNHC"]]


def side(cache: BlockCache, block_ids: list[int]) -> Side:
    addresses = np.array([region.memory.data_ptr() for region in cache.regions], np.int64)
    return Side(cache, addresses, cache.whole(block_ids))


def lengths(pieces: Pieces) -> list[int]:
    equal = isinstance(pieces.lengths, int)
    return (
        [int(pieces.lengths)] * len(pieces.near) if equal else np.asarray(pieces.lengths).tolist()
    )


def copy(pieces: Pieces) -> int:
    """Does what NIXL would do. Returns the bytes."""
    for to, source, length in zip(
        pieces.near.tolist(), pieces.far.tolist(), lengths(pieces), strict=True
    ):
        ctypes.memmove(to, source, length)
    return sum(lengths(pieces))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_byte_arrives_once(data: st.DataObject) -> None:
    tokens, content = data.draw(st.sampled_from(SIZES))
    # Heads and tokens have one order on both sides (the fingerprint).
    layouts = data.draw(st.sampled_from(LAYOUTS))
    shapes = [
        Shape(24, 2, tokens, content // 2, layout=data.draw(st.sampled_from(layouts)))
        for _ in range(2)
    ]
    theirs, ours = (caches.make(shape, seed) for shape, seed in zip(shapes, (1, None), strict=True))
    count = data.draw(st.integers(0, 24))
    there, here = (data.draw(st.permutations(range(24)))[:count] for _ in range(2))
    if data.draw(st.booleans()):
        there, here = sorted(there), sorted(here)  # neighbours
    threads = data.draw(st.sampled_from([1, 2, 4]))
    moved = sum(copy(pieces) for pieces in reads(side(ours, here), side(theirs, there), threads))
    assert moved == count * ours.block_bytes
    for index in range(len(ours.regions)):
        expected = caches.tokens(theirs, index, there)
        assert torch.equal(caches.tokens(ours, index, here), expected)
    others = sorted(set(range(24)) - set(here))
    assert all(bool((region.memory[others] == caches.POISON).all()) for region in ours.regions)


def test_two_threads_get_more_reads_than_one() -> None:
    """Each is small enough to be one thread's share, and none is larger than one call may copy."""
    shape = Shape(512, 2, 64, 512, layers=4)  # 64 KiB blocks, 128 MiB
    cache = caches.make(shape, None)
    every = list(range(512))

    def sizes(count: int, threads: int) -> list[int]:
        half = side(cache, every[:count])
        return [sum(lengths(pieces)) >> 20 for pieces in reads(half, half, threads)]

    assert sizes(512, 1) == [64, 64]
    assert sizes(512, 2) == [32, 32, 32, 32]
    assert sizes(512, 4) == [16] * 8
    assert sizes(64, 2) == [8, 8], "less is not worth a thread"
    assert sizes(16, 2) == [4]
    assert sizes(0, 2) == []


# A block of 1 KiB has no fast way; one of 64 KiB has.
@pytest.mark.parametrize("shape", [Shape(layers=1), Shape(24, 2, 64, 512, layers=1)])
def test_short_neighbours_are_one_piece(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    cache = caches.make(shape, None)
    both = side(cache, [3, 4, 5, 9])
    (pieces,) = reads(both, both, 1)
    assert lengths(pieces) == [3 * cache.block_bytes, cache.block_bytes]
    (pieces,) = reads(side(cache, [3, 4, 9, 8]), both, 1)
    assert lengths(pieces) == [2 * cache.block_bytes, cache.block_bytes, cache.block_bytes]
    monkeypatch.setattr(module, "_READ_PIECES", 2)
    apart = reads(side(cache, [1, 3, 5, 7, 9]), side(cache, [2, 4, 6, 8, 10]), 1)
    assert [len(pieces.near) for pieces in apart] == [2, 2, 1]


def test_long_neighbours_are_pieces_of_their_own() -> None:
    cache = caches.make(Shape(8, 8, 128, 512, layers=2), None)  # 512 KiB blocks
    both = side(cache, [3, 4, 5])
    (pieces,) = reads(both, both, 1)
    assert lengths(pieces) == [512 << 10] * 6


@pytest.mark.parametrize("shape", [Shape(), Shape(24, 2, 64, 512)], ids=["short", "long"])
def test_two_selections_must_mean_the_same(shape: Shape) -> None:
    cache = caches.make(shape, None)
    with pytest.raises(DataCorrupt, match="the same selection"):
        list(reads(side(cache, [1, 2]), side(cache, [1]), 1))
