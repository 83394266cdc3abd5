"""A tiers' worker whose blocks are on a device: what it copies, and when it may."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transport.host_device import COMPILER
from unit.connector import model_device
from unit.connector.model_device import ModelDevice

from disagg.connector import kv_cache_layout
from disagg.connector.offload.messages import Done, Filling, OffloadWork, Store, TierLoad
from disagg.connector.offload.settings import OffloadSettings
from disagg.connector.offload.worker import FROM_HOST, TO_HOST, OffloadWorker
from disagg.errors import ConfigError, TransferError
from disagg.store.base import Slot
from disagg.transport.deadline import Event

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host")

BLOCKS, LAYERS, PER, SLOTS = 16, 3, 2, 8
BLOCK_BYTES = LAYERS * 2 * 4 * 8 * 4


@dataclass
class Rig:
    """A worker, its layers [B, H, N, C], and the device they are on."""

    worker: OffloadWorker
    layers: list[torch.Tensor]
    device: ModelDevice

    def store(self, job: int, slots: list[int], blocks: list[int]) -> Store:
        return Store(job, [Slot(bytes([slot + 1]), slot) for slot in slots], blocks)

    def load(self, job: int, slots: list[int], skip: int, blocks: list[int]) -> TierLoad:
        return TierLoad(job, f"request-{job}", [self.filling(slots, skip, blocks)])

    def filling(self, slots: list[int], skip: int, blocks: list[int]) -> Filling:
        return Filling([Slot(bytes([slot + 1]), slot) for slot in slots], skip, blocks)

    def slot(self, number: int) -> bytes:
        assert self.worker._pool is not None
        return bytes(self.worker._pool.slot(number))

    def held(self, blocks: list[int]) -> bytes:
        """What a slot holds of these blocks."""
        return b"".join(layer[blocks].numpy().tobytes() for layer in self.layers)

    def done(self, count: int = 1) -> list[Done]:
        """What ended, once so many have."""
        found: list[Done] = []
        end = time.monotonic() + 10
        while len(found) < count:
            assert time.monotonic() < end, "it did not end"
            self.worker.finished()
            report = self.worker.take_report()
            found += report.done if report else []
            time.sleep(0.001)
        return found


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    devices, made = model_device.use(monkeypatch), list[Rig]()

    def make(blocks_written_first: bool = False, **extra: Any) -> Rig:
        layers = [torch.randn(BLOCKS, 2, 4, 8) for _ in range(LAYERS)]
        settings = OffloadSettings(blocks_per_chunk=PER, staging_bytes=1 << 16, **extra)
        worker = OffloadWorker(
            settings,
            SLOTS,
            lambda cache, on_evicted: None,
            blocks_written_first=blocks_written_first,
        )
        worker.register(
            kv_cache_layout.block_cache({f"layer.{n}": layer for n, layer in enumerate(layers)})
        )
        made.append(Rig(worker, layers, devices[-1]))
        return made[-1]

    yield make
    for rig in made:
        rig.device.gate.set()
        rig.worker.shutdown()
        for pool in (rig.worker._store_pool, rig.worker._load_pool, rig.worker._copy_pool):
            pool.shutdown()
        assert rig.device.memory_in_use == 0
        rig.device.model.close()


def test_there_and_back(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [3, 0], [7, 2, 9, 4])]))
    assert not rig.worker._storing, "the step must have sampled first"
    rig.worker.before_step(OffloadWork())
    (done,) = rig.done()
    assert (done.medium, done.num_bytes, done.reason) == (TO_HOST, 4 * BLOCK_BYTES, "")
    assert rig.slot(3) == rig.held([7, 2])
    assert rig.slot(0) == rig.held([9, 4])
    expected = [layer.clone() for layer in rig.layers]
    for layer in expected:
        layer[[12, 1, 15]] = layer[[2, 9, 4]]
    rig.worker.start(OffloadWork(loads=[rig.load(2, [3, 0], 1, [12, 1, 15])]))
    (done,) = rig.done()
    assert (done.medium, done.num_bytes, done.reason) == (FROM_HOST, 3 * BLOCK_BYTES, "")
    for layer, right in zip(rig.layers, expected, strict=True):
        assert layer.equal(right)


def test_a_chunk_without_its_beginning(make: Callable[..., Rig]) -> None:
    """The null block stands for what is not kept of it."""
    rig = make()
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [3, 0], [0, 2, 9, 4])]))
    rig.worker.before_step(OffloadWork())
    (done,) = rig.done()
    assert (done.num_bytes, done.reason) == (3 * BLOCK_BYTES, "")
    block = BLOCK_BYTES // LAYERS
    held = [rig.slot(3)[n * PER * block :][: PER * block] for n in range(LAYERS)]
    assert [of_layer[block:] for of_layer in held] == [
        layer[[2]].numpy().tobytes() for layer in rig.layers
    ]
    assert rig.slot(0) == rig.held([9, 4])
    expected = [layer.clone() for layer in rig.layers]
    for layer in expected:
        layer[[12, 5]] = layer[[2, 4]]
    fillings = [rig.filling([3], 1, [12]), rig.filling([0], 1, [5])]
    rig.worker.start(OffloadWork(loads=[TierLoad(2, "request", fillings)]))
    (done,) = rig.done()
    assert (done.num_bytes, done.reason) == (2 * BLOCK_BYTES, "")
    for layer, right in zip(rig.layers, expected, strict=True):
        assert layer.equal(right)


@pytest.mark.parametrize(("slots", "skip", "blocks"), [([3], 0, 3), ([3], -1, 2), ([3, 0], 2, 2)])
def test_blocks_that_the_slots_do_not_fit_are_left_alone(
    make: Callable[..., Rig], slots: list[int], skip: int, blocks: int
) -> None:
    rig = make()
    before = [layer.clone() for layer in rig.layers]
    rig.worker.start(OffloadWork(loads=[rig.load(1, slots, skip, [7, 2, 9][:blocks])]))
    (done,) = rig.done()
    assert done.reason == "gone"
    for layer, right in zip(rig.layers, before, strict=True):
        assert layer.equal(right)


def test_what_the_model_still_does_is_waited_for(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0], [7, 2])]))
    rig.device.hold()
    rig.device.model.add(lambda: [layer.fill_(1) for layer in rig.layers])
    rig.worker.before_step(OffloadWork())
    rig.worker.start(OffloadWork(loads=[rig.load(2, [5], 0, [7, 2])]))
    time.sleep(0.05)
    assert not any(rig.slot(0))
    assert rig.worker.finished() == (set(), set())
    rig.device.gate.set()
    assert {one.reason for one in rig.done(2)} == {""}
    one = torch.ones(2 * LAYERS * 2 * 4 * 8).numpy().tobytes()
    # The load came from a slot of zeros; the store before it or after it, but behind the model.
    assert rig.slot(0) in (one, bytes(len(one)))
    for layer in rig.layers:
        assert not layer[[7, 2]].any()
        assert (layer[[0, 1, 3, 4, 5, 6, 8]] == 1).all()


def test_blocks_that_are_overwritten_next_are_copied_before(make: Callable[..., Rig]) -> None:
    rig = make()
    expected = rig.held([7, 2])
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0], [7, 2])], flush={1}))
    for layer in rig.layers:
        layer.zero_()
    assert rig.slot(0) == expected
    assert rig.done()[0].reason == ""


# ---- where vLLM writes to blocks before it calls the worker --------------------------------------


def write_first(rig: Rig, blocks: list[int]) -> None:
    """The second runner's zeroing, on the model's stream."""
    places = torch.tensor(blocks)
    rig.device.model.add(lambda: [layer.index_fill_(0, places, 0) for layer in rig.layers])


def ended(rig: Rig, job: int) -> None:
    """A store has ended, and the worker has not reported it yet."""
    rig.worker._storing[job].future.result(timeout=10)


def test_a_store_that_ended_before_the_block_was_overwritten(make: Callable[..., Rig]) -> None:
    """The device is still at the step before: what this step writes comes later."""
    rig = make(blocks_written_first=True)
    expected = rig.held([7, 2])
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0], [7, 2])]))
    rig.worker.after_step()
    ended(rig, 1)
    rig.worker.before_step(OffloadWork())
    rig.device.hold()
    rig.worker.after_step()
    write_first(rig, [7])
    rig.worker.before_step(OffloadWork(overwritten={1: {7}}))
    rig.device.gate.set()
    (done,) = rig.done()
    assert (done.reason, done.failed) == ("", frozenset())
    assert rig.slot(0) == expected


def test_a_store_that_was_reported_before_the_block_was_overwritten(
    make: Callable[..., Rig],
) -> None:
    rig = make(blocks_written_first=True)
    expected = rig.held([7, 2])
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0], [7, 2])]))
    rig.worker.after_step()
    (done,) = rig.done()
    write_first(rig, [7])
    rig.worker.before_step(OffloadWork(overwritten={1: {7}}))
    assert (done.reason, rig.slot(0)) == ("", expected)
    assert rig.worker.finished() == (set(), set())
    assert rig.worker.take_report() is None


@pytest.mark.parametrize("held", [False, True])
def test_a_store_whose_block_may_be_overwritten_fails(make: Callable[..., Rig], held: bool) -> None:
    """held: the device reaches the end of the step before only while the worker waits."""
    rig = make(blocks_written_first=True)
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0], [7, 2])]))
    if held:
        rig.device.hold()
        threading.Timer(0.05, rig.device.gate.set).start()
    rig.worker.after_step()
    write_first(rig, [7])
    if not held:
        ended(rig, 1)
        while rig.worker._step_end is not None and not rig.worker._step_end.is_done():
            time.sleep(0.001)
    rig.worker.before_step(OffloadWork(overwritten={1: {7}}))
    (done,) = rig.done()
    assert (done.reason, done.failed) == ("overwritten", frozenset([b"\x01"]))


@pytest.mark.parametrize("complete", [False, True])
def test_a_store_of_this_step_whose_block_is_overwritten_never_begins(
    make: Callable[..., Rig], complete: bool
) -> None:
    rig = make(blocks_written_first=True)
    store = replace(rig.store(1, [0], [7, 2]), complete=complete)
    write_first(rig, [7])
    rig.worker.before_step(OffloadWork(stores=[store], overwritten={1: {7}}))
    rig.worker.after_step()
    (done,) = rig.done()
    assert (done.reason, done.failed) == ("overwritten", frozenset([b"\x01"]))
    assert not any(rig.slot(0))
    assert not rig.worker._storing


@pytest.mark.parametrize("begun", [False, True])
def test_the_other_chunks_of_an_overwritten_store_are_kept(
    make: Callable[..., Rig], begun: bool
) -> None:
    rig = make(blocks_written_first=True)
    expected = rig.held([9, 4])
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0, 3], [7, 2, 9, 4])]))
    if begun:
        rig.worker.after_step()
        ended(rig, 1)
    write_first(rig, [2])
    while not rig.layers[0][2].eq(0).all():
        time.sleep(0.001)
    rig.worker.before_step(OffloadWork(overwritten={1: {2}}))
    (done,) = rig.done()
    assert (done.reason, done.failed) == ("overwritten", frozenset([b"\x01"]))
    assert rig.slot(3) == expected
    assert any(rig.slot(0)) == begun
    assert not rig.worker._lost


def test_a_store_of_what_earlier_steps_computed_begins_at_once(make: Callable[..., Rig]) -> None:
    rig = make()
    expected = rig.held([7, 2])
    store = replace(rig.store(1, [0], [7, 2]), complete=True)
    rig.worker.before_step(OffloadWork(stores=[store]))
    assert rig.done()[0].reason == ""
    assert rig.slot(0) == expected


# ---- what must not happen ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "blocks"), [(SLOTS, [7, 2]), (-1, [7, 2]), (0, [BLOCKS, 2]), (0, [-1, 2]), (0, [7])]
)
def test_a_store_out_of_bounds_fails(
    make: Callable[..., Rig], slot: int, blocks: list[int]
) -> None:
    rig = make()
    rig.worker.before_step(
        OffloadWork(stores=[Store(1, [Slot(b"k", slot)], blocks, complete=True)])
    )
    (done,) = rig.done()
    assert (done.reason, done.failed) == ("outside", frozenset([b"k"]))
    assert not any(any(rig.slot(number)) for number in range(SLOTS))


@pytest.mark.parametrize(("slot", "blocks"), [(SLOTS, [7]), (-1, [7]), (0, [BLOCKS]), (0, [-1])])
def test_a_load_out_of_bounds_fails(make: Callable[..., Rig], slot: int, blocks: list[int]) -> None:
    rig = make()
    before = [layer.clone() for layer in rig.layers]
    filling = Filling([Slot(b"k", slot)], 0, blocks)
    rig.worker.start(OffloadWork(loads=[TierLoad(1, "request", [filling])]))
    (done,) = rig.done()
    assert done.reason == "outside"
    for layer, right in zip(rig.layers, before, strict=True):
        assert layer.equal(right)


def test_a_device_that_records_no_event_fails_the_jobs_and_not_the_step(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(blocks_written_first=True)

    def refuse() -> Event:
        raise TransferError("an event on the model's stream: an error of the device", "device")

    monkeypatch.setattr(rig.device, "model_fence", refuse)
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0], [7, 2])], flush={1}))
    rig.worker.start(OffloadWork(loads=[rig.load(2, [5], 0, [7, 2])]))
    rig.worker.after_step()
    assert [(one.reason, bool(one.failed)) for one in rig.done(2)] == [("device", True)] * 2
    rig.worker.before_step(OffloadWork(stores=[rig.store(3, [0], [7, 2])]))
    rig.worker.after_step()
    rig.worker.before_step(OffloadWork(overwritten={3: {2}}))
    assert rig.done()[0].failed


def test_blocks_larger_than_vllm_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool must fit into `host_bytes`, or its slots are others than the scheduler's."""
    model_device.use(monkeypatch)
    settings = OffloadSettings(host_bytes=SLOTS * BLOCK_BYTES - 1)
    worker = OffloadWorker(settings, SLOTS, lambda cache, on_evicted: None)
    layers = {f"layer.{n}": torch.zeros(BLOCKS, 2, 4, 8) for n in range(LAYERS)}
    with pytest.raises(ConfigError, match=f"{SLOTS} slots of {BLOCK_BYTES} bytes do not fit"):
        worker.register(kv_cache_layout.block_cache(layers))
    worker.shutdown()


def test_a_load_that_comes_too_late_touches_nothing(make: Callable[..., Rig]) -> None:
    rig = make(load_deadline_s=0.2)
    before = [layer.clone() for layer in rig.layers]
    rig.device.hold()
    rig.worker.start(OffloadWork(loads=[rig.load(1, [0, 1], 0, [7, 2, 3, 4])]))
    (done,) = rig.done()
    assert done.reason == "deadline"
    rig.device.gate.set()
    time.sleep(0.05)
    for layer, right in zip(rig.layers, before, strict=True):
        assert layer.equal(right)


def test_a_device_that_fails_is_said(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.device.model.add(lambda: 1 // 0)
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0], [7, 2])], flush={1}))
    (done,) = rig.done()
    assert (done.reason, done.failed) == ("device", frozenset([b"\x01"]))
    assert not any(rig.slot(0))


def test_the_end_amid_a_store(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.device.hold()
    rig.worker.before_step(OffloadWork(stores=[rig.store(1, [0], [7, 2])]))
    rig.worker.before_step(OffloadWork())
    rig.worker.shutdown()


def test_too_little_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model_device.use(monkeypatch)
    settings = OffloadSettings(blocks_per_chunk=PER, staging_bytes=4095)
    worker = OffloadWorker(settings, 8, lambda cache, on_evicted: None)
    with pytest.raises(
        ConfigError, match=r"kv_connector_extra_config\.staging_bytes: 4095 — at least 4096"
    ):
        worker.register(kv_cache_layout.block_cache({"layer": torch.zeros(BLOCKS, 2, 4, 16)}))
    worker.shutdown()
