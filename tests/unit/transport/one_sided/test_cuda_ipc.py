"""What only CUDA IPC has: whom it takes for readable, what it keeps mapped, and when it stops."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transport import caches, host_device
from transport.caches import Shape
from transport.host_device import COMPILER, HostDevice, OnDevice, Shared
from transport.offers import changed, gone
from transport.worker import FINGERPRINT, SECRET, Remote, Setup, wait_until

from disagg.errors import DataCorrupt, PeerLost, TransferError
from disagg.identity.process import start_time
from disagg.transport.base import FetchJob, RemoteCache
from disagg.transport.blocks import Region, Selection
from disagg.transport.control.client import Peers
from disagg.transport.deadline import Deadline
from disagg.transport.device.staging import Staging
from disagg.transport.one_sided import cuda_ipc, offers
from disagg.transport.one_sided.cuda_ipc import CudaIpcReceiver, CudaIpcSender

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host")

SHAPE = Shape(blocks=24, heads=4, tokens=8, content=48, layers=3, layout="LBNHC")
SEED = 1
# The producer's cache is one allocation, its token another.
ALLOCATIONS = 2


class Producer(Remote):
    """A producer in a process of its own."""

    def __init__(self, folder: Any) -> None:
        super().__init__(Setup("cuda_ipc", "emulated", SHAPE, SEED, folder))
        peers = Peers("engine", FINGERPRINT, SECRET)
        with peers.connection(self.endpoint, Deadline.after(10)) as connection:
            self.offer = connection.welcome.offers["cuda_ipc"]
        peers.close()
        self.token: bytes = msgspec.msgpack.decode(self.offer)["token"]

    def names(self, blocks: Selection) -> bytes:
        """What its sender answers."""
        return offers.encode(self.token, blocks)


@dataclass
class Consumer:
    """A receiver here, and its device."""

    cache: OnDevice
    device: HostDevice
    staging: Staging
    receiver: CudaIpcReceiver
    remote: RemoteCache | None = None

    def opens(self, offer: bytes) -> bool:
        """Whether it can; fetches then read this producer."""
        found = self.receiver.open(offer)
        self.remote = found or self.remote
        return found is not None

    def receive(self, job: FetchJob, answer: bytes) -> int:
        assert self.remote is not None
        return self.remote.receive(job, answer)

    def fetch(self, answer: bytes, mine: Selection, seconds: float = 10) -> int:
        return self.receive(FetchJob(mine, Deadline.after(seconds)), answer)


@pytest.fixture(scope="module")
def producer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Producer]:
    made = Producer(tmp_path_factory.mktemp("producer"))
    yield made
    made.close()


@pytest.fixture
def mortal(tmp_path: Any) -> Iterator[Producer]:
    made = Producer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    made = make_consumer()
    yield made
    made.receiver.close()
    made.staging.close()


def make_consumer(shape: Shape = SHAPE) -> Consumer:
    cache, device = host_device.make(shape, None)
    staging = Staging(device, cache, 4 << 20)
    return Consumer(cache, device, staging, CudaIpcReceiver(cache, staging))


def with_region(producer: Producer, column: int, value: int) -> bytes:
    rows = np.frombuffer(msgspec.msgpack.decode(producer.offer)["regions"], np.int64)
    rows = rows.reshape(-1, 9).copy()
    rows[1, column] = value
    return changed(producer.offer, regions=rows.tobytes())


def overwrite_token(producer: Producer, token: bytes) -> None:
    """What the producer itself does when it closes."""
    content = msgspec.msgpack.decode(producer.offer)
    number, offset = content["token_at"]
    memory = HostDevice().open(content["allocations"][number][0])
    memory.array[offset : offset + len(token)] = np.frombuffer(token, np.uint8)


# ---- offers ----------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = (one for one in caplog.records if one.name.startswith("disagg"))
    assert record.levelno == logging.INFO
    return record.getMessage()


def test_no_offer_of_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        sender = CudaIpcSender(caches.make(SHAPE, SEED), None)
        assert [sender.offer(), sender.offer()] == [b"", b""]
        sender.close()
    assert caplog.records == [], "nothing to say on each worker of a CPU"


def test_no_offer_of_what_cannot_be_shared(caplog: pytest.LogCaptureFixture) -> None:
    cache, device = host_device.make(SHAPE, SEED)
    device.allocations.clear()
    staging = Staging(device, cache, 4 << 20)
    before = device.memory_in_use
    with caplog.at_level(logging.INFO):
        sender = CudaIpcSender(cache, staging)
        assert [sender.offer(), sender.offer()] == [b"", b""]
    assert "cannot be shared" in logged(caplog)
    sender.close()
    assert device.memory_in_use == before


@pytest.mark.parametrize("broken", ["memory", "second-export"])
def test_no_offer_from_a_device_without_room(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    cache, device = host_device.make(SHAPE, SEED)
    staging = Staging(device, cache, 4 << 20)
    before, export = device.memory_in_use, device.export

    def fail(*_: Any) -> Any:
        raise TransferError("no room", reason="device")

    def fail_for_the_token(address: int) -> Any:
        return export(address) if address == cache.regions[0].memory.data_ptr() else fail()

    one_layer = OnDevice(list(cache.regions[:1]))
    if broken == "second-export":
        monkeypatch.setattr(device, "export", fail_for_the_token)
    else:
        monkeypatch.setattr(device, broken, fail)
    sender = CudaIpcSender(one_layer, staging)
    assert sender.offer() == b""
    monkeypatch.undo()
    sender.close()
    assert device.memory_in_use == before


def test_an_offer_names_each_allocation_once() -> None:
    """Two layers in one allocation, one in another."""
    sizes, pad = [2 * 4096, 4096], 64
    shared = [Shared(pad + size) for size in sizes]
    flat = [torch.from_numpy(one.array) for one in shared]

    def region(number: int, offset: int) -> Region:
        return Region("x", flat[number][offset : offset + 4096].view(8, 2, 4, 64), "U8")

    cache = OnDevice([region(0, pad), region(1, pad), region(0, pad + 4096)])
    device = HostDevice(shared)
    staging = Staging(device, cache, 1 << 20)
    sender = CudaIpcSender(cache, staging)
    content = msgspec.msgpack.decode(sender.offer())
    assert [handle for handle, _ in content["allocations"][:2]] == [s.handle for s in shared]
    assert [size for _, size in content["allocations"][:2]] == [pad + size for size in sizes]
    rows = np.frombuffer(content["regions"], np.int64).reshape(-1, 9).tolist()
    assert [row[:2] for row in rows] == [[0, pad], [1, pad], [0, pad + 4096]]
    assert all(row[2:] == [8, 2, 4, 64, 512, 256, 64] for row in rows)
    assert content["token_at"] == [2, 0]
    sender.close()
    staging.close()


def test_a_closed_sender_takes_its_token_back() -> None:
    cache, device = host_device.make(SHAPE, SEED)
    staging = Staging(device, cache, 4 << 20)
    before = device.memory_in_use
    sender = CudaIpcSender(cache, staging)
    token = msgspec.msgpack.decode(sender.offer())["token"]
    held = device.allocations[-1].array
    assert held.tobytes()[:16] == token
    assert device.memory_in_use > before
    sender.close()
    assert held.tobytes()[:16] == bytes(16)
    assert device.memory_in_use == before
    sender.close()


def test_an_answer_must_fit() -> None:
    sender = CudaIpcSender(caches.make(SHAPE, SEED), None)
    with pytest.raises(TransferError) as error:
        sender.send(Selection([0] * 300_000, 8, 0, 1), b"", Deadline.after(5))
    assert error.value.reason == "too_large"


# ---- whom to read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: b"", "cannot be shared"),
        (lambda p: changed(p.offer, boot="0" * 36), "another host"),
        (lambda p: changed(p.offer, pid_namespace=1), "pid namespace"),
        (lambda p: changed(p.offer, pid=gone()), "gone"),
        (lambda p: changed(p.offer, pid=-1), "gone"),
        (lambda p: changed(p.offer, started=1), "gone"),
        (lambda p: changed(p.offer, token=bytes(16)), "token"),
        (lambda p: changed(p.offer, token=b"short"), "token"),
        (lambda p: changed(p.offer, token_at=(1, (2 << 20) - 8)), "no sense"),
        (lambda p: changed(p.offer, token_at=(2, 0)), "no sense"),
        (lambda p: changed(p.offer, token_at=(-1, 0)), "no sense"),
        (lambda p: changed(p.offer, token_at=(0, 0)), "token"),
        (lambda p: changed(p.offer, allocations=[]), "no sense"),
        (lambda p: changed(p.offer, allocations=[(b"/nowhere", 1 << 40)] * 2), "cannot open"),
        (lambda p: changed(p.offer, allocations=[(b"\0", 1 << 40)] * 2), "no sense"),
        (lambda p: changed(p.offer, regions=b""), "no sense"),
        (lambda p: changed(p.offer, regions=bytes(71)), "no sense"),
        (lambda p: changed(p.offer, regions=bytes(72)), "no sense"),
        (lambda p: with_region(p, 0, 7), "no sense"),
        (lambda p: with_region(p, 1, -1), "no sense"),
        (lambda p: with_region(p, 1, 1 << 20), "no sense"),
        (lambda p: with_region(p, 6, 1 << 40), "no sense"),
        (lambda p: with_region(p, 6, 1 << 62), "no sense"),
        (lambda p: with_region(p, 2, 1 << 62), "no sense"),
        (lambda p: with_region(p, 2, 25), "no sense"),
        (lambda p: with_region(p, 0, -1), "no sense"),
    ],
)
def test_not_usable(
    producer: Producer,
    consumer: Consumer,
    make: Callable[[Producer], bytes],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    offer = make(producer)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert not consumer.opens(offer)
    assert re.search(why, logged(caplog))
    assert consumer.device.opened == 0
    assert consumer.opens(producer.offer)
    assert consumer.device.opened == ALLOCATIONS


def test_a_second_offer_with_the_same_token_is_none(producer: Producer, consumer: Consumer) -> None:
    assert consumer.opens(producer.offer)
    assert not consumer.opens(with_region(producer, 1, 64))
    assert consumer.opens(producer.offer)


def test_caches_that_differ(producer: Producer) -> None:
    for shape in (Shape(layers=2), Shape(layers=4), Shape(content=32)):
        other = make_consumer(shape)
        assert other.opens(producer.offer)
        mine = other.cache.whole([1])
        with pytest.raises(DataCorrupt, match="same selection"):
            other.fetch(producer.names(mine), mine)
        other.receiver.close()
        assert other.device.opened == 0


def test_caches_that_lie_in_host_memory(producer: Producer) -> None:
    on_host = CudaIpcReceiver(caches.make(SHAPE, None), None)
    assert not on_host.open(producer.offer)
    on_host.close()


def test_a_process_does_not_read_itself(consumer: Consumer) -> None:
    sender = CudaIpcSender(consumer.cache, consumer.staging)
    assert sender.offer()
    assert not consumer.opens(sender.offer())
    assert consumer.device.opened == 0
    sender.close()


def test_mapped_once_and_until_close(producer: Producer, consumer: Consumer) -> None:
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(consumer.receiver.open, [producer.offer] * 32))
    assert all(opened)
    assert consumer.device.opened == ALLOCATIONS
    watches = [t for t in threading.enumerate() if t.name == "disagg-cuda-ipc-watch"]
    descriptors = len(os.listdir("/proc/self/fd"))
    consumer.receiver.close()
    assert consumer.device.opened == 0
    assert wait_until(lambda: not any(thread.is_alive() for thread in watches), 2)
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_a_token_that_is_gone(producer: Producer, consumer: Consumer) -> None:
    assert consumer.opens(producer.offer)
    overwrite_token(producer, bytes(16))
    assert not consumer.opens(producer.offer)
    assert consumer.device.opened == 0
    with pytest.raises(PeerLost):
        consumer.fetch(producer.names(consumer.cache.whole([1])), consumer.cache.whole([1]))
    overwrite_token(producer, producer.token)
    assert consumer.opens(producer.offer)
    assert consumer.device.opened == ALLOCATIONS


def test_no_free_slot_for_the_probe(
    producer: Producer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing new is kept then, and what was found out before still holds."""
    monkeypatch.setattr(cuda_ipc, "_TOKEN_S", 0.2)
    slots, deadline = consumer.staging.receiving, Deadline.after(10)
    other = CudaIpcReceiver(consumer.cache, consumer.staging)
    remote = other.open(producer.offer)
    assert remote is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slots, "_free", [])
        assert not consumer.opens(producer.offer)
        assert not other.open(producer.offer)
        assert consumer.device.opened == ALLOCATIONS
    deadline.left()
    assert consumer.opens(producer.offer)
    assert consumer.device.opened == 2 * ALLOCATIONS
    mine = consumer.cache.whole([1])
    remote.receive(FetchJob(mine, deadline), producer.names(mine))
    other.close()


# ---- ends ------------------------------------------------------------------------------------


def test_a_dead_producer_is_unmapped(mortal: Producer, consumer: Consumer) -> None:
    assert consumer.opens(mortal.offer)
    mine = consumer.cache.whole([1])
    consumer.fetch(mortal.names(mine), mine)
    mortal.signal(signal.SIGKILL)
    assert wait_until(lambda: consumer.device.opened == 0, 1)
    with pytest.raises(PeerLost):
        consumer.fetch(mortal.names(mine), mine)
    assert not consumer.opens(mortal.offer)
    assert consumer.device.opened == 0


@pytest.mark.parametrize("error", [OSError(38, "no such call"), AttributeError()])
def test_without_pidfds_the_dead_are_found_by_the_next(
    mortal: Producer,
    producer: Producer,
    consumer: Consumer,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def refuse(pid: int) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert consumer.opens(mortal.offer)
    mortal.signal(signal.SIGKILL)
    assert consumer.device.opened == ALLOCATIONS
    assert consumer.opens(producer.offer)
    assert consumer.device.opened == ALLOCATIONS, "only the living one's"


def test_dead_but_not_buried(producer: Producer, consumer: Consumer) -> None:
    """A process that nobody has waited for still has its pid and start time."""
    corpse = subprocess.Popen(["/bin/true"])
    try:
        state = os.waitid(os.P_PID, corpse.pid, os.WEXITED | os.WNOWAIT)
        assert state is not None
        started = start_time(corpse.pid)
        assert started is not None
        offer = changed(producer.offer, pid=corpse.pid, started=started)
        assert not consumer.opens(offer)
        assert consumer.device.opened == 0
    finally:
        corpse.wait()


class Held:
    """The kernel, which waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        run = host_device.run_kernel

        def held(*arguments: Any) -> None:
            self.begun.set()
            assert self.may.wait(20)
            run(*arguments)

        monkeypatch.setattr(host_device, "run_kernel", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.may.set()


@pytest.mark.parametrize("end", ["death", "close"])
def test_not_unmapped_amid_a_read(
    mortal: Producer, consumer: Consumer, held: Held, end: str
) -> None:
    assert consumer.opens(mortal.offer)
    mine = consumer.cache.whole([1])
    pool = ThreadPoolExecutor(1)
    fetch = pool.submit(consumer.fetch, mortal.names(mine), mine)
    assert held.begun.wait(5)
    if end == "death":
        mortal.signal(signal.SIGKILL)
    else:
        consumer.receiver.close()
    time.sleep(0.3)
    assert consumer.device.opened == ALLOCATIONS
    assert not fetch.done(), "the kernel still writes to the blocks"
    held.may.set()
    assert isinstance(fetch.exception(5), PeerLost)
    assert wait_until(lambda: consumer.device.opened == 0, 1)
    pool.shutdown()


# ---- reading ---------------------------------------------------------------------------------


def whole(block: int) -> Selection:
    return Selection([block], 8, 0, 1)


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        (whole(-1), whole(1)),
        (whole(24), whole(1)),
        (whole(1 << 30), whole(1)),
        (Selection([1], 8, 1, 1), whole(1)),
        (Selection([1], 8, 0, 2), whole(1)),
        (Selection([1], 8, -1, 1), whole(1)),
        (Selection([1], 3, 0, 1), whole(1)),
        (Selection([1], 0, 0, 1), whole(1)),
        (Selection([1], 4, 0, 1), whole(1)),
        (Selection([1], 4, 0, 2), whole(1)),
        (Selection([1, 2], 8, 0, 2), whole(1)),
        (Selection([1], 8, 0, 1, (0, 2)), whole(1)),
        (Selection([1], 8, 0, 1, (0, 5)), whole(1)),
        (Selection([1], 8, 0, 1, (2, 1)), whole(1)),
        (whole(1), Selection([1], 8, 0, 1, (0, 2))),
    ],
)
def test_answers_that_name_something_else(
    producer: Producer, consumer: Consumer, theirs: Selection, mine: Selection
) -> None:
    assert consumer.opens(producer.offer)
    with pytest.raises(DataCorrupt):
        consumer.fetch(producer.names(theirs), mine)
    assert caches.untouched(consumer.cache, but=[])


def test_answers_of_others(producer: Producer, consumer: Consumer) -> None:
    assert consumer.opens(producer.offer)
    right = producer.names(whole(1))
    for answer in (offers.encode(bytes(16), whole(1)), right[:-1], b"", right + b"\0"):
        with pytest.raises(DataCorrupt):
            consumer.fetch(answer, whole(1))
    assert caches.untouched(consumer.cache, but=[])


@pytest.mark.parametrize("chunk", [1, 3000, 256 << 20])
def test_heads_and_block_sizes(
    producer: Producer, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Two of four heads into a cache that has just these, blocks of 8 tokens into blocks of 4."""
    monkeypatch.setattr(cuda_ipc, "_CHUNK_BYTES", chunk)
    shape = Shape(blocks=20, heads=2, tokens=4, content=48, layers=3, layout="BLNHC")
    consumer = make_consumer(shape)
    assert consumer.opens(producer.offer)
    its, mine = Selection([7, 0, 23], 4, 1, 5, (1, 3)), Selection([19, 3, 8, 0, 2], 4, 0, 5)
    assert consumer.fetch(producer.names(its), mine) == 5 * 4 * 2 * 48 * 3
    original = caches.make(SHAPE, SEED)
    for index in range(shape.layers):
        sent = caches.tokens(original, index, [7, 0, 23])[4:24, 1:3]
        assert caches.tokens(consumer.cache, index, [19, 3, 8, 0, 2]).equal(sent)
    assert caches.untouched(consumer.cache, but=[19, 3, 8, 0, 2])
    consumer.receiver.close()


def test_the_deadline_ends_a_read_between_chunks(
    producer: Producer, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = SHAPE.heads * SHAPE.tokens * SHAPE.content
    monkeypatch.setattr(cuda_ipc, "_CHUNK_BYTES", row)
    launched, ran = [0], [0]
    launch, run = host_device.HostStream.launch, host_device.run_kernel

    def counted(*arguments: Any) -> None:
        launched[0] += 1
        assert launched[0] - ran[0] <= 2
        launch(*arguments)

    def slow(*arguments: Any) -> None:
        time.sleep(0.02)
        run(*arguments)
        ran[0] += 1

    monkeypatch.setattr(host_device.HostStream, "launch", counted)
    monkeypatch.setattr(host_device, "run_kernel", slow)
    assert consumer.opens(producer.offer)
    mine = consumer.cache.whole(range(20))
    began = time.monotonic()
    with pytest.raises(PeerLost) as error:
        consumer.fetch(producer.names(mine), mine, seconds=0.2)
    assert error.value.reason == "deadline"
    assert time.monotonic() - began < 0.6
    assert 2 <= launched[0] == ran[0] < 30


class Later:
    """An event that has not happened yet."""

    def __init__(self) -> None:
        self.happened = False

    def is_done(self) -> bool:
        return self.happened


def test_blocks_are_written_behind_what_uses_them(producer: Producer, consumer: Consumer) -> None:
    assert consumer.opens(producer.offer)
    mine, after = whole(3), Later()
    job = FetchJob(mine, Deadline.after(0.2), after)
    with pytest.raises(PeerLost) as error:
        consumer.receive(job, producer.names(whole(5)))
    assert error.value.reason == "deadline"
    assert caches.untouched(consumer.cache, but=[])
    with ThreadPoolExecutor(1) as pool:
        job = FetchJob(mine, Deadline.after(10), after)
        fetch = pool.submit(consumer.receive, job, producer.names(whole(5)))
        time.sleep(0.1)
        assert not fetch.done()
        assert caches.untouched(consumer.cache, but=[])
        after.happened = True
        fetch.result(5)
    assert caches.agree(caches.make(SHAPE, SEED), [5], consumer.cache, [3])
