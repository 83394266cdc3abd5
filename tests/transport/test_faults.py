"""Processes that die, stop or stay silent: right data or an error, soon, and nothing held."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transport import caches
from transport.caches import PLAIN, Shape
from transport.pairs import MakePair, Pair, Start
from transport.worker import Act, Order, Remote, is_stopped, wait_until

from disagg.errors import PeerLost, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob
from disagg.transport.deadline import Deadline

KILL, STOP, CONTINUE = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
# Takes tens of milliseconds to move: signals sent meanwhile come in the middle.
LARGE = Shape(blocks=512, heads=2, tokens=64, content=128, layers=4)  # 32 MiB
DELAYS = [0.001, 0.008, 0.03, 0.1]


@pytest.fixture
def consumer(start: Start) -> Callable[..., Remote]:
    """Starts a consumer that may be killed."""

    def make(shape: Shape = PLAIN) -> Remote:
        worker = start(shape, remote=True, empty=True)
        assert isinstance(worker, Remote)
        return worker

    return make


def meet(pair: Pair, worker: Remote) -> None:
    """Fetch once: to join NCCL, or to open a GPU's memory, may take longer than a short lease."""
    pair.producer.call("grant", 0, [0])
    worker.call("fetch", pair.order(0, [0]))


@pytest.mark.parametrize("met", [False, True], ids=["never-met", "connected"])
def test_producer_dead_before(make_pair: MakePair, met: bool) -> None:
    pair = make_pair()
    if met:
        pair.producer.call("grant", 0, [1])
        pair.fetch(0, [1])
    pair.producer.call("grant", 1, [1])
    pair.producer.signal(KILL)
    began = time.monotonic()
    with pytest.raises(PeerLost):
        pair.fetch(1, [2])
    assert time.monotonic() - began < 2
    assert caches.untouched(pair.consumer.cache, but=[1])


@pytest.mark.parametrize("when", ["before", "after"])
def test_producer_dies_around_the_read(make_pair: MakePair, when: str) -> None:
    """Even what was read whole is not believed: the memory may be given to others by a new life.
    What was sent whole is."""
    pair = make_pair()
    pair.producer.call("grant", 0, [1, 2])
    kill = Act(KILL, pair.producer.pid)
    if pair.is_over(when):
        pair.fetch(0, [3, 4], **{when: kill})
        assert pair.is_right([1, 2], [3, 4])
    else:
        with pytest.raises(TransferError):
            pair.fetch(0, [3, 4], **{when: kill})
    assert kill.done
    assert time.monotonic() - kill.done < 2
    assert caches.untouched(pair.consumer.cache, but=[3, 4])


@pytest.mark.parametrize("delay", DELAYS)
def test_producer_dies_at_any_time(make_pair: MakePair, delay: float) -> None:
    pair = make_pair(LARGE)
    pair.producer.call("grant", 0, range(512))
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(pair.fetch, 0, range(512))
        time.sleep(delay)
        pair.producer.signal(KILL)
        killed = time.monotonic()
        error = fetch.exception(10)
        assert time.monotonic() - killed < 2
        assert isinstance(error, TransferError) or pair.is_right(range(512), range(512))


def test_the_next_life_of_a_producer_serves_again(make_pair: MakePair, start: Start) -> None:
    first = make_pair()
    first.producer.call("grant", 0, [1])
    first.fetch(0, [1])
    first.producer.signal(KILL)
    second = start(first.shape, remote=True, empty=False)
    second.call("grant", 0, [1])
    mine = first.consumer.cache.whole([2])
    first.consumer.fetch(Order(second.endpoint, 0, p.Part(8, ((0, 1),)), mine))
    expected = caches.prompts(caches.make(first.shape, second.setup.seed), [1])
    assert caches.same(expected, first.consumer.prompts([2]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_consumer_dies_around_the_read(
    make_pair: MakePair, consumer: Callable[..., Remote], when: str
) -> None:
    pair, victim = make_pair(), consumer()
    meet(pair, victim)
    pair.producer.call("grant", 1, [1, 2], 1)
    victim.start("fetch", pair.order(1, [3, 4], **{when: KILL}))
    with pytest.raises(EOFError):
        victim.result(10)
    assert pair.nothing_held()
    assert pair.producer.call("outcome", 1) == "expired"
    pair.producer.call("grant", 2, [1, 2])
    pair.fetch(2, [5, 6])
    assert pair.is_right([1, 2], [5, 6])


@pytest.mark.parametrize("delay", DELAYS)
def test_consumer_dies_at_any_time(
    make_pair: MakePair, consumer: Callable[..., Remote], delay: float
) -> None:
    pair, victim = make_pair(LARGE), consumer(LARGE)
    pair.producer.call("grant", 0, range(512), 0.3)
    victim.start("fetch", pair.order(0, range(512)))
    time.sleep(delay)
    victim.signal(KILL)
    assert pair.nothing_held()


@pytest.mark.parametrize("when", ["before", "after"])
def test_consumer_stopped_for_longer_than_its_lease(
    make_pair: MakePair, consumer: Callable[..., Remote], way: tuple[str, str], when: str
) -> None:
    """The producer's blocks are given away and overwritten meanwhile."""
    use_limit_s = 3 if way[1] == "cuda" else 0.4  # NCCL joins amid the first use
    pair, sleeper = make_pair(use_limit_s=use_limit_s), consumer()
    meet(pair, sleeper)
    pair.producer.call("grant", 1, [1, 2], 1, scribble=True)
    sleeper.start("fetch", pair.order(1, [3, 4], **{when: STOP}))
    assert wait_until(lambda: is_stopped(sleeper.pid), 10)
    assert pair.nothing_held()
    assert pair.producer.call("outcome", 1) == "expired"
    assert set(pair.producer.call("prompts", [1, 2])[0].flat) == {caches.SCRIBBLE}
    sleeper.signal(CONTINUE)
    began = time.monotonic()
    if when == "after" and pair.is_over(when):  # it has them, of the time when they were its own
        sleeper.result(10)
        expected = caches.prompts(pair.original(), [1, 2])
        assert caches.same(expected, sleeper.call("prompts", [3, 4]))
    else:
        with pytest.raises(TransferError):
            sleeper.result(10)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("delay", DELAYS)
def test_consumer_stopped_at_any_time(
    make_pair: MakePair, consumer: Callable[..., Remote], delay: float
) -> None:
    pair, sleeper = make_pair(LARGE, use_limit_s=0.4), consumer(LARGE)
    pair.producer.call("grant", 0, range(512), 0.5, scribble=True)
    sleeper.start("fetch", pair.order(0, range(512)))
    time.sleep(delay)
    sleeper.signal(STOP)
    assert pair.nothing_held()
    sleeper.signal(CONTINUE)
    try:
        sleeper.result(10)
    except TransferError:
        return
    expected = caches.prompts(pair.original(), range(512))
    assert caches.same(expected, sleeper.call("prompts", range(512)))


@pytest.mark.parametrize("when", ["before", "after"])
def test_producer_stopped(make_pair: MakePair, when: str) -> None:
    pair = make_pair()
    # NIXL begins with an agent, which may take seconds on a busy machine.
    lease_s, seconds = (10, 8) if pair.consumer.receiver.name == "nixl" else (1, 0.8)
    pair.producer.call("grant", 0, [1, 2], lease_s)
    stop = Act(STOP, pair.producer.pid)
    if pair.reads_directly or pair.is_over(when):
        with pair.fetched(0, [3, 4], seconds=seconds, **{when: stop}):
            assert time.monotonic() - stop.done < seconds
            assert pair.is_right([1, 2], [3, 4])
    else:
        with pytest.raises(TransferError):
            pair.fetch(0, [3, 4], seconds=0.8, **{when: stop})
        assert time.monotonic() - stop.done < 2
    assert stop.done
    pair.producer.signal(CONTINUE)
    assert pair.nothing_held()
    pair.producer.call("grant", 1, [1, 2])
    pair.fetch(1, [5, 6])
    assert pair.is_right([1, 2], [5, 6])


def test_leases_of_50_ms_under_load(make_pair: MakePair) -> None:
    """Blocks get other content the moment their lease ends; no fetch may believe it."""
    pair = make_pair(Shape(blocks=1024, content=512), use_limit_s=0.5)
    order = random.Random(4).sample(range(1024), 1024)
    original = pair.original()

    def one(lease: int) -> str:
        sources = order[lease * 4 : lease * 4 + 4]
        targets = range(lease * 4, lease * 4 + 4)
        waits = [0, 0, 0.02, 0.04, 0.05, 0.06]
        time.sleep(random.Random(lease).choice(waits) if lease < 240 else lease % 2)
        try:
            pair.fetch(lease, targets)
        except TransferError:
            return "refused"
        assert caches.same(caches.prompts(original, sources), pair.consumer.prompts(targets))
        return "right"

    seen: list[Any] = []
    with ThreadPoolExecutor(16) as pool:
        for first in range(0, 256, 16):
            leases = range(first, first + 16)
            for lease in leases:
                blocks = order[lease * 4 : lease * 4 + 4]
                # In the last round both happen, however busy the machine is: every other lease
                # lives for 20 s, and the others' consumers wait for a second.
                seconds = 0.05 if lease < 240 or lease % 2 else 20
                pair.producer.call("grant", lease, blocks, seconds, scribble=True)
            seen += pool.map(one, leases)
    assert {"right", "refused"} == set(seen)
    assert pair.nothing_held()


def test_consumer_that_never_releases(make_pair: MakePair) -> None:
    pair = make_pair(use_limit_s=0.4)
    receiver, endpoint = pair.consumer.receiver, pair.producer.endpoint
    job = FetchJob(pair.consumer.cache.whole([3, 4]), Deadline.after(5))
    with pair.consumer.peers.connection(endpoint, job.deadline) as connection:
        remote = receiver.open(connection.welcome.offers[receiver.name])
        assert remote is not None
        pair.producer.call("grant", 0, [1, 2], 0.1, scribble=True)
        connection.ask(p.Acquire(endpoint.generation, 0), p.Acquired, job.deadline)
        request = p.Fetch(receiver.name, p.Part(8, ((0, 2),)), remote.request(job))
        answer = connection.ask(request, p.Fetched, job.deadline).answer
        remote.receive(job, answer)
        assert pair.is_right([1, 2], [3, 4])
        assert pair.nothing_held(2), "silence past the limit must free the blocks"
        # Too late: its answer, which alone would make the bytes count, must not come.
        release = p.Release(endpoint.generation, 0, "fetched")
        with pytest.raises(PeerLost):
            connection.ask(release, p.Done, job.deadline)
    assert pair.producer.call("outcome", 0) == "expired"


def test_a_lease_in_use_outlives_its_time(
    make_pair: MakePair, consumer: Callable[..., Remote]
) -> None:
    pair, sleeper = make_pair(use_limit_s=10), consumer()
    meet(pair, sleeper)
    pair.producer.call("grant", 1, [1, 2], 1, scribble=True)
    sleeper.start("fetch", pair.order(1, [3, 4], before=STOP))
    assert wait_until(lambda: is_stopped(sleeper.pid), 10)
    time.sleep(1.2)
    assert pair.producer.call("outcome", 1) is None
    sleeper.signal(CONTINUE)
    sleeper.result(10)
    expected = caches.prompts(pair.original(), [1, 2])
    assert caches.same(expected, sleeper.call("prompts", [3, 4]))
    assert pair.nothing_held()
    assert pair.producer.call("outcome", 0) == "fetched"
