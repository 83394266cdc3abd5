"""Staging memory, on a device in host memory: all arrives, and no more is used than was allowed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from transport import caches, host_device
from transport.caches import Shape
from transport.host_device import COMPILER, HostDevice, HostStream
from unit.transport.device.test_copy_plan import LAYOUTS, SELECTIONS, SHAPE, wire

from disagg.errors import ConfigError, PeerLost, TransferError
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device import staging
from disagg.transport.device.staging import DEPTH, Slots, Staging

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host")

ROW = 4 * 8 * 48  # one block of one layer of SHAPE
SECONDS = 10.0


@dataclass
class Rig:
    """A cache on a device, and its staging memory."""

    cache: BlockCache
    device: HostDevice
    staging: Staging

    def read(self, selection: Selection) -> np.ndarray:
        with closing(self.staging.outgoing(self.cache, selection, soon())) as pieces:
            return np.concatenate([np.empty(0, np.uint8), *(piece.copy() for piece in pieces)])

    def write(self, selection: Selection, data: np.ndarray, after: Event | None = None) -> None:
        pieces = self.staging.incoming(self.cache, selection, soon(), after)
        at = 0
        with closing(pieces):
            for piece in pieces:
                piece[:] = data[at : at + len(piece)]
                at += len(piece)
        assert at == len(data)

    def streams(self) -> list[HostStream]:
        """Of the slots that are free."""
        streams = (slot.stream for slots in self.directions() for slot in slots._free)
        return [stream for stream in streams if isinstance(stream, HostStream)]

    def directions(self) -> list[Slots]:
        return [self.staging.sending, self.staging.receiving]


Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes rigs; at the end each has all its slots back, but those lost, and frees them."""
    made: list[Rig] = []

    def make(
        chunk: int = 4 * ROW, shape: Shape = SHAPE, seed: int | None = 1, slots: int = 1
    ) -> Rig:
        cache, device = host_device.make(shape, seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "_LARGEST_CHUNK", chunk)
            made.append(Rig(cache, device, Staging(device, cache, 2 * slots * DEPTH * chunk)))
        return made[-1]

    yield make
    for rig in made:
        for slots in rig.directions():
            assert not slots._waiting
            assert slots._closed or len(slots._free) + len(slots._lost) == slots.count
        lost = sum(len(slots._lost) for slots in rig.directions())
        rig.staging.close()
        assert rig.device.memory_in_use == lost * DEPTH * rig.staging.chunk_bytes


def soon(seconds: float = SECONDS) -> Deadline:
    return Deadline.after(seconds)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = soon()
    while not condition():
        deadline.left()
        time.sleep(0.001)


def selected(cache: BlockCache, selection: Selection) -> np.ndarray:
    """bool [B, H, N]"""
    found = np.zeros(cache.regions[0].memory.shape[:3], bool)
    per_block = cache.block_size // selection.unit
    for number in range(selection.first, selection.first + selection.count):
        begin = number % per_block * selection.unit
        heads = slice(*(selection.heads or (None,)))
        found[selection.block_ids[number // per_block], heads, begin : begin + selection.unit] = 1
    return found


def poisoned_but(cache: BlockCache, selection: Selection) -> bool:
    rest = ~selected(cache, selection)
    return all((r.memory.numpy()[rest] == caches.POISON).all() for r in cache.regions)


# ---- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [ROW, 5 * ROW, 1 << 20])
def test_there_and_back(make: Make, layout: str, chunk: int) -> None:
    shape = replace(SHAPE, layout=layout)
    source, target = make(chunk, shape), make(chunk + 512, shape, None)
    for selection in SELECTIONS:
        data = source.read(selection)
        assert np.array_equal(data, wire(source.cache, selection))
        target.write(selection, data)
        assert np.array_equal(wire(target.cache, selection), data)
        assert poisoned_but(target.cache, selection)
        caches.fill(target.cache, range(SHAPE.blocks), caches.POISON)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_selections(make: Make, layout: str) -> None:
    shape, generator = replace(SHAPE, layout=layout), random.Random(layout)
    source, target = make(3 * ROW, shape), make(2 * ROW, shape, None, slots=2)
    for _ in range(30):
        unit = generator.choice([1, 2, 4, 8])
        ids = generator.sample(range(SHAPE.blocks), generator.randint(1, SHAPE.blocks))
        units = len(ids) * 8 // unit
        first = generator.randrange(8 // unit)
        count = generator.randint(0, units - first)
        heads = generator.choice([None, (0, 4), (1, 3), (3, 4)])
        its = Selection(ids, unit, first, count, heads)
        mine = replace(its, block_ids=generator.sample(range(SHAPE.blocks), len(ids)))
        target.write(mine, source.read(its))
        assert np.array_equal(wire(target.cache, mine), wire(source.cache, its))
        assert poisoned_but(target.cache, mine)
        caches.fill(target.cache, range(SHAPE.blocks), caches.POISON)


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 5, 9, 64, 1000])
def test_no_more_than_was_allowed(rows: int) -> None:
    cache, device = host_device.make(SHAPE, 1)
    made = Staging(device, cache, rows * ROW)
    for _ in range(2):
        assert device.memory_in_use == made.device_bytes <= rows * ROW
        assert made.chunk_bytes >= ROW
        with closing(made.outgoing(cache, cache.whole(range(12)), soon())) as pieces:
            assert sum(map(len, pieces)) == 12 * 3 * ROW
    made.close()
    assert device.memory_in_use == 0


def test_as_much_pinned_memory_all_at_the_start(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To allocate amid fetches may be to wait for them."""
    pinned: list[int] = []
    original = HostDevice.pinned
    monkeypatch.setattr(
        HostDevice, "pinned", lambda self, size: (pinned.append(size), original(self, size))[1]
    )
    rig = make(2 * ROW, slots=2)
    assert sum(pinned) == rig.staging.device_bytes == rig.device.memory_in_use
    before, whole = len(pinned), rig.cache.whole(range(12))
    for _ in range(3):
        rig.write(whole, rig.read(whole))
    assert len(pinned) == before
    assert rig.device.memory_in_use == rig.staging.device_bytes
    pinned.clear()
    Staging(rig.device, rig.cache, 1 << 20, pinned=False).close()
    assert not pinned


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("sends", [True, False])
def test_too_little(blocks: int, sends: bool) -> None:
    cache, device = host_device.make(Shape(heads=1, tokens=3, content=100), 1)
    chunk = -(-blocks * 300 // 256) * 256
    need = (2 if sends else 1) * DEPTH * chunk
    with pytest.raises(ConfigError, match=rf"^a\.b: {need - 1} — at least {need} are needed"):
        Staging(device, cache, need - 1, sends=sends, blocks=blocks, setting="a.b")
    assert device.memory_in_use == 0
    made = Staging(device, cache, need, sends=sends, blocks=blocks)
    assert made.chunk_bytes == chunk
    assert (made.sending.count, made.receiving.count) == (int(sends), 1)
    made.close()
    with pytest.raises(ConfigError, match=r"^transfer\.staging_bytes: 0 "):
        Staging(device, cache, 0)


def test_rows_larger_than_chunks_are_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_LARGEST_CHUNK", 256)
    cache, device = host_device.make(Shape(heads=1, tokens=3, content=100), 1)
    made = Staging(device, cache, 1 << 14)
    assert made.chunk_bytes == 512
    made.close()


def test_a_direction_that_is_not_there(make: Make) -> None:
    cache, device = host_device.make(SHAPE, 1)
    made = Staging(device, cache, 1 << 20, receives=False)
    with pytest.raises(TransferError) as error:
        next(made.incoming(cache, cache.whole([1]), soon()))
    assert error.value.reason == "device"
    made.close()


def test_what_is_in_use_at_the_end_is_freed_by_who_uses_it(make: Make) -> None:
    rig = make(2 * ROW, slots=2)
    pieces = rig.staging.outgoing(rig.cache, rig.cache.whole(range(12)), soon())
    data = [next(pieces).copy()]
    rig.staging.close()
    assert rig.device.memory_in_use == DEPTH * rig.staging.chunk_bytes
    data += [piece.copy() for piece in pieces]
    assert np.array_equal(np.concatenate(data), wire(rig.cache, rig.cache.whole(range(12))))
    assert rig.device.memory_in_use == 0
    with pytest.raises(TransferError) as error:
        rig.read(rig.cache.whole([1]))
    assert error.value.reason == "device"


def test_closing_ends_waiting(make: Make) -> None:
    rig = make()
    with ThreadPoolExecutor(1) as pool, rig.staging.sending.take(soon()):
        reading = pool.submit(rig.read, rig.cache.whole([1]))
        wait_for(lambda: len(rig.staging.sending._waiting) == 1)
        rig.staging.close()
        with pytest.raises(TransferError) as error:
            reading.result(2)
    assert error.value.reason == "device"


# ---- waiting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_more_fetches_than_slots(make: Make, slots: int) -> None:
    source, target = make(2 * ROW, slots=slots), make(3 * ROW, seed=None, slots=slots)

    def one(block: int) -> None:
        for _ in range(5):
            target.write(target.cache.whole([block]), source.read(source.cache.whole([block])))

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(12)))
    assert caches.agree(source.cache, range(12), target.cache, range(12))


def test_first_come_first_served(make: Make) -> None:
    rig = make()
    slots, served = rig.staging.sending, list[int]()

    def one(number: int) -> None:
        with slots.take(soon()):
            served.append(number)
            time.sleep(0.002)

    def waits(count: int) -> bool:
        return len(slots._waiting) == count

    with ThreadPoolExecutor(8) as pool, slots.take(soon()):
        for number in range(8):
            pool.submit(one, number)
            wait_for(partial(waits, number + 1))
    assert served == list(range(8))


def test_nobody_waits_past_the_deadline(make: Make) -> None:
    rig = make()
    with ThreadPoolExecutor(1) as pool:
        with rig.staging.sending.take(soon()):
            began = time.monotonic()
            with pytest.raises(PeerLost) as error:
                next(rig.staging.outgoing(rig.cache, rig.cache.whole([1]), soon(0.2)))
            assert 0.2 <= time.monotonic() - began < 2
            assert error.value.reason == "deadline"
            patient = pool.submit(rig.read, rig.cache.whole([1]))
            wait_for(lambda: len(rig.staging.sending._waiting) == 1)
        assert np.array_equal(patient.result(SECONDS), wire(rig.cache, rig.cache.whole([1])))


def test_who_waits_may_be_told_to_stop(make: Make) -> None:
    rig, stop = make(), threading.Event()

    def look() -> None:
        if stop.is_set():
            raise PeerLost("nobody wants it any more")

    outgoing = rig.staging.outgoing(rig.cache, rig.cache.whole([1]), soon(), look)
    with ThreadPoolExecutor(1) as pool, rig.staging.sending.take(soon()):
        waiting = pool.submit(next, outgoing)
        wait_for(lambda: len(rig.staging.sending._waiting) == 1)
        stop.set()
        with pytest.raises(PeerLost, match="nobody"):
            waiting.result(2)


def test_sending_and_receiving_do_not_wait_for_each_other(make: Make) -> None:
    rig = make(seed=None)
    whole = rig.cache.whole([3])
    with rig.staging.sending.take(soon()):
        rig.write(whole, np.zeros(3 * ROW, np.uint8))
    with rig.staging.receiving.take(soon()):
        assert not rig.read(whole).any()


# ---- ends --------------------------------------------------------------------------------------


@contextmanager
def held_back(streams: Sequence[HostStream]) -> Iterator[threading.Event]:
    """Nothing of these streams is done until the event is set."""
    gate = threading.Event()
    for stream in streams:
        stream.add(gate.wait)
    try:
        yield gate
    finally:
        gate.set()
        # What was held back uses memory that goes with the test.
        for event in [stream.record() for stream in streams if stream._thread.is_alive()]:
            wait_for(event.happened.is_set)


@pytest.mark.parametrize("pieces", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_abandoned_iterators_give_their_slot_back(make: Make, pieces: int, how: str) -> None:
    rig = make(2 * ROW)
    whole = rig.cache.whole(range(12))
    for iterator in (
        rig.staging.outgoing(rig.cache, whole, soon()),
        rig.staging.incoming(rig.cache, whole, soon()),
    ):
        for _ in range(pieces):
            next(iterator)
        if how == "closed":
            iterator.close()
        del iterator
    assert [len(slots._free) for slots in rig.directions()] == [1, 1]
    rig.read(whole)


def test_nothing_is_written_after_the_end(make: Make) -> None:
    rig = make(2 * ROW, seed=None)
    whole = rig.cache.whole(range(12))
    with ThreadPoolExecutor(1) as pool, held_back(rig.streams()) as gate:
        pieces = rig.staging.incoming(rig.cache, whole, soon())
        for _ in range(2):
            next(pieces)[:] = 1
        ending = pool.submit(pieces.close)
        time.sleep(0.05)
        assert not ending.done()
        gate.set()
        ending.result(SECONDS)
    before = wire(rig.cache, whole)
    # The first piece was on its way; the second was filled, and never given to the device.
    assert np.count_nonzero(before == 1) == 2 * ROW
    time.sleep(0.02)
    assert np.array_equal(wire(rig.cache, whole), before)


def test_nobody_goes_on_while_work_does_not_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may still read or write blocks keeps its fetch, also past the deadline."""
    monkeypatch.setattr(staging, "_SETTLE_S", 0.05)
    rig = make(2 * ROW)
    whole = rig.cache.whole(range(12))
    with ThreadPoolExecutor(1) as pool:
        with held_back(rig.streams()):
            late = pool.submit(list, rig.staging.outgoing(rig.cache, whole, soon(0.1)))
            time.sleep(0.4)
            assert not late.done()
        error = late.exception(SECONDS)
    assert isinstance(error, PeerLost)
    assert error.reason == "deadline"
    assert np.array_equal(rig.read(whole), wire(rig.cache, whole))


def broken() -> None:
    raise RuntimeError("an illegal address")


@pytest.mark.parametrize("when", [0, 1, 3])
def test_an_error_of_the_device(make: Make, when: int) -> None:
    """It is told, and the next fetch has a stream that works."""
    rig = make(2 * ROW)
    whole = rig.cache.whole(range(12))
    data = wire(rig.cache, whole)
    for slots, begin in (
        (rig.staging.sending, rig.staging.outgoing),
        (rig.staging.receiving, rig.staging.incoming),
    ):
        stream = slots._free[0].stream
        pieces = begin(rig.cache, whole, soon())
        for _ in range(when):
            next(pieces)
        assert isinstance(stream, HostStream)
        stream.add(broken)
        with pytest.raises(TransferError, match="illegal") as error:
            list(pieces)
        assert error.value.reason == "device"
        assert slots._free[0].stream is not stream
    rig.write(whole, data)
    assert np.array_equal(rig.read(whole), data)


def test_a_device_that_is_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait are told at once, and so is whoever comes later."""
    rig = make(2 * ROW)
    whole = rig.cache.whole(range(12))

    def gone(self: HostDevice) -> HostStream:
        raise TransferError("no such device", reason="device")

    with ThreadPoolExecutor(2) as pool:
        pieces = rig.staging.outgoing(rig.cache, whole, soon())
        next(pieces)
        waiting = pool.submit(rig.read, whole)
        wait_for(lambda: len(rig.staging.sending._waiting) == 1)
        monkeypatch.setattr(HostDevice, "stream", gone)
        slot_stream(pieces).add(broken)
        with pytest.raises(TransferError):
            list(pieces)
        for error in (waiting.exception(2), pool.submit(rig.read, whole).exception(2)):
            assert isinstance(error, TransferError)
            assert error.reason == "device"


def slot_stream(pieces: object) -> HostStream:
    """Of the slot that an iterator has at the moment."""
    frame = pieces.gi_frame  # type: ignore[attr-defined]
    found: HostStream = frame.f_locals["slot"].stream
    return found


# ---- fences ------------------------------------------------------------------------------------


def test_nothing_is_written_before_the_fence(make: Make) -> None:
    rig = make(2 * ROW, seed=None)
    whole = rig.cache.whole(range(12))
    model = rig.device.stream()
    with ThreadPoolExecutor(1) as pool, held_back([model]) as gate:
        writing = pool.submit(rig.write, whole, np.zeros(36 * ROW, np.uint8), model.record())
        time.sleep(0.05)
        assert not writing.done()
        assert caches.untouched(rig.cache, but=[])
        gate.set()
        writing.result(SECONDS)
    assert not wire(rig.cache, whole).any()
    model.close()


def test_a_fence_that_does_not_come_leaves_nothing_behind(make: Make) -> None:
    rig = make(2 * ROW, seed=None)
    whole = rig.cache.whole(range(12))
    model = rig.device.stream()
    with held_back([model]):
        pieces = rig.staging.incoming(rig.cache, whole, soon(0.2), model.record())
        next(pieces)[:] = 0
        began = time.monotonic()
        with pytest.raises(PeerLost) as error:
            next(pieces)
        assert error.value.reason == "deadline"
        assert time.monotonic() - began < 2
        assert len(rig.staging.receiving._free) == 1
    model.close()
    assert caches.untouched(rig.cache, but=[])


def test_a_model_that_fails_is_told(make: Make) -> None:
    rig = make(2 * ROW, seed=None)
    model = rig.device.stream()
    model.add(broken)
    with pytest.raises(TransferError, match="illegal"):
        rig.write(rig.cache.whole([1]), np.zeros(3 * ROW, np.uint8), model.record())
    model.close()
    assert caches.untouched(rig.cache, but=[])
