"""NIXL's agents under our leases: what is declined, and what a fetch leaves behind.

`test_moving.py` and `test_faults.py` hold for NIXL too, by the kernel's copy within one host. Here
are UCX's TCP, where the producer takes part, and the life of agents.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from transport import caches, offers
from transport.caches import PLAIN, Shape
from transport.pairs import Pair
from transport.worker import Act, Order, Remote, Setup, Worker, wait_until

from disagg.errors import PeerLost, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob
from disagg.transport.deadline import Deadline
from disagg.transport.host.helper_threads import cores
from disagg.transport.nixl import library, link
from disagg.transport.nixl.agent import Agent
from disagg.transport.nixl.nixl import NixlReceiver, NixlSender
from disagg.transport.nixl.settings import NixlSettings, is_installed
from disagg.transport.one_sided.offers import Origin

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")

OVER_TCP = NixlSettings(params={"engine_config": "TLS=tcp"}, tcp=True)
LARGE = Shape(blocks=512, heads=2, tokens=64, content=128, layers=4)  # 32 MiB
STOP, CONTINUE, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL


class Pairs:
    """Makes producers, and consumers of theirs here; ends them afterwards."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._made: list[Remote | Worker] = []

    def producer(self, shape: Shape = PLAIN, **more: Any) -> Remote:
        made = Remote(Setup("nixl", "cpu", shape, 1, self._folder, **more))
        self._made.append(made)
        return made

    def consumer(self, shape: Shape = PLAIN, **more: Any) -> Worker:
        made = Worker(Setup("nixl", "cpu", shape, None, self._folder, **more))
        self._made.append(made)
        return made

    def __call__(self, shape: Shape = PLAIN, **more: Any) -> Pair:
        return Pair(self.producer(shape, **more), self.consumer(shape, **more), shape)

    def close(self) -> None:
        for one in self._made:
            if one.setup.nixl == OVER_TCP and isinstance(one, Remote):
                # UCX ends a producer whose consumer gives up: why TCP is not used by default.
                if one.is_alive():
                    one.signal(KILL)
                with contextlib.suppress(AssertionError):
                    one.close()
            else:
                one.close()


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Pairs]:
    made = Pairs(tmp_path / "storage")
    yield made
    made.close()


def offer_of(pair: Pair) -> bytes:
    with pair.consumer.peers.connection(pair.producer.endpoint, Deadline.after(5)) as connection:
        return connection.welcome.offers["nixl"]


def links(worker: Worker) -> int:
    """How many producers have an agent here."""
    gc.collect()
    return len(cast("NixlReceiver", worker.receiver)._links)


# ---- UCX's TCP ---------------------------------------------------------------------------------


def test_blocks_over_tcp(pairs: Pairs) -> None:
    pair = pairs(LARGE, nixl=OVER_TCP)
    targets = list(reversed(range(512)))
    pair.producer.call("grant", 0, range(512))
    assert pair.fetch(0, targets, seconds=30).num_bytes == 32 << 20
    assert pair.is_right(range(512), targets)
    assert pair.nothing_held()


def test_a_read_that_was_given_up_writes_nothing_later(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks are somebody else's then. NIXL's own cancel and removal of a peer don't do it."""
    monkeypatch.setattr(link, "_FIRST_PAUSE_S", 0.0)
    pair = pairs(LARGE, nixl=OVER_TCP)
    cache, answer = pair.opened(), _answer(pair, 0)
    pair.producer.signal(STOP)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="deadline"):
        cache.receive(_job(pair, 0.5), answer)
    assert time.monotonic() - began < 2.5
    caches.fill(pair.consumer.cache, range(512), caches.SCRIBBLE)
    pair.producer.signal(CONTINUE)
    # Over TCP bytes arrive within calls of the agent, so another fetch must make some. UCX may end
    # the producer's process instead (see `Pairs.close`).
    with contextlib.suppress(TransferError, EOFError, OSError):
        cache.receive(_job(pair, 2, [0]), _answer(pair, 1, 1))
    for region in pair.consumer.cache.regions:
        assert bool((region.memory[1:] == caches.SCRIBBLE).all())


def test_a_silent_producer_is_given_up_and_not_tried_for_a_while(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is far; the next transport has the time that is left."""
    pair = pairs(LARGE, nixl=OVER_TCP)
    pair.producer.call("grant", 0, [0])
    pair.fetch(0, [0])
    cache = pair.opened()
    monkeypatch.setattr(link, "_STALLED_S", 0.3)
    monkeypatch.setattr(link, "_FIRST_PAUSE_S", 60.0)
    job = _job(pair, 20)
    answer = _answer(pair, 1)
    pair.producer.signal(STOP)
    for reason in ("nixl_stalled", "nixl_paused"):
        with pytest.raises(TransferError) as error:
            cache.receive(job, answer)
        assert error.value.reason == reason


def _job(pair: Pair, seconds: float, targets: Sequence[int] = range(512)) -> FetchJob:
    return FetchJob(pair.consumer.cache.whole(targets), Deadline.after(seconds))


def _answer(pair: Pair, lease: int, count: int = 512) -> bytes:
    """The producer's answer to a fetch of so many blocks; the lease ends with the connection."""
    pair.producer.call("grant", lease, range(count), 1)
    until, endpoint = Deadline.after(5), pair.producer.endpoint
    with pair.consumer.peers.connection(endpoint, until) as connection:
        connection.ask(p.Acquire(endpoint.generation, lease), p.Acquired, until)
        request = p.Fetch("nixl", p.Part(64, ((0, count),)), b"")
        return connection.ask(request, p.Fetched, until).answer


# ---- what is declined --------------------------------------------------------------------------


def test_another_host_without_rdma_is_left_to_tcp(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = pairs()
    offer, open_ = offer_of(pair), pair.consumer.receiver.open
    far = offers.changed(offer, boot="another")
    with caplog.at_level(logging.INFO):
        assert open_(far) is None
    assert "UCX's TCP is not used, transport tcp is" in caplog.text
    assert open_(offers.changed(far, rdma=True)) is None
    monkeypatch.setattr(library, "has_rdma", lambda: True)
    assert open_(far) is None
    assert open_(offers.changed(far, rdma=True)) is not None
    assert open_(offer) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"backend": "LIBFABRIC"},
        {"gpu": 0},
        {"token": bytes(16)},
        {"metadata": b""},
        {"metadata": bytes(400)},
        {"regions": bytes(8)},
        {"regions": bytes(64)},
        {"pid": offers.gone()},
    ],
    ids=["backend", "gpu", "token", "no metadata", "zeros", "half a region", "no memory", "pid"],
)
def test_offers_that_make_no_sense(pairs: Pairs, fields: dict[str, Any]) -> None:
    pair = pairs()
    offer = offer_of(pair)
    assert pair.consumer.receiver.open(offers.changed(offer, **fields)) is None
    assert caches.untouched(pair.consumer.cache, but=[])
    assert pair.consumer.receiver.open(offer) is not None


def test_without_nixl_it_is_not_offered(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = caches.make(PLAIN, 1)
    for settings in (NixlSettings(backend="NO_SUCH"), NixlSettings()):
        if settings == NixlSettings():
            monkeypatch.setattr(library, "PACKAGES", ("no_such_package",))
        sender = NixlSender(cache, settings, "127.0.0.1")
        assert sender.offer() == b""
        sender.close()
        assert NixlReceiver(cache, settings, "127.0.0.1").open(b"") is None
    assert "NIXL's backend NO_SUCH does not start" in caplog.text
    assert "NIXL is not installed; pip install" in caplog.text


def test_ucx_listens_only_where_we_do(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks nobody for the secret."""
    psutil = pytest.importorskip("psutil")
    producer = pairs.producer()
    listening = [
        one.laddr.ip
        for one in psutil.Process(producer.pid).net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 1, "the control channel's, and UCX's"
    assert set(listening) == {"127.0.0.1"}
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    library.load("127.0.0.1")
    assert os.environ["UCX_NET_DEVICES"] == "all", "the user's choice stays"


# ---- the life of agents ------------------------------------------------------------------------


@pytest.mark.parametrize("same_host", [True, False])
def test_an_agent_for_each_producer_until_it_is_forgotten(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, same_host: bool
) -> None:
    """A producer of another host is dead when its control connections have ended."""
    monkeypatch.setattr(Origin, "is_on_this_host", lambda _: same_host)
    consumer = pairs.consumer(nixl=NixlSettings(tcp=True))
    producers = [pairs.producer() for _ in range(3)]
    before = _threads()
    for lease, producer in enumerate(producers):
        producer.call("grant", lease, [1])
        order = Order(producer.endpoint, lease, p.Part(8, ((0, 1),)), consumer.cache.whole([2]))
        consumer.fetch(order)
        # UCX has one thread for timers in each process; agents of consumers have none.
        assert _threads() <= before + 1
    assert links(consumer) == 3
    producers[0].signal(KILL)
    # A newcomer is when the dead are looked for.
    newcomer = pairs.producer()
    newcomer.call("grant", 0, [1])
    mine = consumer.cache.whole([3])
    consumer.fetch(Order(newcomer.endpoint, 0, p.Part(8, ((0, 1),)), mine))
    assert links(consumer) == 3
    for producer in (*producers, newcomer):
        consumer.peers.forget(producer.endpoint)
    assert links(consumer) == 0


def test_agents_leave_nothing_behind(pairs: Pairs) -> None:
    pair = pairs()
    seen = []
    for lease in range(6):
        pair.producer.call("grant", lease, [1])
        pair.fetch(lease, [2])
        pair.consumer.peers.forget(pair.producer.endpoint)
        assert links(pair.consumer) == 0
        seen.append((_threads(), len(os.listdir("/proc/self/fd"))))
    assert max(seen[3:]) <= max(seen[:3])


def test_the_next_life_at_the_same_address(pairs: Pairs) -> None:
    pair = pairs()
    pair.producer.call("grant", 0, [1])
    pair.fetch(0, [1])
    pair.producer.signal(KILL)
    again = pairs.producer(port=pair.producer.endpoint.port)
    with pytest.raises(TransferError):  # the old generation's lease
        pair.fetch(0, [2])
    again.call("grant", 0, [1])
    pair.consumer.fetch(
        Order(again.endpoint, 0, p.Part(8, ((0, 1),)), pair.consumer.cache.whole([3]))
    )
    assert pair.is_right([1], [3])
    assert wait_until(lambda: links(pair.consumer) == 1, 5)


def test_a_dead_producer_is_noticed_long_before_the_deadline(pairs: Pairs) -> None:
    pair = pairs(LARGE, nixl=OVER_TCP)
    pair.producer.call("grant", 0, [0])
    pair.fetch(0, [0])
    pair.producer.call("grant", 1, range(512))
    kill = Act(KILL, pair.producer.pid)
    with pytest.raises(PeerLost):
        pair.fetch(1, range(512), seconds=30, before=kill)
    assert time.monotonic() - kill.done < 4


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


# ---- the kernel's copy, by several threads -----------------------------------------------------


def test_threads_share_a_large_read(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    began, begin = set[int](), Agent.begin

    def noted(agent: Agent, handle: int) -> None:
        began.add(threading.get_ident())
        begin(agent, handle)

    monkeypatch.setattr(Agent, "begin", noted)
    pair, targets = pairs(LARGE), list(reversed(range(512)))
    for lease in range(3):
        caches.fill(pair.consumer.cache, range(512), caches.POISON)
        pair.producer.call("grant", lease, range(512))
        assert pair.fetch(lease, targets).transport == "nixl"
        assert pair.is_right(range(512), targets)
    assert pair.nothing_held()
    assert threading.get_ident() in began
    assert len(began) > 1 or cores() == 1


def test_no_thread_writes_after_a_producer_died(pairs: Pairs) -> None:
    pair = pairs(LARGE)
    cache, answer = pair.opened(), _answer(pair, 0)
    pair.producer.signal(KILL)
    assert wait_until(lambda: not pair.producer.is_alive(), 5)
    with pytest.raises(TransferError):
        cache.receive(_job(pair, 5), answer)
    caches.fill(pair.consumer.cache, range(512), caches.SCRIBBLE)
    time.sleep(0.2)
    for region in pair.consumer.cache.regions:
        assert bool((region.memory == caches.SCRIBBLE).all())
