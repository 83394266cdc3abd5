"""tcp and shared_storage between caches on devices, with staging memory for one fetch at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from transport import caches, host_device
from transport.caches import Shape
from transport.host_device import COMPILER, HostStream

from disagg.errors import PeerLost, TransferError
from disagg.private_files import PrivateFolder
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache
from disagg.transport.deadline import Deadline
from disagg.transport.device import staging as staging_module
from disagg.transport.device.staging import DEPTH, Slots, Staging
from disagg.transport.shared_storage import SharedStorageReceiver, SharedStorageSender, Storage
from disagg.transport.tcp import messages as tcp_wire
from disagg.transport.tcp.tcp import TcpReceiver, TcpSender

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host")

SECRET = b"correct horse"
SHAPE = Shape(blocks=32, heads=4, tokens=16, content=256, layers=4)  # 2 MiB
LARGE = Shape(blocks=32, heads=4, tokens=16, content=256, layers=48)  # no socket holds 24 MiB
ROW = 4 * 16 * 256
ALL = list(range(SHAPE.blocks))


@dataclass
class Worker:
    """Both ends of both transports over one cache, and one slot for each direction."""

    cache: BlockCache
    staging: Staging
    sender: TcpSender
    receiver: TcpReceiver

    def job(self, seconds: float = 20) -> FetchJob:
        return FetchJob(self.cache.whole(ALL), Deadline.after(seconds))

    def send(self, receiver: TcpReceiver, seconds: float = 20) -> bytes:
        job = self.job(seconds)
        return self.sender.send(job.blocks, receiver.request(job), job.deadline)

    def fetch(self, producer: Worker) -> None:
        answer = producer.send(self.receiver)
        try:
            assert self.receiver.receive(self.job(), answer) == caches.num_bytes(SHAPE)
        finally:
            producer.sender.finish(answer)


Make = Callable[..., Worker]


def is_free(slots: Slots) -> bool:
    return len(slots._free) == 1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes workers whose chunks hold three rows; at the end all have their slots back."""
    monkeypatch.setattr(staging_module, "_LARGEST_CHUNK", 3 * ROW)
    made: list[Worker] = []

    def make(seed: int | None, shape: Shape = SHAPE) -> Worker:
        cache, device = host_device.make(shape, seed)
        staging = Staging(device, cache, 2 * DEPTH * 3 * ROW)
        sender = TcpSender(cache, "127.0.0.1", SECRET, staging=staging)
        receiver = TcpReceiver(cache, SECRET, staging=staging)
        made.append(Worker(cache, staging, sender, receiver))
        return made[-1]

    yield make
    for worker in made:
        worker.receiver.close()
        worker.sender.close()
        for slots in (worker.staging.sending, worker.staging.receiving):
            wait_for(partial(is_free, slots))
        worker.staging.close()


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = Deadline.after(seconds)
    while not condition():
        deadline.left()
        time.sleep(0.001)


def same(ours: Worker, theirs: Worker) -> bool:
    return caches.agree(ours.cache, ALL, theirs.cache, ALL)


@pytest.fixture
def stores(make: Make, tmp_path: Path) -> Iterator[tuple[Worker, SharedStorageSender]]:
    producer = make(1)
    storage = Storage(PrivateFolder(tmp_path / "storage"), 1 << 30)
    sender = SharedStorageSender(producer.cache, storage, producer.staging)
    yield producer, sender
    sender.close()


# ---- tcp ---------------------------------------------------------------------------------------


def test_more_fetches_than_slots(make: Make) -> None:
    producer, consumers = make(1), [make(None) for _ in range(3)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda consumer: consumer.fetch(producer), consumers * 4))
    assert all(same(producer, consumer) for consumer in consumers)


def test_a_ring_of_workers_with_one_slot_each(make: Make) -> None:
    """Each sends to both others and fetches from them, all at once: nobody waits for ever."""
    workers = [make(7) for _ in range(3)]
    pairs = [(a, b) for a in workers for b in workers if a is not b]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda pair: pair[0].fetch(pair[1]), pairs * 6))
    assert same(workers[0], workers[2])


def test_one_stream_whatever_is_asked_for(make: Make) -> None:
    producer = make(1)
    job = producer.job()
    assert tcp_wire.decode_request(producer.receiver.request(job)).streams == 1
    asked = tcp_wire.encode(tcp_wire.Request(8))
    answer = producer.sender.send(job.blocks, asked, job.deadline)
    assert tcp_wire.decode_staged(answer).streams == 1
    producer.sender.finish(answer)


def test_streams_of_a_host_cache_into_a_device(make: Make) -> None:
    """Each stream takes the one slot in its turn."""
    consumer = make(None)
    source = caches.make(SHAPE, 3)
    sender = TcpSender(source, "127.0.0.1", SECRET)
    receiver = TcpReceiver(consumer.cache, SECRET, streams=4, staging=consumer.staging)
    job = consumer.job()
    answer = sender.send(source.whole(ALL), receiver.request(job), job.deadline)
    assert tcp_wire.decode_staged(answer).streams == 4
    receiver.receive(job, answer)
    sender.finish(answer)
    assert caches.agree(source, ALL, consumer.cache, ALL)
    receiver.close()
    sender.close()


def test_the_end_of_a_fetch_that_still_waits_for_memory(make: Make) -> None:
    producer, consumer = make(1), make(None)
    with ThreadPoolExecutor(1) as pool:
        with producer.staging.sending.take(Deadline.after(20)):
            answer = producer.send(consumer.receiver)
            fetching = pool.submit(consumer.receiver.receive, consumer.job(), answer)
            wait_for(lambda: len(producer.staging.sending._waiting) == 1)
            began = time.monotonic()
            producer.sender.finish(answer)
            assert time.monotonic() - began < 1
            assert isinstance(fetching.exception(2), PeerLost)
        consumer.fetch(producer)
    assert same(producer, consumer)


def test_who_has_no_memory_yet_asks_for_nothing(make: Make) -> None:
    """So the producer's memory is never taken for a consumer that waits for its own."""
    producer, consumer = make(1), make(None)
    answer = producer.send(consumer.receiver)
    with consumer.staging.receiving.take(Deadline.after(20)):
        with pytest.raises(PeerLost) as error:
            consumer.receiver.receive(consumer.job(0.3), answer)
        assert error.value.reason == "deadline"
        assert len(producer.staging.sending._free) == 1
        (fetch,) = producer.sender._fetches.values()
        assert fetch.waiting == {0}
    consumer.receiver.receive(consumer.job(), answer)
    producer.sender.finish(answer)
    assert same(producer, consumer)


def test_nothing_is_written_after_a_fetch_was_cut(make: Make) -> None:
    producer, consumer = make(1, LARGE), make(None, LARGE)
    stream, gate = consumer.staging.receiving._free[0].stream, threading.Event()
    assert isinstance(stream, HostStream)
    stream.add(gate.wait)
    answer = producer.send(consumer.receiver)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(consumer.receiver.receive, consumer.job(), answer)
        wait_for(lambda: stream._work.qsize() >= 3)  # a piece is to be copied and scattered
        producer.sender.finish(answer)
        time.sleep(0.05)
        assert not fetching.done(), "its blocks are still to be written to"
        gate.set()
        assert isinstance(fetching.exception(5), TransferError)
    found = [region.memory.clone() for region in consumer.cache.regions]
    time.sleep(0.05)
    for region, memory in zip(consumer.cache.regions, found, strict=True):
        assert region.memory.equal(memory)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_device_that_fails(make: Make, side: str) -> None:
    producer, consumer = make(1), make(None)
    slots = producer.staging.sending if side == "producer" else consumer.staging.receiving
    stream = slots._free[0].stream
    assert isinstance(stream, HostStream)
    stream.add(lambda: 1 // 0)
    with pytest.raises(TransferError) as error:
        consumer.fetch(producer)
    assert error.value.reason == ("peer_lost" if side == "producer" else "device")
    consumer.fetch(producer)
    assert same(producer, consumer)


def test_blocks_are_not_written_before_the_fence(make: Make) -> None:
    producer, consumer = make(1), make(None)
    model, gate = consumer.staging.device.stream(), threading.Event()
    assert isinstance(model, HostStream)
    model.add(gate.wait)
    job = FetchJob(consumer.cache.whole(ALL), Deadline.after(20), model.record())
    answer = producer.send(consumer.receiver)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(consumer.receiver.receive, job, answer)
        time.sleep(0.1)
        assert caches.untouched(consumer.cache, but=[])
        gate.set()
        fetching.result(10)
    producer.sender.finish(answer)
    model.close()
    assert same(producer, consumer)


# ---- shared storage ----------------------------------------------------------------------------


def test_files_are_those_of_a_host_cache(
    stores: tuple[Worker, SharedStorageSender], tmp_path: Path
) -> None:
    """In every byte; either side may be on a device."""
    producer, sender = stores
    other = Storage(PrivateFolder(tmp_path / "other"), 1 << 30)
    host = SharedStorageSender(caches.make(SHAPE, 1), other)
    blocks, deadline = producer.cache.whole([5, 1, 30]), Deadline.after(5)
    answers = [each.send(blocks, b"", deadline) for each in (sender, host)]
    files = [*(tmp_path / "storage").glob("*.safetensors")]
    files += (tmp_path / "other").glob("*.safetensors")
    assert len(files) == 2
    assert files[0].read_bytes() == files[1].read_bytes()
    target = caches.make(SHAPE, None)
    receiver = SharedStorageReceiver(target, Storage(PrivateFolder(tmp_path / "storage"), 0))
    files_of = receiver.open(sender.offer())
    assert files_of is not None
    files_of.receive(FetchJob(target.whole([7, 0, 2]), deadline), answers[0])
    assert caches.agree(producer.cache, [5, 1, 30], target, [7, 0, 2])
    sender.finish(answers[0])
    host.finish(answers[1])
    host.close()


def test_a_damaged_file_gives_the_memory_back(
    make: Make, stores: tuple[Worker, SharedStorageSender], tmp_path: Path
) -> None:
    (producer, sender), consumer = stores, make(None)
    storage = Storage(PrivateFolder(tmp_path / "storage"), 0)
    opened = SharedStorageReceiver(consumer.cache, storage, consumer.staging).open(sender.offer())
    assert opened is not None
    for spoil, reason in ((-1, "storage_checksum"), (None, None)):
        answer = sender.send(producer.cache.whole(ALL), b"", Deadline.after(5))
        (file,) = storage.folder.path.glob("*.safetensors")
        if spoil is None:
            opened.receive(consumer.job(), answer)
        else:
            content = bytearray(file.read_bytes())
            content[spoil] ^= 1
            file.write_bytes(content)
            with pytest.raises(TransferError) as error:
                opened.receive(consumer.job(), answer)
            assert error.value.reason == reason
        assert len(consumer.staging.receiving._free) == 1
        sender.finish(answer)
    assert same(producer, consumer)


def test_a_full_disk_gives_the_memory_back(
    stores: tuple[Worker, SharedStorageSender], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, sender = stores
    written: list[int] = []

    def full(descriptor: int, pieces: list[memoryview]) -> int:
        written.append(sum(map(len, pieces)))
        if len(written) == 4:
            raise OSError("no space left")
        return written[-1]

    monkeypatch.setattr("disagg.transport.shared_storage.os.writev", full)
    with pytest.raises(TransferError) as error:
        sender.send(producer.cache.whole(ALL), b"", Deadline.after(5))
    assert error.value.reason == "storage_write"
    assert len(producer.staging.sending._free) == 1
