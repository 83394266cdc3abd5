"""Fetches that read directly, without asking the producer: validity, and the release afterwards."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transport import caches
from transport.caches import PLAIN, Shape
from transport.host_device import COMPILER
from transport.pairs import Pair
from transport.worker import Order, Remote, Setup, Worker, wait_until

from disagg.errors import LeaseGone, PeerLost, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob, LeaseEntry
from disagg.transport.control.client import Endpoint
from disagg.transport.deadline import Deadline
from disagg.transport.host import process_vm
from disagg.transport.one_sided import hazard_pointers, lease_board
from disagg.transport.one_sided.hazard_pointers import RemoteHazardPointers
from disagg.transport.one_sided.remote_lease_board import BoardCache

ROWS = 1024
LARGE = Shape(blocks=64, heads=2, tokens=64, content=128, layers=4)  # 4 MiB


@pytest.fixture
def shape(request: pytest.FixtureRequest) -> Shape:
    found: Shape = getattr(request, "param", PLAIN)
    return found


@pytest.fixture(params=["process_memory-cpu", "cuda_ipc-emulated", "cuda_ipc-cuda"])
def pair(tmp_path: Path, request: pytest.FixtureRequest, shape: Shape) -> Iterator[Pair]:
    transport, device = request.param.split("-")
    if device == "emulated" and COMPILER is None:
        pytest.skip("needs g++ to run the kernel on the host")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    folder = tmp_path / "storage"
    folder.mkdir(mode=0o700)
    producer = Remote(Setup(transport, device, shape, 1, folder))
    consumer = Worker(Setup(transport, device, shape, None, folder))
    yield Pair(producer, consumer, shape)
    consumer.close()
    producer.close()


def offer_of(pair: Pair) -> bytes:
    """Of the producer, from a connection of the consumer's that stays open."""
    with pair.consumer.peers.connection(pair.producer.endpoint, Deadline.after(5)) as connection:
        offer = connection.welcome.offers[pair.producer.setup.transport]
        assert pair.consumer.receiver.open(offer)
        return offer


def numbers(pid: int, board: int) -> list[int]:
    """The leases on another process's board now."""
    found, rows = np.zeros(ROWS, np.int64), np.arange(ROWS)
    far = np.column_stack([board + 4096 * rows, np.full(ROWS, 8)]).astype(np.uint64)
    process_vm.read(pid, np.array([[found.ctypes.data, found.nbytes]], np.uint64), far)
    return [int(number) - 1 for number in found[found > 0]]


@pytest.mark.parametrize("names_it", [True, False])
@pytest.mark.parametrize("shape", [LARGE], indirect=True)
def test_blocks_that_are_given_to_others_while_they_are_read(
    pair: Pair, tmp_path: Path, names_it: bool
) -> None:
    """Again and again. A reader that names the lease in its slot reads no other blocks, whatever
    becomes of the lease. One that does not, or whose time is over, sees that the lease is gone."""
    receiver, blocks = pair.consumer.receiver, list(range(0, 64, 2))
    job = FetchJob(pair.consumer.cache.whole(blocks), Deadline.after(30))
    part, seen = p.Part(64, ((0, len(blocks)),)), Counter[str]()
    with pair.consumer.peers.connection(pair.producer.endpoint, Deadline.after(50)) as connection:
        offer, slot = connection.welcome.offers[receiver.name], connection.welcome.slot
        cache = receiver.open(offer)
        assert isinstance(cache, BoardCache)
        board = cache.board
        assert board is not None
        pair.producer.start("churn", 40.0, blocks, stop := tmp_path / "stop")
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < 3 or (passed_s < 38 and len(seen) < 3):
            for lease in numbers(board.pid, board.at.address):
                named = board.hazards.naming(slot, lease) if names_it else contextlib.nullcontext()
                with named:
                    entry = lease_board.look_up(board.peek, board.at.address, board.at.token, lease)
                    if entry is None:
                        seen["gone before"] += 1
                        continue
                    cache.read(entry, part, job)
                    is_there = cache.still_there(entry)
                seen["valid" if is_there else "gone meanwhile"] += 1
                if is_there or names_it:
                    expected = lease % caches.SCRIBBLE
                    for region in pair.consumer.cache.regions:
                        assert bool((region.memory[blocks] == expected).all())
        stop.touch()
        pair.producer.result()
    assert seen.keys() >= {"valid", "gone meanwhile"}, seen


def test_the_lease_is_released_afterwards(pair: Pair) -> None:
    """While the blocks are being used, and once per lease."""
    for lease in range(60):
        pair.producer.call("grant", lease, [lease % 24])
        with pair.fetched(lease, [(lease + 1) % 24]):
            assert pair.is_right([lease % 24], [(lease + 1) % 24])
            assert pair.producer.call("outcome", lease) is None
        assert wait_until(lambda lease=lease: pair.producer.call("outcome", lease) == "fetched", 2)
    assert pair.producer.call("connections") == 1


def test_the_lease_is_in_use_until_its_release(pair: Pair) -> None:
    offer_of(pair)
    pair.producer.call("grant", 0, [4], 0.1)
    with pair.fetched(0, [2]):
        time.sleep(0.3)
        assert pair.producer.call("outcome", 0) is None
        assert pair.producer.call("held") == 1
    assert wait_until(lambda: pair.producer.call("outcome", 0) == "fetched", 2)


def test_a_producer_that_stays_stopped(pair: Pair) -> None:
    """It is read; only the release waits for it."""
    offer_of(pair)
    for lease in range(3):
        pair.producer.call("grant", lease, [lease])
    pair.producer.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pair.fetched(0, [5]):
        assert time.monotonic() - began < 0.5
        assert pair.is_right([0], [5])
    assert time.monotonic() - began < 4
    began = time.monotonic()
    with pytest.raises(PeerLost):  # the connection is gone, and there is no other
        pair.fetch(1, [6], seconds=0.5)
    assert time.monotonic() - began < 2
    pair.producer.signal(signal.SIGCONT)
    assert wait_until(lambda: pair.producer.call("outcome", 0) == "fetched", 5)
    for lease in (1, 2):
        pair.fetch(lease, [7])
        assert pair.is_right([lease], [7])
    assert pair.nothing_held()


def test_leases_of_an_earlier_life(pair: Pair) -> None:
    """Their numbers are given again, on the same port."""
    pair.producer.call("grant", 0, [4])
    earlier = Endpoint("127.0.0.1", pair.producer.endpoint.port, "another life")
    order = Order(earlier, 0, p.Part(8, ((0, 1),)), pair.consumer.cache.whole([2]))
    with pytest.raises(LeaseGone):
        pair.consumer.fetch(order)
    assert caches.untouched(pair.consumer.cache, but=[])
    pair.fetch(0, [2])


def test_a_part_that_the_lease_does_not_have(pair: Pair) -> None:
    """The producer reports the reason."""
    pair.producer.call("grant", 0, [4, -1])
    pair.producer.call("grant", 1, [4])
    for lease, reason in ((0, "window"), (1, "range")):
        with pytest.raises(TransferError) as error:
            pair.fetch(lease, [2, 3])
        assert error.value.reason == reason
    assert caches.untouched(pair.consumer.cache, but=[])
    assert pair.nothing_held()


@pytest.mark.parametrize("why", ["all taken", "cannot be mapped"])
def test_without_slots_it_is_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "all taken":
        monkeypatch.setattr(RemoteHazardPointers, "have", lambda *_: False)
    else:
        monkeypatch.setattr(hazard_pointers, "_BYTES", 1 << 30)
    offer_of(pair)
    pair.producer.call("grant", 0, [1, 2, 3])
    pair.producer.signal(signal.SIGSTOP)
    with pytest.raises(PeerLost):
        pair.fetch(0, [7, 8, 9], seconds=0.3)
    pair.producer.signal(signal.SIGCONT)
    pair.fetch(0, [7, 8, 9])
    assert pair.is_right([1, 2, 3], [7, 8, 9])
    assert pair.nothing_held()


def test_a_producer_that_dies_before_the_release(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks read while it lived are valid, and stay so."""
    still_there = BoardCache.still_there

    def and_then_dies(cache: BoardCache, entry: LeaseEntry) -> bool:
        found = still_there(cache, entry)
        pair.producer.signal(signal.SIGKILL)
        return found

    pair.producer.call("grant", 0, [1, 2])
    monkeypatch.setattr(BoardCache, "still_there", and_then_dies)
    pair.fetch(0, [3, 4])
    assert pair.is_right([1, 2], [3, 4])
    pair.consumer.peers.close()
    with pytest.raises(PeerLost):
        pair.fetch(1, [5])


def test_a_dead_producers_cache_is_dropped(pair: Pair) -> None:
    """When the consumer meets another one: the dead one is never fetched from again."""
    pair.producer.call("grant", 0, [1])
    pair.fetch(0, [2])
    peers = pair.consumer.peers
    assert peers._opened.keys() == {pair.producer.endpoint}
    pair.producer.signal(signal.SIGKILL)
    other = Remote(pair.producer.setup)
    with peers.connection(other.endpoint, Deadline.after(5)):
        assert peers._opened.keys() == {other.endpoint}
        assert pair.producer.endpoint not in peers._idle
    other.close()
