"""NCCL's communicators over a stand-in for the GPU: order, ends, and what fails on purpose.

What needs no second process; `tests/transport` has the rest, and the same over CUDA.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transport import caches
from transport.caches import Shape
from transport.host_communicator import FAIL, Failures, HostCommunicators
from transport.host_device import COMPILER, HostDevice, HostStream
from transport.worker import Order, Setup, Worker, wait_until

from disagg.errors import DataCorrupt, PeerLost, PeerRefused, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob
from disagg.transport.blocks import Selection
from disagg.transport.control import data_channel
from disagg.transport.control.channel import Channel
from disagg.transport.deadline import Deadline
from disagg.transport.nccl import communicator, nccl
from disagg.transport.nccl.nccl import NcclReceiver, NcclSender

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host")

SHAPE = Shape(blocks=64, heads=2, tokens=16, content=128, layers=4)
ROW = 2 * 16 * 128
# One slot for each direction, of chunks of eight rows: a fetch of all blocks has 32 of them.
STAGING = 2 * 2 * 8 * ROW

MakeWorker = Callable[..., Worker]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[MakeWorker]:
    made: list[Worker] = []
    seeds = iter(range(1, 100))

    def make(*, empty: bool = False, **more: object) -> Worker:
        more = {"transport": "nccl", "shape": SHAPE, "staging_bytes": STAGING, **more}
        seed = None if empty else next(seeds)
        setup = Setup(device="emulated", seed=seed, folder=tmp_path, **more)  # type: ignore[arg-type]
        made.append(Worker(setup))
        return made[-1]

    yield make
    vars(FAIL).update(vars(Failures()))
    for one in made:
        one.close()
        assert device_of(one).memory_in_use == 0, "device memory is lost"
    assert HostCommunicators.open == 0, "communicators are left"
    assert wait_until(lambda: not nccl_threads(), 5), f"threads are left: {nccl_threads()}"


def device_of(worker: Worker) -> HostDevice:
    assert worker.staging is not None
    device = worker.staging.device
    assert isinstance(device, HostDevice)
    return device


def nccl_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("disagg-nccl")]


def fetch(producer: Worker, consumer: Worker, lease: int, ids: list[int], **more: object) -> str:
    """Move these blocks of the producer's to the same places; over which transport."""
    producer.grant(lease, ids)
    part = p.Part(SHAPE.tokens, ((0, len(ids)),))
    order = Order(producer.endpoint, lease, part, consumer.cache.whole(ids), **more)  # type: ignore[arg-type]
    return consumer.fetch(order).transport


def is_right(producer: Worker, consumer: Worker, ids: list[int]) -> bool:
    return caches.agree(producer.cache, ids, consumer.cache, ids)


def receiver_of(worker: Worker) -> NcclReceiver:
    (found,) = [one for one in worker.receivers if isinstance(one, NcclReceiver)]
    return found


def sender_of(worker: Worker) -> NcclSender:
    (found,) = [one for one in worker.senders if isinstance(one, NcclSender)]
    return found


def test_joined_once_for_many_fetches(worker: MakeWorker) -> None:
    producer, consumer = worker(), worker(empty=True)
    for lease in range(20):
        ids = [lease, 63 - lease, lease + 20]
        assert fetch(producer, consumer, lease, ids) == "nccl"
        assert is_right(producer, consumer, ids)
        assert HostCommunicators.open == 2


def test_not_joined_while_a_transport_before_it_works(worker: MakeWorker) -> None:
    """To join costs time, and memory of both GPUs."""
    both = {"transport": "tcp", "also": ("nccl",)}
    producer, consumer = worker(**both), worker(empty=True, **both)
    assert fetch(producer, consumer, 0, [1, 2]) == "tcp"
    assert HostCommunicators.open == 0


def test_a_producer_just_met_is_not_forgotten(worker: MakeWorker) -> None:
    """Two first fetches at once share one communicator, however long this host has been up."""
    producer, consumer = worker(), worker(empty=True)
    at, receiver = sender_of(producer)._offer, receiver_of(consumer)
    assert at is not None
    assert receiver._peer(at) is receiver._peer(at)


def test_requests_of_one_pair_at_once(worker: MakeWorker) -> None:
    """More than there are slots, in both directions at once: none waits for another for ever."""
    left, right = worker(), worker()
    originals = [caches.make(SHAPE, one.setup.seed) for one in (left, right)]
    with ThreadPoolExecutor(32) as pool:
        futures = []
        for number in range(16):
            mine, its = [2 * number], [2 * number + 1]
            futures.append(pool.submit(fetch, left, right, number, mine, seconds=20))
            futures.append(pool.submit(fetch, right, left, number, its, seconds=20))
        assert {future.result(30) for future in futures} == {"nccl"}
    even, odd = list(range(0, 32, 2)), list(range(1, 32, 2))
    assert caches.agree(originals[0], even, right.cache, even)
    assert caches.agree(originals[1], odd, left.cache, odd)
    assert HostCommunicators.open == 4


def test_three_workers_in_a_triangle(worker: MakeWorker) -> None:
    ring = [worker(), worker(), worker()]
    originals = [caches.make(SHAPE, one.setup.seed) for one in ring]
    with ThreadPoolExecutor(12) as pool:
        futures = [
            pool.submit(fetch, ring[at], ring[(at + 1) % 3], number, [3 * number + at], seconds=20)
            for at in range(3)
            for number in range(16)
        ]
        assert {future.result(30) for future in futures} == {"nccl"}
    for at in range(3):
        ids = [3 * number + at for number in range(16)]
        assert caches.agree(originals[at], ids, ring[(at + 1) % 3].cache, ids)


@pytest.mark.parametrize("sends", [0, 1, 7, 31])
def test_a_send_that_breaks_ends_the_communicator_and_the_next_transport_takes_over(
    worker: MakeWorker, sends: int
) -> None:
    producer, consumer = worker(also=("tcp",)), worker(empty=True, also=("tcp",))
    everything = list(range(64))
    assert fetch(producer, consumer, 0, [5]) == "nccl"
    FAIL.sends = sends
    began = time.monotonic()
    assert fetch(producer, consumer, 1, everything) == "tcp"
    assert time.monotonic() - began < 5
    assert is_right(producer, consumer, everything)
    assert wait_until(lambda: HostCommunicators.open == 0, 2)
    # A communicator's failure does not count for the next one.
    assert fetch(producer, consumer, 2, everything) == "nccl"


def test_a_join_that_fails_is_not_tried_again_at_once(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_FIRST_PAUSE_S", 0.3)
    producer, consumer = worker(also=("tcp",)), worker(empty=True, also=("tcp",))
    assert fetch(producer, consumer, 0, [1]) == "nccl"
    FAIL.sends = 0
    assert fetch(producer, consumer, 1, [2]) == "tcp"
    FAIL.joins = 1
    assert fetch(producer, consumer, 2, [3]) == "tcp"
    FAIL.joins = 0
    assert fetch(producer, consumer, 3, [4]) == "tcp"  # within the pause
    time.sleep(0.4)
    assert fetch(producer, consumer, 4, [5]) == "nccl"
    assert is_right(producer, consumer, [1, 2, 3, 4, 5])


def test_a_peer_that_does_not_join_in_time(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_JOIN_S", 0.5)
    producer, consumer = worker(also=("tcp",)), worker(empty=True, also=("tcp",))
    FAIL.silent = 1
    began = time.monotonic()
    assert fetch(producer, consumer, 0, [1, 2]) == "tcp"
    assert time.monotonic() - began < 3
    assert is_right(producer, consumer, [1, 2])


def test_a_producer_that_ends_ends_its_communicator_between_fetches(worker: MakeWorker) -> None:
    producer, consumer = worker(), worker(empty=True)
    fetch(producer, consumer, 0, [1])
    assert HostCommunicators.open == 2
    sender_of(producer).close()
    assert wait_until(lambda: HostCommunicators.open == 0, 2)


def test_a_consumer_that_ends_ends_its_communicator(worker: MakeWorker) -> None:
    producer, consumer = worker(), worker(empty=True)
    fetch(producer, consumer, 0, [1])
    receiver_of(consumer).close()
    assert wait_until(lambda: HostCommunicators.open == 0, 2)
    with pytest.raises(TransferError, match="closed"):
        fetch(producer, consumer, 1, [1])


def test_no_memory_is_lost_in_a_hundred_rounds(worker: MakeWorker) -> None:
    """Each round is cut at another place; device memory and communicators are as before."""
    producer, consumer = worker(also=("tcp",)), worker(empty=True, also=("tcp",))
    everything = list(range(64))
    fetch(producer, consumer, 0, everything)
    before = [device_of(one).memory_in_use for one in (producer, consumer)]
    ways = []
    for lease in range(1, 101):
        FAIL.sends = lease % 40
        ways.append(fetch(producer, consumer, lease, everything))
        FAIL.sends = None
    assert is_right(producer, consumer, everything)
    assert ways.count("tcp") > 70
    assert [device_of(one).memory_in_use for one in (producer, consumer)] == before
    assert HostCommunicators.open <= 2


def test_finish_waits_until_nothing_reads_the_blocks(worker: MakeWorker) -> None:
    """The lease's end cuts a communicator whose consumer does not receive."""
    # More than sockets' buffers take when nobody receives.
    large = {"shape": replace(SHAPE, tokens=512, content=256), "staging_bytes": 16 << 20}
    producer, consumer = worker(**large), worker(empty=True, **large)
    sender = sender_of(producer)
    assert receiver_of(consumer).open(sender.offer())
    (peer,) = receiver_of(consumer)._peers.values()
    pair = peer.communicator
    assert pair is not None
    everything = producer.cache.whole(list(range(64)))
    staged = sender.send(everything, b"", Deadline.after(20))
    key = nccl._decode_staged(staged).key
    receiver_of(consumer)._watch.remove(pair.channel.sock.fileno())
    pair.channel.send(data_channel.encode(communicator.NcclPull(key)), Deadline.after(5))
    sending = communicator.decode_sending(pair.channel.receive(Deadline.after(5)))
    assert sending.size == producer.cache.num_bytes(everything)
    began = time.monotonic()
    sender.finish(staged)
    assert time.monotonic() - began < 3
    assert sender._fetches == {}
    caches.fill(producer.cache, range(64), caches.SCRIBBLE)
    assert wait_until(lambda: HostCommunicators.open <= 1, 2)


def test_a_key_works_once_and_only_until_the_end(worker: MakeWorker) -> None:
    producer, consumer = worker(), worker(empty=True)
    fetch(producer, consumer, 0, [1])
    sender, receiver = sender_of(producer), receiver_of(consumer)
    job = FetchJob(consumer.cache.whole([2]), Deadline.after(5))
    staged = sender.send(producer.cache.whole([2]), b"", Deadline.after(5))
    assert receiver.receive(job, staged) == consumer.cache.num_bytes(job.blocks)
    for gone in (staged, sender.send(producer.cache.whole([3]), b"", Deadline.after(5))):
        sender.finish(gone)
        with pytest.raises(TransferError, match="no such fetch") as error:
            receiver.receive(job, gone)
        assert error.value.reason == "nccl_gone"
    assert HostCommunicators.open == 2, "the communicator can be used on"
    assert fetch(producer, consumer, 1, [4]) == "nccl"


def test_answers_of_another_size(worker: MakeWorker) -> None:
    producer, consumer = worker(), worker(empty=True)
    fetch(producer, consumer, 0, [1])
    staged = sender_of(producer).send(producer.cache.whole([2, 3]), b"", Deadline.after(5))
    job = FetchJob(consumer.cache.whole([2]), Deadline.after(5))
    with pytest.raises(DataCorrupt, match="bytes instead of"):
        receiver_of(consumer).receive(job, staged)
    answer = nccl._decode_staged(staged)
    lie = nccl._Staged(answer.at, answer.key, consumer.cache.num_bytes(job.blocks))
    with pytest.raises(DataCorrupt, match="bytes instead of"):
        receiver_of(consumer).receive(job, data_channel.encode(lie))
    assert caches.untouched(consumer.cache, but=[1])
    assert fetch(producer, consumer, 1, [4]) == "nccl"


def test_a_deadline_amid_a_fetch_frees_both_sides(worker: MakeWorker) -> None:
    producer, consumer = worker(), worker(empty=True)
    fetch(producer, consumer, 0, [1])
    blocked = threading.Event()
    stream = _wire_of(consumer)
    stream.add(lambda: blocked.wait(10))
    threading.Timer(2.0, blocked.set).start()
    began = time.monotonic()
    with pytest.raises(TransferError):
        fetch(producer, consumer, 1, list(range(64)), seconds=0.5)
    assert time.monotonic() - began < 5
    assert wait_until(lambda: HostCommunicators.open == 0, 2)
    assert fetch(producer, consumer, 2, [6]) == "nccl"
    assert is_right(producer, consumer, [6])


def test_blocks_that_stand_still_go_another_way(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the deadline; and NCCL is not tried again at once."""
    monkeypatch.setattr(communicator, "_STALL_S", 0.2)
    producer, consumer = worker(also=("tcp",)), worker(empty=True, also=("tcp",))
    assert fetch(producer, consumer, 0, [1]) == "nccl"
    (peer,) = receiver_of(consumer)._peers.values()

    def stalled(lease: int) -> str:
        blocked = threading.Event()
        _wire_of(consumer).add(lambda: blocked.wait(10))
        threading.Timer(1.0, blocked.set).start()
        return fetch(producer, consumer, lease, [2, 7], seconds=20)

    assert stalled(1) == "tcp"
    assert (peer.communicator, peer.pauses) == (None, 1)
    assert fetch(producer, consumer, 2, [3]) == "tcp"
    peer._not_before = time.monotonic()
    assert receiver_of(consumer).open(sender_of(producer).offer())  # joined, not trusted yet
    assert stalled(3) == "tcp"
    assert (peer.communicator, peer.pauses) == (None, 2)
    peer._not_before = time.monotonic()
    assert fetch(producer, consumer, 4, [4]) == "nccl"
    assert peer.pauses == 0
    assert is_right(producer, consumer, [1, 2, 3, 4, 7])


def test_nothing_is_asked_for_before_blocks_may_be_written(worker: MakeWorker) -> None:
    """What is sent or received would wait on both GPUs for a step of the consumer's model."""
    producer, consumer = worker(), worker(empty=True)
    fetch(producer, consumer, 0, [1])
    sender, gate = sender_of(producer), device_of(consumer).stream()
    opened = threading.Event()
    gate.add(lambda: opened.wait(10))
    job = FetchJob(consumer.cache.whole([2]), Deadline.after(10), gate.record())
    staged = sender.send(producer.cache.whole([2]), b"", Deadline.after(10))
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver_of(consumer).receive, job, staged)
        time.sleep(0.2)
        assert not receiving.done()
        assert [one.communicator for one in sender._fetches.values()] == [None]
        assert not receiver_of(consumer)._peers[sender._offer].busy.locked()  # type: ignore[index]
        opened.set()
        assert receiving.result(5) == consumer.cache.num_bytes(job.blocks)
    assert is_right(producer, consumer, [1, 2])
    gate.close()


def _wire_of(consumer: Worker) -> HostStream:
    (peer,) = receiver_of(consumer)._peers.values()
    assert peer.communicator is not None
    wire = peer.communicator._wire
    assert isinstance(wire, HostStream)
    return wire


def test_strangers(worker: MakeWorker) -> None:
    """Another secret, another version, nonsense: refused, and the communicators of others go on."""
    producer, consumer = worker(), worker(empty=True)
    fetch(producer, consumer, 0, [1])
    at = sender_of(producer)._offer
    assert at is not None
    soon = Deadline.after(5)
    right = nccl._secret(b"correct horse")
    join = communicator.Join(communicator.HELLO, "host", 1 << 20)
    for secret, words in [
        (b"wrong", data_channel.encode(join)),
        (nccl._secret(b"wrong"), data_channel.encode(join)),
        (right, b"nonsense"),
        (right, data_channel.encode(communicator.Join(communicator.HELLO, "2.1", 1 << 20))),
        (right, data_channel.encode(communicator.Join("disagg-nccl/0", "host", 1 << 20))),
    ]:
        channel = Channel.connect(at.host, at.port, secret, soon)
        channel.send(words, soon)
        with pytest.raises((PeerLost, PeerRefused)):
            channel.receive(soon)
        channel.close()
    assert fetch(producer, consumer, 1, [2]) == "nccl"
    assert not NcclReceiver(consumer.cache, consumer.staging, b"wrong").open(
        sender_of(producer).offer()
    )


def test_a_smaller_staging_on_one_side(worker: MakeWorker) -> None:
    producer, consumer = worker(), worker(empty=True, staging_bytes=STAGING // 4)
    assert fetch(producer, consumer, 0, list(range(64))) == "nccl"
    assert is_right(producer, consumer, list(range(64)))


def test_a_cache_in_host_memory_offers_nothing() -> None:
    cache = caches.make(SHAPE, 1)
    sender, receiver = NcclSender(cache, None, "127.0.0.1", b"s"), NcclReceiver(cache, None, b"s")
    assert sender.offer() == b""
    assert not receiver.open(b"")
    with pytest.raises(TransferError):
        sender.send(Selection([1], 16, 0, 1), b"", Deadline.after(1))
    sender.close()
    receiver.close()
