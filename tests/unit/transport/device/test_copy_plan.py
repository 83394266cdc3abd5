"""The kernel against plain indexing: every layout, any heads, units, ids and chunks."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transport import caches
from transport.caches import Shape
from transport.host_device import COMPILER, run_kernel

from disagg.transport.blocks import BlockCache, Region, Selection
from disagg.transport.device import copy_plan

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host")

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
SHAPE = Shape(blocks=12, heads=4, tokens=8, content=48, layers=3)
SELECTIONS = [
    Selection([], 8, 0, 0),
    Selection([5], 8, 0, 1),
    Selection([3, 4, 5, 1], 8, 0, 4),
    Selection([9, 2, 7], 4, 1, 4),
    Selection([9, 2, 7], 2, 3, 7, (1, 3)),
    Selection([0, 11], 8, 0, 2, (3, 4)),
    Selection([6, 1], 1, 5, 9, (0, 2)),
]


def wire(cache: BlockCache, selection: Selection) -> np.ndarray:
    """The bytes by plain indexing of torch, which shares no code with tables and kernel."""
    per_block = cache.block_size // selection.unit
    rows = []
    for region in cache.regions:
        first, last = selection.heads or (0, region.memory.shape[1])
        for number in range(selection.first, selection.first + selection.count):
            block, within = selection.block_ids[number // per_block], number % per_block
            tokens = slice(within * selection.unit, (within + 1) * selection.unit)
            unit = region.memory[block, first:last, tokens]  # [H, N, C]
            if region.is_token_major:
                unit = unit.transpose(0, 1)
            rows.append(unit.reshape(-1))
    return torch.cat(rows).numpy() if rows else np.empty(0, np.uint8)


def gathered(cache: BlockCache, selection: Selection, limit: int, parts: int = 2) -> np.ndarray:
    move = copy_plan.gather(cache, selection)
    whole = np.full(move.size, caches.POISON, np.uint8)
    for chunk in move.chunks(limit):
        buffer = np.full(limit, caches.POISON, np.uint8)
        run_kernel(move, chunk, 0, buffer.ctypes.data - chunk.at, parts)
        whole[chunk.at : chunk.at + chunk.size] = buffer[: chunk.size]
        assert (buffer[chunk.size :] == caches.POISON).all()
    return whole


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("limit", [1536, 5000, 1 << 20])
def test_gather(layout: str, selection: Selection, limit: int) -> None:
    cache = caches.make(replace(SHAPE, layout=layout), 1)
    assert np.array_equal(gathered(cache, selection, limit), wire(cache, selection))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_scatter_writes_these_blocks_and_no_other(layout: str, selection: Selection) -> None:
    source = caches.make(replace(SHAPE, layout=layout), 1)
    data = wire(source, selection)
    target = caches.make(replace(SHAPE, layout=layout), None)
    move = copy_plan.scatter(target, selection)
    for chunk in move.chunks(5000):
        part = data[chunk.at : chunk.at + chunk.size].copy()
        run_kernel(move, chunk, part.ctypes.data - chunk.at, 0)
    assert np.array_equal(wire(target, selection), data)
    moves_back = Selection(list(range(12)), 8, 0, 12)
    changed = wire(target, moves_back) != caches.POISON
    due = wire(source, selection)
    # Random bytes are poison too now and then; never may more have changed than were due.
    assert np.count_nonzero(changed) == np.count_nonzero(due != caches.POISON)


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(LAYOUTS[:4], LAYOUTS[2:])))
def test_across_two_caches(theirs: str, ours: str) -> None:
    """Half of four heads into a cache of two, blocks of 8 tokens into blocks of 4."""
    producer = caches.make(replace(SHAPE, layout=theirs), 2)
    consumer = caches.make(replace(SHAPE, layout=ours, heads=2, tokens=4, blocks=20), None)
    its = Selection([7, 0, 3], 4, 1, 5, (2, 4))
    mine = Selection([19, 3, 8, 0, 2], 4, 0, 5)
    addresses = [region.memory.data_ptr() for region in producer.regions]
    move = copy_plan.across(consumer, mine, producer, its, addresses)
    run_kernel(move, move.whole, 0, 0)
    for number in range(5):
        a, b = replace(its, first=its.first + number, count=1), replace(mine, first=number, count=1)
        for region in range(3):
            units = []
            for cache, chosen in ((producer, a), (consumer, b)):
                per_block = cache.block_size // 4
                block = chosen.block_ids[chosen.first // per_block]
                first, last = chosen.heads or (0, 2)
                begin = chosen.first % per_block * 4
                units.append(cache.regions[region].memory[block, first:last, begin : begin + 4])
            assert units[0].equal(units[1])
    written = sorted({19, 3, 8, 0, 2})
    assert caches.untouched(consumer, written)


@pytest.mark.parametrize("content", [1, 2, 6, 8, 40, 64])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_words_as_wide_as_everything_allows(content: int, parts: int) -> None:
    cache = caches.make(Shape(blocks=6, heads=1, tokens=3, content=content, layers=2), 3)
    selection = cache.whole([4, 0, 5])
    move = copy_plan.gather(cache, selection)
    assert 3 * content % move.word == 0
    assert np.array_equal(gathered(cache, selection, 1 << 12, parts), wire(cache, selection))


def test_layers_of_different_size() -> None:
    """An indexer's keys beside MLA's latents: rows of two lengths."""
    generator = torch.Generator().manual_seed(4)

    def layer(content: int) -> torch.Tensor:
        return torch.randint(0, 255, (9, 1, 4, content), dtype=torch.uint8, generator=generator)

    regions = [Region(f"{i}", layer(size), "U8") for i, size in enumerate([64, 20, 64, 20])]
    cache = BlockCache(regions)
    selection = cache.whole([8, 1, 1, 3])
    for limit in (256, 300, 1000):
        assert np.array_equal(gathered(cache, selection, limit), wire(cache, selection))


def test_chunks_hold_whole_rows_in_order() -> None:
    cache = caches.make(SHAPE, 1)
    move = copy_plan.gather(cache, cache.whole([1, 2, 3, 4, 5]))
    row = 4 * 8 * 48
    for limit in (row, 3 * row, 4 * row + 1, 100 * row):
        chunks = move.chunks(limit)
        assert [chunk.first for chunk in chunks] == list(
            itertools.accumulate((chunk.rows for chunk in chunks[:-1]), initial=0)
        )
        assert sum(chunk.size for chunk in chunks) == move.size == 15 * row
        assert all(chunk.size == chunk.rows * row <= limit for chunk in chunks)
        assert len(chunks) == -(-15 // (limit // row))
    with pytest.raises(ValueError, match=f"a row of {row} bytes"):
        move.chunks(row - 1)


def test_two_sides_must_mean_the_same() -> None:
    cache = caches.make(SHAPE, 1)
    addresses = [region.memory.data_ptr() for region in cache.regions]
    mine = cache.whole([1, 2])
    for its in (cache.whole([1]), replace(mine, heads=(0, 2)), replace(mine, unit=4)):
        with pytest.raises(ValueError, match="do not mean the same"):
            copy_plan.across(cache, mine, cache, its, addresses)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("at_end", [False, True])
def test_not_a_byte_outside_is_touched(layout: str, at_end: bool) -> None:
    """Caches and chunks lie between pages that nobody may read: a process that does so dies."""
    shape = replace(SHAPE, layout=layout)
    flat = guarded(caches.num_bytes(shape), at_end)
    cache = BlockCache(caches.regions(shape, torch.from_numpy(flat)))
    last = cache.whole([0, 11, 10])

    def there_and_back(selection: Selection) -> None:
        out, back = copy_plan.gather(cache, selection), copy_plan.scatter(cache, selection)
        for chunk in out.chunks(5000):
            buffer = guarded(chunk.size, at_end)
            shift = buffer.ctypes.data - chunk.at
            run_kernel(out, chunk, 0, shift)
            run_kernel(back, chunk, shift, 0)

    for selection in (last, replace(last, heads=(2, 4)), replace(last, unit=2, first=3, count=9)):
        assert survives(partial(there_and_back, selection))
    outside = flat.ctypes.data + (len(flat) if at_end else -1)
    assert not survives(partial(ctypes.string_at, outside, 1))


def guarded(size: int, at_end: bool) -> np.ndarray:
    """Memory with a forbidden page before its first byte, or behind its last."""
    page = mmap.PAGESIZE
    inner = -(-size // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for forbidden in (0, page + inner):
        address = ctypes.c_void_p(whole.ctypes.data + forbidden)
        assert libc.mprotect(address, ctypes.c_size_t(page), 0) == 0
    first = page + inner - size if at_end else page
    return whole[first : first + size]


def survives(work: Callable[[], object]) -> bool:
    """Whether another process lives through it."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
