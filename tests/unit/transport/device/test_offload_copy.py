"""Copies between blocks and slots, on a device in host memory, against plain indexing."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
from transport import caches, host_device
from transport.host_device import COMPILER, HostStream
from unit.transport.device.test_copy_plan import LAYOUTS, SHAPE, wire

from disagg.errors import PeerLost, TransferError
from disagg.transport.blocks import BlockCache
from disagg.transport.deadline import Deadline
from disagg.transport.device import staging
from disagg.transport.device.copy_plan import Chunk
from disagg.transport.device.offload_copy import OffloadCopier, OffloadCopy
from disagg.transport.device.staging import DEPTH, Staging

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host")

ROW = 4 * 8 * 48  # one block of one layer of SHAPE
SLOTS = 7


@dataclass
class Rig:
    """A cache on a device, and a pool of slots for its blocks."""

    cache: BlockCache
    staging: Staging
    keeper: OffloadCopier
    per: int
    pool: np.ndarray

    def kept(self, slot: int, block_ids: list[int]) -> OffloadCopy:
        address = int(self.pool[slot].ctypes.data)
        return OffloadCopy(address, self.per - len(block_ids), block_ids)

    def slot(self, block_ids: list[int]) -> np.ndarray:
        """What a slot holds of these blocks."""
        return wire(self.cache, self.cache.whole(block_ids))


@contextmanager
def rig(per: int, rows: int, layout: str = "LBHNC", seed: int | None = 1) -> Iterator[Rig]:
    """Chunks of so many rows, slots of so many blocks."""
    cache, device = host_device.make(replace(SHAPE, layout=layout), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_LARGEST_CHUNK", rows * ROW)
        made = Staging(device, cache, 2 * DEPTH * rows * ROW, blocks=per)
    keeper = OffloadCopier(made, cache, per)
    assert keeper.slot_bytes == per * 3 * ROW
    pool = np.full((SLOTS, keeper.slot_bytes), caches.POISON, np.uint8)
    yield Rig(cache, made, keeper, per, pool)
    made.close()
    assert device.memory_in_use == 0


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("per", "rows"), [(1, 1), (1, 3), (1, 8), (2, 2), (3, 4), (3, 9), (3, 50)])
def test_there_and_back(layout: str, per: int, rows: int) -> None:
    generator = random.Random(rows)
    with rig(per, rows, layout) as ours, rig(per, rows, layout, None) as theirs:
        for count in range(5):
            slots = generator.sample(range(SLOTS), count)
            order = generator.sample(range(SHAPE.blocks), per * (SHAPE.blocks // per))
            chunks = [order[n * per : (n + 1) * per] for n in range(count)]
            ours.keeper.store([ours.kept(*one) for one in zip(slots, chunks, strict=True)], soon())
            for slot, ids in zip(slots, chunks, strict=True):
                assert np.array_equal(ours.pool[slot], ours.slot(ids))
            rest = sorted(set(range(SLOTS)) - set(slots))
            assert (ours.pool[rest] == caches.POISON).all()
            theirs.pool[:] = ours.pool
            # Of the first slot, as when the engine has its beginning itself.
            wanted = [
                ids[generator.randrange(per) if n == 0 else 0 :] for n, ids in enumerate(chunks)
            ]
            theirs.keeper.load(
                [theirs.kept(*one) for one in zip(slots, wanted, strict=True)], soon()
            )
            loaded = [block for ids in wanted for block in ids]
            assert caches.agree(ours.cache, loaded, theirs.cache, loaded)
            assert caches.untouched(theirs.cache, but=loaded)
            assert np.array_equal(theirs.pool, ours.pool)
            caches.fill(theirs.cache, range(SHAPE.blocks), caches.POISON)
            ours.pool[:] = caches.POISON


@pytest.mark.parametrize(
    ("rows", "launches"), [(3 * 7, 1), (3 * 4 + 2, 2), (3, 7), (2, 14), (1, 21)]
)
def test_few_launches(monkeypatch: pytest.MonkeyPatch, rows: int, launches: int) -> None:
    """As many slots and layers by one as a chunk of memory holds."""
    launched: list[Chunk] = []
    original = HostStream.launch

    def launch(self: HostStream, chunk: Chunk, from_shift: int = 0, to_shift: int = 0) -> None:
        launched.append(chunk)
        original(self, chunk, from_shift, to_shift)

    monkeypatch.setattr(HostStream, "launch", launch)
    with rig(1, rows) as one:
        kept = [one.kept(slot, [slot]) for slot in range(SLOTS)]
        one.keeper.store(kept, soon())
        assert len(launched) == launches
        one.keeper.load(kept, soon())
        assert len(launched) == 2 * launches


@pytest.mark.parametrize("stores", [True, False])
def test_nothing_moves_before_the_fence(stores: bool) -> None:
    with rig(2, 4, seed=1 if stores else None) as one:
        move = one.keeper.store if stores else one.keeper.load
        kept = [one.kept(slot, [2 * slot, 2 * slot + 1]) for slot in range(4)]
        model, gate = one.staging.device.stream(), threading.Event()
        assert isinstance(model, HostStream)
        if not stores:
            one.pool[:] = 1
        model.add(gate.wait)
        fence = model.record()
        with pytest.raises(PeerLost):
            move(kept, soon(0.1), fence)
        gate.set()
        model.close()
        assert stores or caches.untouched(one.cache, but=[])
        assert not stores or (one.pool == caches.POISON).all()
        move(kept, soon(), fence)
        if stores:
            assert np.array_equal(one.pool[3], one.slot([6, 7]))
        else:
            assert (one.slot(list(range(8))) == 1).all()


@pytest.mark.parametrize("stores", [True, False])
def test_an_error_of_the_device(stores: bool) -> None:
    with rig(1, 3) as one:
        move = one.keeper.store if stores else one.keeper.load
        slots = one.staging.sending if stores else one.staging.receiving
        kept = [one.kept(slot, [slot]) for slot in range(SLOTS)]
        stream = slots._free[0].stream
        assert isinstance(stream, HostStream)
        stream.add(lambda: 1 // 0)
        with pytest.raises(TransferError) as error:
            move(kept, soon())
        assert error.value.reason == "device"
        move(kept, soon())
