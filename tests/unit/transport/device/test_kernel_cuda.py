"""The kernel on a GPU, through `CudaDevice`, against plain indexing by torch."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transport import caches
from transport.caches import Shape
from unit.transport.device.test_copy_plan import LAYOUTS, SELECTIONS, SHAPE

from disagg.transport.blocks import BlockCache, Region, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.device import copy_plan
from disagg.transport.device.base import Device, DeviceStream, Wait
from disagg.transport.device.copy_plan import Move
from disagg.transport.device.offload_copy import OffloadCopier, OffloadCopy
from disagg.transport.device.staging import Staging

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no cupy"),
]
ROW = 4 * 8 * 48  # one block of one layer of SHAPE


@dataclass
class Gpu:
    """The device, and one stream of it."""

    device: Device
    stream: DeviceStream

    def settle(self) -> None:
        Wait(Deadline.after(30), lambda: None).until(self.stream.record().is_done)

    def gather(self, cache: BlockCache, selection: Selection, limit: int) -> np.ndarray:
        move = copy_plan.gather(cache, selection)
        found = np.full(move.size, caches.POISON, np.uint8)
        memory, host = self.device.memory(limit), self.device.pinned(limit)
        self.stream.load(move)
        for chunk in move.chunks(limit):
            self.stream.launch(chunk, to_shift=memory.address - chunk.at)
            self.stream.copy(host.address, memory.address, chunk.size)
            self.settle()
            found[chunk.at : chunk.at + chunk.size] = host.array[: chunk.size]
        memory.free()
        host.free()
        return found

    def scatter(
        self, cache: BlockCache, selection: Selection, data: np.ndarray, limit: int
    ) -> None:
        move = copy_plan.scatter(cache, selection)
        memory, host = self.device.memory(limit), self.device.pinned(limit)
        self.stream.load(move)
        for chunk in move.chunks(limit):
            host.array[: chunk.size] = data[chunk.at : chunk.at + chunk.size]
            self.stream.copy(memory.address, host.address, chunk.size)
            self.stream.launch(chunk, from_shift=memory.address - chunk.at)
            self.settle()
        memory.free()
        host.free()

    def run(self, move: Move) -> None:
        self.stream.load(move)
        self.stream.launch(move.whole)
        self.settle()


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    from disagg.transport.device.cuda import CudaDevice

    device = CudaDevice(0)
    device.use()
    stream = device.stream()
    yield Gpu(device, stream)
    stream.close()


def make(shape: Shape, seed: int | None) -> BlockCache:
    """In memory of torch's, and written to its end: our streams do not wait for torch's."""
    cache = caches.make(shape, seed, "cuda")
    torch.cuda.synchronize()
    return cache


def selected(cache: BlockCache, index: int, selection: Selection) -> torch.Tensor:
    """The selection of one region, [units, axes of a unit in wire order, C], by torch's indexing;
    it shares no code with tables and kernel."""
    region = cache.regions[index]
    memory, per_block = region.memory, cache.block_size // selection.unit
    block, head, token, _ = memory.stride()
    units = memory.as_strided(
        (len(memory), per_block, memory.shape[1], selection.unit, memory.shape[3]),
        (block, selection.unit * token, head, token, 1),
        memory.storage_offset(),
    )[:, :, slice(*(selection.heads or (None,)))]
    if region.is_token_major:
        units = units.transpose(2, 3)
    numbers = torch.arange(selection.first, selection.first + selection.count)
    ids = torch.tensor(list(selection.block_ids), dtype=torch.int64)
    at = [one.to(memory.device) for one in (ids[numbers // per_block], numbers % per_block)]
    return units[at[0], at[1]]


def wire(cache: BlockCache, selection: Selection) -> np.ndarray:
    regions = [selected(cache, index, selection) for index in range(len(cache.regions))]
    found: np.ndarray = torch.cat([region.reshape(-1) for region in regions]).cpu().numpy()
    return found


def whole(cache: BlockCache) -> np.ndarray:
    return wire(cache, cache.whole(range(cache.num_blocks)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("limit", [1536, 5000, 1 << 20])
def test_gather(gpu: Gpu, layout: str, selection: Selection, limit: int) -> None:
    cache = make(replace(SHAPE, layout=layout), 1)
    before = whole(cache)
    assert np.array_equal(gpu.gather(cache, selection, limit), wire(cache, selection))
    assert np.array_equal(whole(cache), before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("limit", [1536, 5000, 1 << 20])
def test_scatter_writes_these_blocks_and_no_other(
    gpu: Gpu, layout: str, selection: Selection, limit: int
) -> None:
    source, target = (make(replace(SHAPE, layout=layout), seed) for seed in (1, None))
    data = wire(source, selection)
    gpu.scatter(target, selection, data, limit)
    assert np.array_equal(wire(target, selection), data)
    changed = np.count_nonzero(whole(target) != caches.POISON)
    assert changed == np.count_nonzero(data != caches.POISON)


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(LAYOUTS[:4], LAYOUTS[2:])))
def test_across_two_caches(gpu: Gpu, theirs: str, ours: str) -> None:
    """Half of four heads into a cache of two, blocks of 8 tokens into blocks of 4."""
    producer = make(replace(SHAPE, layout=theirs), 2)
    consumer = make(replace(SHAPE, layout=ours, heads=2, tokens=4, blocks=20), None)
    its, mine = Selection([7, 0, 3], 4, 1, 5, (2, 4)), Selection([19, 3, 8, 0, 2], 4, 0, 5)
    addresses = [region.memory.data_ptr() for region in producer.regions]
    gpu.run(copy_plan.across(consumer, mine, producer, its, addresses))
    for index in range(SHAPE.layers):
        sent, got = selected(producer, index, its), selected(consumer, index, mine)
        if producer.regions[index].is_token_major != consumer.regions[index].is_token_major:
            sent = sent.transpose(1, 2)
        assert got.equal(sent)
    assert caches.untouched(consumer, [19, 3, 8, 0, 2])


@pytest.mark.parametrize("content", [1, 2, 6, 8, 40, 64])
def test_words_as_wide_as_everything_allows(gpu: Gpu, content: int) -> None:
    cache = make(Shape(blocks=6, heads=1, tokens=3, content=content, layers=2), 3)
    selection = cache.whole([4, 0, 5])
    assert np.array_equal(gpu.gather(cache, selection, 1 << 12), wire(cache, selection))


def test_rows_in_many_parts(gpu: Gpu) -> None:
    """A block that several thread blocks copy, in layers of two sizes."""
    generator = torch.Generator("cuda").manual_seed(4)
    regions = [
        Region(
            f"{index}",
            torch.randint(
                0, 255, (9, 8, 64, size), dtype=torch.uint8, device="cuda", generator=generator
            ),
            "U8",
        )
        for index, size in enumerate([1024, 336, 1024, 20])
    ]
    cache = BlockCache(regions)
    torch.cuda.synchronize()
    selection = cache.whole([8, 1, 3])
    data = wire(cache, selection)
    for limit in (1 << 20, 3 << 20):
        assert np.array_equal(gpu.gather(cache, selection, limit), data)
    gpu.scatter(cache, cache.whole([0, 5, 4]), data, 1 << 20)
    assert np.array_equal(wire(cache, cache.whole([0, 5, 4])), data)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_through_staging_memory(gpu: Gpu, layout: str, rows: int) -> None:
    source, target = (make(replace(SHAPE, layout=layout), seed) for seed in (5, None))
    staging = Staging(gpu.device, source, 4 * rows * ROW)
    selection = Selection([9, 2, 7, 11, 0], 2, 3, 15, (1, 3))
    deadline = Deadline.after(30)
    with closing(staging.outgoing(source, selection, deadline)) as pieces:
        data = np.concatenate([piece.copy() for piece in pieces])
    assert np.array_equal(data, wire(source, selection))
    at, fence = 0, gpu.device.model_fence()
    with closing(staging.incoming(target, selection, deadline, fence)) as pieces:
        for piece in pieces:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)
    assert np.array_equal(wire(target, selection), data)
    changed = np.count_nonzero(whole(target) != caches.POISON)
    assert changed == np.count_nonzero(data != caches.POISON)
    staging.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("per", "rows"), [(1, 1), (1, 9), (3, 4), (3, 50)])
def test_to_slots_and_back(gpu: Gpu, layout: str, per: int, rows: int) -> None:
    source, target = (make(replace(SHAPE, layout=layout), seed) for seed in (6, None))
    staging = Staging(gpu.device, source, 4 * max(per, rows) * ROW, blocks=per)
    chunks = [[11, 4, 9][:per], [0, 10, 3][:per], [7, 1, 8][:per]]
    store, load = OffloadCopier(staging, source, per), OffloadCopier(staging, target, per)
    pool = gpu.device.pinned(5 * store.slot_bytes)
    pool.array[:] = caches.POISON
    address = [pool.address + slot * store.slot_bytes for slot in (4, 0, 1)]
    kept = [OffloadCopy(at, 0, ids) for at, ids in zip(address, chunks, strict=True)]
    store.store(kept, Deadline.after(30), gpu.device.model_fence())
    slots = pool.array.reshape(5, -1)
    for slot, ids in zip((4, 0, 1), chunks, strict=True):
        assert np.array_equal(slots[slot], wire(source, source.whole(ids)))
    assert (slots[2:4] == caches.POISON).all()
    kept[0] = OffloadCopy(address[0], per - 1, chunks[0][per - 1 :])
    load.load(kept, Deadline.after(30), gpu.device.model_fence())
    loaded = [block for one in kept for block in one.block_ids]
    assert caches.agree(source, loaded, target, loaded)
    assert caches.untouched(target, but=loaded)
    staging.close()
    pool.free()
