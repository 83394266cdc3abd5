"""A consumer that has the secret and misbehaves cannot crash, hang or corrupt a producer.

The producer is a real process. After each misdeed a well-behaved consumer fetches the right bytes,
the producer holds nothing that it did not hold before, and its cache is unchanged.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from transport import caches
from transport.caches import PLAIN
from transport.host_device import COMPILER
from transport.pairs import Pair
from transport.worker import FINGERPRINT, SECRET, Remote, Setup, Worker, wait_until

from disagg.errors import PeerLost, PeerRefused, TransferError
from disagg.transport import protocol as p
from disagg.transport.control import channel as c
from disagg.transport.control.channel import FIRST_FRAME, Channel
from disagg.transport.control.listener import _MAX_CONNECTIONS
from disagg.transport.deadline import Deadline
from disagg.transport.tcp import messages as tcp

USE_LIMIT_S = 1.0
HELLO = p.Hello(p.VERSION, "misbehaving", FINGERPRINT)
WHOLE = p.Part(PLAIN.tokens, ((0, 2),))
HUGE = (-(1 << 63), -1, 0, 1, 2, 1 << 31, (1 << 64) - 1)
DETAILS = (b"", b"\x00", b"\x81garbage", b"\xff" * 1000, msgspec.msgpack.encode([1 << 60]))
LEASES = itertools.count()


class Victim:
    """A producer, and what it held before anybody misbehaved."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.endpoint = pair, pair.producer.endpoint
        self.transports: tuple[str, ...] = (
            pair.producer.setup.transport,
            *pair.producer.setup.also,
        )
        self._fetch()
        self._before = self._taken()
        self._digest = pair.producer.call("digest")

    def grant(self, seconds: float = 30) -> int:
        lease = next(LEASES)
        self.pair.producer.call("grant", lease, [1, 2], seconds)
        return lease

    def channel(self, *, hello: p.Hello | None = HELLO) -> Channel:
        deadline = Deadline.after(10)
        channel = Channel.connect(
            self.endpoint.host, self.endpoint.port, SECRET, deadline, ahead=True
        )
        if hello is not None:
            assert isinstance(ask(channel, hello), p.Welcome)
        return channel

    @contextlib.contextmanager
    def acquired(self, seconds: float = 30) -> Iterator[tuple[Channel, int]]:
        channel, lease = self.channel(), self.grant(seconds)
        assert isinstance(ask(channel, p.Acquire(self.endpoint.generation, lease)), p.Acquired)
        yield channel, lease
        channel.close()

    def release(self, lease: int) -> p.Release:
        return p.Release(self.endpoint.generation, lease, "aborted")

    def check(self, seconds: float = 6) -> None:
        """Nothing has changed, once what is left behind has run out."""
        assert self.pair.producer.is_alive()
        self._fetch()
        assert wait_until(lambda: self._more() == {}, seconds), self._more()
        assert self.pair.producer.call("digest") == self._digest

    def _more(self) -> dict[str, int]:
        now = self._taken()
        return {name: now[name] for name in now if now[name] > self._before[name]}

    def _taken(self) -> dict[str, int]:
        taken: dict[str, int] = self.pair.producer.call("taken")
        return taken

    def _fetch(self) -> None:
        caches.fill(self.pair.consumer.cache, [3, 4], caches.POISON)
        self.pair.fetch(self.grant(), [3, 4])
        assert self.pair.is_right([1, 2], [3, 4])


def ask(on: Channel, message: p.Request) -> p.Answer:
    return ask_raw(on, p.encode(message))


def ask_raw(on: Channel, body: bytes) -> p.Answer:
    on.send(body, Deadline.after(10))
    answer: p.Answer = p.decode_answer(on.receive(Deadline.after(10)))
    return answer


def is_ended(on: Channel, body: bytes, seconds: float = 5) -> bool:
    """Whether the producer ends the connection when it receives this."""
    try:
        on.send(body, Deadline.after(seconds))
        on.receive(Deadline.after(seconds))
    except PeerLost as error:
        return error.reason != "deadline"
    finally:
        on.close()
    return False


def failed(answer: p.Answer, *reasons: str) -> bool:
    return isinstance(answer, p.Failed) and answer.reason in reasons


CPU = Setup("tcp", "cpu", PLAIN, 1, Path(), USE_LIMIT_S, also=("process_memory", "shared_storage"))
EMULATED = Setup(
    "nccl", "emulated", PLAIN, 1, Path(), USE_LIMIT_S, also=("cuda_ipc", "tcp", "shared_storage")
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(CPU, id="cpu"),
        pytest.param(
            EMULATED,
            id="emulated",
            marks=pytest.mark.skipif(COMPILER is None, reason="needs g++ for the kernel"),
        ),
    ],
)
def victim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("storage")
    folder.chmod(0o700)
    setup = replace(request.param, folder=folder)
    producer, consumer = Remote(setup), Worker(replace(setup, seed=None))
    producer.call("log_to", folder.parent / f"{folder.name}.log")
    yield Victim(Pair(producer, consumer, PLAIN))
    consumer.close()
    producer.close()
    assert os.listdir(folder) == []


def nested(depth: int) -> bytes:
    """A Renew with a field that nobody knows, of lists in lists."""
    return b"\x82\xa4type\xa5renew\xa1x" + b"\x91" * depth + b"\xc0"


BODIES = {
    "empty": b"",
    "nothing": b"\xc0",
    "noise": os.urandom(500),
    "unknown": msgspec.msgpack.encode({"type": "drop", "lease": 1}),
    "no-type": msgspec.msgpack.encode({"lease": 1}),
    "an-answer": p.encode(p.Done()),
    "a-list": msgspec.msgpack.encode([1, 2, 3]),
    "wrong-fields": msgspec.msgpack.encode({"type": "acquire", "lease": "x", "generation": 1}),
    "huge-number": msgspec.msgpack.encode({"type": "acquire", "lease": 1e300, "generation": ""}),
    "nested": nested(3000),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request(victim: Victim, body: bytes) -> None:
    assert is_ended(victim.channel(hello=None), body)
    assert is_ended(victim.channel(), body)
    with victim.acquired() as (channel, _):
        assert is_ended(channel, body)
    victim.check()


def test_nesting_without_end(victim: Victim) -> None:
    assert is_ended(victim.channel(), nested(p.MAX_REQUEST - 100))
    victim.check()


def test_hello_out_of_order(victim: Victim) -> None:
    generation = victim.endpoint.generation
    for first in (p.Acquire(generation, 0), p.Renew(generation, [0]), victim.release(0)):
        assert is_ended(victim.channel(hello=None), p.encode(first))
    channel = victim.channel()
    assert failed(ask(channel, HELLO), "protocol")
    channel.close()
    for other in (
        p.Hello(99, "x", FINGERPRINT),
        p.Hello(-1, "x", FINGERPRINT),
        p.Hello(p.VERSION, "\x1b[2J\n" * 100, {"model": "other\n\u202e" * 50}),
    ):
        channel = victim.channel(hello=None)
        assert failed(ask(channel, other), "refused")
        channel.close()
    victim.check()


def test_requests_out_of_order(victim: Victim) -> None:
    generation, fetch = victim.endpoint.generation, p.Fetch("tcp", WHOLE, b"")
    channel = victim.channel()
    assert failed(ask(channel, fetch), "protocol")
    assert failed(ask(channel, p.Acquire("another life", 0)), "lease_gone")
    assert isinstance(ask(channel, victim.release(1 << 40)), p.Done)
    lease, other = victim.grant(), victim.grant()
    assert isinstance(ask(channel, p.Acquire(generation, lease)), p.Acquired)
    assert failed(ask(channel, p.Acquire(generation, lease)), "protocol")
    assert failed(ask(channel, p.Acquire(generation, other)), "protocol")
    assert isinstance(ask(channel, victim.release(lease)), p.Done)
    assert isinstance(ask(channel, victim.release(lease)), p.Done)
    assert failed(ask(channel, fetch), "protocol")
    assert failed(ask(channel, p.Acquire(generation, lease)), "lease_gone")
    assert isinstance(ask(channel, victim.release(other)), p.Done)
    channel.close()
    victim.check()


def test_parts_outside_of_the_lease(victim: Victim) -> None:
    spans: list[tuple[tuple[int, int], ...]] = [
        *(((a, b),) for a in HUGE for b in HUGE if (a, b) not in ((0, 1), (0, 2), (1, 2))),
        ((0, 3),),
        ((1, 2), (0, 1)),
        ((0, 1), (0, 1)),
        ((0, 0),) * 9000,
    ]
    parts = [p.Part(PLAIN.tokens, some) for some in spans]
    parts += [p.Part(unit, ((0, 1),)) for unit in HUGE if unit not in (1, 2)]
    pairs = [(a, b) for a in HUGE for b in HUGE if not 0 <= a < b <= 2]
    parts += [p.Part(PLAIN.tokens, ((0, 2),), heads=pair) for pair in pairs]
    parts += [p.Part(PLAIN.tokens, ((0, 2),), regions=pair) for pair in pairs]
    for transport in victim.transports:
        # In parts: a lease is in use for a limited time.
        for first in range(0, len(parts), 25):
            with victim.acquired() as (channel, lease):
                for part in parts[first : first + 25]:
                    request = p.Fetch(transport, part, b"")
                    answer = ask(channel, request)
                    is_empty = sum(b - a for a, b in part.spans) == 0
                    assert is_empty or failed(answer, "range", "protocol"), part
                ask(channel, victim.release(lease))
    victim.check()


@pytest.mark.parametrize("name", ["", "nixl", "../tcp", "tcp\n", "\x1b[31m", "x" * 60_000])
def test_unknown_transports(victim: Victim, name: str) -> None:
    with victim.acquired() as (channel, lease):
        answer = ask(channel, p.Fetch(name, WHOLE, b""))
        assert isinstance(answer, p.Failed)
        assert answer.reason == "no_transport"
        assert answer.message.isprintable()
        assert len(answer.message) < 1000
        ask(channel, victim.release(lease))
    victim.check()


def test_details_that_are_garbage(victim: Victim) -> None:
    requests = [tcp.encode(tcp.Request(streams)) for streams in HUGE]
    for transport in victim.transports:
        with victim.acquired() as (channel, lease):
            for detail in (*DETAILS, *requests):
                answer = ask(channel, p.Fetch(transport, WHOLE, detail))
                assert isinstance(answer, p.Fetched | p.Failed)
            ask(channel, victim.release(lease))
    victim.check()


def test_thousands_of_fetches_without_release(victim: Victim) -> None:
    good = {"tcp": tcp.encode(tcp.Request(1))}
    for transport in victim.transports:
        with victim.acquired() as (channel, _), contextlib.suppress(PeerLost):
            request = p.encode(p.Fetch(transport, WHOLE, good.get(transport, b"")))
            answers = [ask_raw(channel, request) for _ in range(100)]
            assert sum(isinstance(one, p.Fetched) for one in answers) <= 32
            assert failed(answers[-1], "protocol")
            for _ in range(20):
                channel.send_all([request] * 100, Deadline.after(5))
            victim.pair.fetch(victim.grant(), [3, 4])
    victim.check()


def test_thousands_of_connections(victim: Victim) -> None:
    """Held open, and others fetch nevertheless."""
    held: list[Channel] = []
    try:
        for _ in range(3 * _MAX_CONNECTIONS):
            held.append(victim.channel())
            if len(held) > _MAX_CONNECTIONS + 50:
                held.pop(0).close()
        victim.pair.consumer.peers.forget(victim.endpoint)
        victim.pair.fetch(victim.grant(), [3, 4])
        assert victim.pair.producer.call("connections") <= _MAX_CONNECTIONS
    finally:
        for channel in held:
            channel.close()
    victim.check()


@pytest.mark.parametrize("keeps_talking", [False, True])
def test_a_lease_that_is_kept(victim: Victim, keeps_talking: bool) -> None:
    """Neither silence nor other requests keep the blocks for longer than the limit."""
    with victim.acquired(seconds=0.2) as (channel, lease):
        began = time.monotonic()
        renew = p.Renew(victim.endpoint.generation, [lease])

        def use() -> None:
            while time.monotonic() < began + 4 * USE_LIMIT_S:
                if keeps_talking:
                    ask(channel, renew)
                    time.sleep(0.1)
                else:
                    channel.receive(Deadline.after(4 * USE_LIMIT_S))

        with pytest.raises(PeerLost):
            use()
        assert time.monotonic() - began < 3 * USE_LIMIT_S
    victim.check()


def test_leases_that_are_never_granted(victim: Victim) -> None:
    generation = victim.endpoint.generation
    channel = victim.channel()
    for lease in (-1, -(1 << 63), 1 << 40, (1 << 64) - 1):
        began = time.monotonic()
        assert failed(ask(channel, p.Acquire(generation, lease)), "lease_gone")
        assert time.monotonic() - began < USE_LIMIT_S
    channel.close()
    soon = next(LEASES) + 1000
    waiting = [victim.channel() for _ in range(100)]
    for one in waiting:
        one.send(p.encode(p.Acquire(generation, soon)), Deadline.after(5))
        one.close()
    began = time.monotonic()
    assert wait_until(lambda: victim.pair.producer.call("connections") <= 1, 5)
    assert time.monotonic() - began < USE_LIMIT_S, "who left is not waited for"
    victim.check()


@pytest.mark.parametrize("count", [10, 20_000, 60_000])
def test_renewing_very_many(victim: Victim, count: int) -> None:
    channel, lease = victim.channel(), victim.grant(seconds=0.5)
    renew = p.Renew(victim.endpoint.generation, [lease % 100] * count)
    began = time.monotonic()
    for _ in range(20):
        assert isinstance(ask(channel, renew), p.Done)
    assert time.monotonic() - began < 3
    channel.close()
    victim.check()


def test_renewing_a_million_is_refused(victim: Victim) -> None:
    renew = p.encode(p.Renew(victim.endpoint.generation, [1] * 1_000_000))
    channel = victim.channel()
    with contextlib.suppress(PeerLost):
        channel.send(renew, Deadline.after(5))
    with pytest.raises(PeerLost):
        channel.receive(Deadline.after(5))
    channel.close()
    victim.check()


@pytest.mark.parametrize("outcome", ["", "expired", "x\ny", "\x1b[0m", "f" * 10_000])
def test_outcomes_come_from_a_closed_set(victim: Victim, outcome: str) -> None:
    """They are metric labels."""
    channel, lease = victim.channel(), victim.grant()
    request = p.Release(victim.endpoint.generation, lease, outcome)
    assert failed(ask(channel, request), "protocol")
    for readers in HUGE:
        ask(channel, p.Release(victim.endpoint.generation, lease, "fetched", readers))
    ask(channel, victim.release(lease))
    channel.close()
    victim.check()


@pytest.mark.parametrize("length", [p.MAX_REQUEST, p.MAX_REQUEST + 1, p.MAX_FRAME, p.MAX_FRAME + 1])
def test_frames_at_the_limits(victim: Victim, length: int) -> None:
    """A frame over the limit ends the connection at its header, before its body is sent."""
    body = msgspec.msgpack.encode({"type": "renew", "generation": "", "leases": [], "x": b""})
    body = body[:-2] + b"\xc6" + struct.pack(">I", length - len(body) - 3)
    body += bytes(length - len(body))
    channel = victim.channel()
    if length <= p.MAX_REQUEST:
        assert isinstance(ask_raw(channel, body), p.Done)
    else:
        channel._sock.sendall(c._HEADER.pack(length, bytes(16)))
        with pytest.raises(PeerLost) as error:
            channel.receive(Deadline.after(5))
        assert error.value.reason != "deadline"
    channel.close()
    victim.check()


def test_a_hello_over_the_limit(victim: Victim) -> None:
    assert is_ended(victim.channel(hello=None), bytes(FIRST_FRAME + 1))
    victim.check()


class CutSocket:
    """Sends this many bytes, and closes."""

    def __init__(self, sock: socket.socket, left: int) -> None:
        self._sock, self._left = sock, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        self._sock.sendall(data[: self._left])
        self._left -= min(self._left, len(data))
        if not self._left:
            self._sock.close()
            raise ConnectionResetError("cut here")


def exchange(victim: Victim, lease: int, length: int) -> bool:
    """A valid exchange, cut behind so many bytes; whether it was over before."""
    address = victim.endpoint.host, victim.endpoint.port
    sock = socket.create_connection(address, timeout=5)
    cut: Any = CutSocket(sock, length)
    theirs, ours = sock.recv(100)[len(c.GREETING) :], os.urandom(16)
    generation = victim.endpoint.generation
    try:
        cut.sendall(ours)
        keys = [c._key(SECRET, theirs, ours, way) for way in (b"ask", b"answer")]
        channel = Channel(cut, *keys, ahead=True)
        ask(channel, HELLO)
        ask(channel, p.Acquire(generation, lease))
        ask(channel, p.Fetch("tcp", WHOLE, tcp.encode(tcp.Request(1))))
        ask(channel, p.Release(generation, lease, "fetched"))
    except (ConnectionError, TransferError):
        return False
    finally:
        sock.close()
    return True


def test_a_valid_exchange_cut_at_every_byte(victim: Victim) -> None:
    for length in itertools.count(1):
        if exchange(victim, victim.grant(seconds=1), length):
            break
    assert length > 200
    victim.check()


def test_a_body_changed_at_every_byte(victim: Victim) -> None:
    """Each with a valid signature: what is refused is the message, not the signature."""
    lease = victim.grant()
    body = p.encode(p.Renew(victim.endpoint.generation, [lease]))
    for at in range(len(body)):
        channel = victim.channel()
        changed = body[:at] + bytes([body[at] ^ 0x55]) + body[at + 1 :]
        with contextlib.suppress(PeerLost, PeerRefused):
            ask_raw(channel, changed)
        channel.close()
    channel = victim.channel()
    ask(channel, victim.release(lease))
    channel.close()
    victim.check()


def test_data_connections_that_pull_what_is_not_there(victim: Victim) -> None:
    channel = victim.channel()
    channel.close()
    with victim.pair.consumer.peers.connection(victim.endpoint, Deadline.after(5)) as connection:
        offer = connection.welcome.offers["tcp"]
    at = tcp.decode_offer(offer)
    secret = tcp.data_secret(SECRET)
    for body in (
        *DETAILS,
        *(tcp.encode(tcp.TcpPull(os.urandom(16), stream)) for stream in HUGE),
        bytes(FIRST_FRAME + 1),
    ):
        channel = Channel.connect(at.host, at.port, secret, Deadline.after(5))
        channel.send(tcp.HELLO, Deadline.after(5))
        assert channel.receive(Deadline.after(5)) == tcp.HELLO
        channel.send(body, Deadline.after(5))
        with contextlib.suppress(PeerLost):
            answer = channel.receive(Deadline.after(5))
            assert tcp.decode_sending(answer).size is None
        channel.close()
    victim.check()


# ---- any order ------------------------------------------------------------------------------

NUMBERS = st.sampled_from(HUGE) | st.integers(-3, 5)
PAIRS = st.tuples(NUMBERS, NUMBERS)
PARTS = st.builds(
    p.Part,
    st.sampled_from([PLAIN.tokens, 1, 4]) | NUMBERS,
    st.lists(PAIRS, max_size=3).map(tuple),
    st.none() | PAIRS,
    st.none() | PAIRS,
)
TEXT = st.text(max_size=30)


def machine(victim: Victim) -> type[RuleBasedStateMachine]:
    class AnyOrder(RuleBasedStateMachine):
        """Up to three connections that request anything in any order."""

        def __init__(self) -> None:
            super().__init__()
            self.open: list[Channel] = []
            self.leases = [victim.grant(seconds=1) for _ in range(2)]

        @precondition(lambda self: len(self.open) < 3)
        @rule(hello=st.booleans())
        def connect(self, hello: bool) -> None:
            self.open.append(victim.channel(hello=HELLO if hello else None))

        @precondition(lambda self: self.open)
        @rule(which=st.integers(0, 2))
        def leave(self, which: int) -> None:
            self.open.pop(which % len(self.open)).close()

        @precondition(lambda self: self.open)
        @rule(
            which=st.integers(0, 2),
            requests=st.lists(
                st.builds(p.Hello, NUMBERS, TEXT, st.dictionaries(TEXT, TEXT, max_size=2))
                | st.builds(p.Acquire, st.just(victim.endpoint.generation), st.integers(0, 1))
                | st.builds(
                    p.Fetch,
                    st.sampled_from(victim.transports) | TEXT,
                    PARTS | st.just(WHOLE),
                    st.sampled_from(DETAILS) | st.just(tcp.encode(tcp.Request(2))),
                )
                | st.builds(
                    p.Release,
                    st.just(victim.endpoint.generation) | TEXT,
                    st.integers(0, 1),
                    st.sampled_from(["fetched", "aborted"]) | TEXT,
                    NUMBERS,
                )
                | st.builds(
                    p.Renew,
                    st.just(victim.endpoint.generation),
                    st.lists(st.integers(0, 1), max_size=4),
                ),
                min_size=1,
                max_size=4,
            ),
        )
        def request(self, which: int, requests: Sequence[p.Request]) -> None:
            channel = self.open[which % len(self.open)]
            bodies = [p.encode(self.named(one)) for one in requests]
            try:
                channel.send_all(bodies, Deadline.after(10))
                for _ in bodies:
                    p.decode_answer(channel.receive(Deadline.after(10)))
            except PeerLost as error:
                if error.reason == "deadline":
                    raise AssertionError("it hangs") from error
                self.open.remove(channel)
                channel.close()

        @precondition(lambda self: self.open)
        @rule(which=st.integers(0, 2), body=st.binary(max_size=200))
        def raw(self, which: int, body: bytes) -> None:
            assert is_ended(self.open.pop(which % len(self.open)), body)

        def named(self, one: p.Request) -> p.Request:
            """With leases of this run in place of 0 and 1."""
            if isinstance(one, p.Acquire | p.Release):
                return msgspec.structs.replace(one, lease=self.leases[one.lease])
            if isinstance(one, p.Renew):
                return p.Renew(one.generation, [self.leases[number] for number in one.leases])
            return one

        def teardown(self) -> None:
            for channel in self.open:
                channel.close()
            channel = victim.channel()
            for lease in self.leases:
                ask(channel, victim.release(lease))
            channel.close()
            victim.check()

    return AnyOrder


def test_requests_in_any_order(victim: Victim) -> None:
    run_state_machine_as_test(
        machine(victim),
        settings=settings(
            max_examples=20,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_requests_in_any_order_for_long(victim: Victim) -> None:
    run_state_machine_as_test(
        machine(victim),
        settings=settings(
            max_examples=400,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
