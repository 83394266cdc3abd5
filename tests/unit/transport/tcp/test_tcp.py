"""The tcp transport over real sockets: what arrives, what is refused, and what ends a stream."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import psutil
import pytest
import torch

from disagg.errors import ConfigError, DataCorrupt, PeerLost, PeerRefused, TransferError
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Region, Selection
from disagg.transport.control import listener
from disagg.transport.control.address import listen, resolve_host
from disagg.transport.control.channel import Channel
from disagg.transport.deadline import Deadline
from disagg.transport.tcp import messages as tcp_wire
from disagg.transport.tcp import pool as tcp_pool
from disagg.transport.tcp import stream as tcp_stream
from disagg.transport.tcp import tcp
from disagg.transport.tcp.tcp import TcpReceiver, TcpSender

SECRET = b"correct horse"
POISON = 0xA5
MIB = 1 << 20


def region(name: str, shape: tuple[int, int, int, int], layout: str, value: int | None) -> Region:
    """[B, H, N, C]; layout BHNC, BNHC, or one with room between blocks. None: random bytes."""
    _, heads, tokens, content = shape
    flat = np.random.default_rng(abs(hash(name)) % 997).integers(0, 256, 2 * int(np.prod(shape)))
    memory = torch.from_numpy(flat.astype(np.uint8))
    if value is not None:
        memory.fill_(value)
    per_block = heads * tokens * content
    if layout == "BNHC":
        stride = (per_block, content, heads * content, 1)
    elif layout == "apart":
        stride = (2 * per_block, tokens * content, content, 1)
    else:
        stride = (per_block, tokens * content, content, 1)
    return Region(name, memory.as_strided(shape, stride), "U8")


def small(value: int | None) -> BlockCache:
    """24 blocks of 8 tokens, 4 heads, in three layouts."""
    shapes = {"BHNC": (24, 4, 8, 16), "BNHC": (24, 4, 8, 6), "apart": (24, 4, 8, 10)}
    return BlockCache([region(name, shape, name, value) for name, shape in shapes.items()])


def large(mib: int, value: int | None, *, blocks: int = 64, layers: int = 2) -> BlockCache:
    shape = (blocks, 1, 16, mib * MIB // layers // blocks // 16)
    memory = [torch.empty(shape, dtype=torch.uint8) for _ in range(layers)]
    for layer, tensor in enumerate(memory):
        if value is None:
            pattern = torch.arange(layer, layer + tensor.numel() // 8, dtype=torch.int64)
            tensor.view(-1).copy_((pattern * 0x1E3779B97F4A7C15 % (1 << 62)).view(torch.uint8))
        else:
            tensor.fill_(value)
    return BlockCache([Region(f"layer{n}", tensor, "U8") for n, tensor in enumerate(memory)])


def content(cache: BlockCache, blocks: Selection) -> list[bytes]:
    return [b"".join(view.tobytes() for view in views) for views in cache.views(blocks)]


def poisoned_but(cache: BlockCache, blocks: Selection) -> bool:
    """Whether all the rest of the cache still is poison. Overwrites the selection."""
    for views in cache.views(blocks):
        for view in views:
            view[:] = POISON
    return all(bool((r.memory == POISON).all()) for r in cache.regions)


@dataclass
class Pair:
    """A producer that listens and a consumer, with their caches."""

    source: BlockCache
    target: BlockCache
    sender: TcpSender
    receiver: TcpReceiver

    def fetch(
        self,
        wanted: Selection,
        into: Selection,
        *,
        seconds: float = 20,
        via: Callable[[bytes], bytes] = lambda answer: answer,
    ) -> int:
        assert self.receiver.open(self.sender.offer())
        job = FetchJob(into, Deadline.after(seconds))
        answer = self.sender.send(wanted, self.receiver.request(job), Deadline.after(seconds))
        try:
            return self.receiver.receive(job, via(answer))
        finally:
            self.sender.finish(answer)


Make = Callable[..., Pair]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes pairs; when the test is over nothing of them may be left."""
    torch.zeros(1)
    threads, files = set(threading.enumerate()), open_files()
    pairs: list[Pair] = []

    def build(
        source: BlockCache, target: BlockCache, host: str = "127.0.0.1", streams: int | None = None
    ) -> Pair:
        sender = TcpSender(source, host, SECRET)
        pairs.append(Pair(source, target, sender, TcpReceiver(target, SECRET, streams=streams)))
        return pairs[-1]

    yield build
    for pair in pairs:
        pair.receiver.close()
        pair.sender.close()
    soon(lambda: set(threading.enumerate()) <= threads)
    soon(lambda: open_files() <= files)


def open_files() -> int:
    return psutil.Process().num_fds()


def soon(condition: Callable[[], bool], seconds: float = 5) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not come to be"
        time.sleep(0.005)


# ---- bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 3, 16])
@pytest.mark.parametrize(
    ("wanted", "into"),
    [
        (Selection([7], 8, 0, 1), Selection([3], 8, 0, 1)),
        (Selection([0, 1, 2, 3], 8, 0, 4), Selection([9, 4, 23, 5], 8, 0, 4)),
        (Selection([9, 4, 20], 8, 1, 2), Selection([2, 1], 8, 0, 2)),
        (Selection([5, 3], 4, 1, 3), Selection([8, 0], 4, 0, 3)),
        (Selection([5, 3, 6], 8, 0, 3, (1, 3)), Selection([8, 0, 1], 8, 0, 3, (2, 4))),
        (Selection([5, 3], 2, 3, 4, (3, 4)), Selection([8, 0], 2, 1, 4, (0, 1))),
        (Selection([5], 8, 0, 0), Selection([8], 8, 0, 0)),
    ],
    ids=["one", "scattered", "from-a-position", "units", "heads", "heads-of-units", "nothing"],
)
def test_the_asked_bytes_and_no_others(
    make: Make, wanted: Selection, into: Selection, streams: int
) -> None:
    pair = make(small(None), small(POISON), streams=streams)
    assert pair.fetch(wanted, into) == pair.source.num_bytes(wanted)
    assert content(pair.source, wanted) == content(pair.target, into)
    assert poisoned_but(pair.target, into)


def test_one_byte(make: Make) -> None:
    caches = [
        BlockCache([Region("a", torch.full((2, 1, 1, 1), value, dtype=torch.uint8), "U8")])
        for value in (7, POISON)
    ]
    pair = make(*caches)
    assert pair.fetch(pair.source.whole([1]), pair.target.whole([0])) == 1
    assert pair.target.regions[0].memory.flatten().tolist() == [7, POISON]


@pytest.mark.parametrize("streams", [None, 3])
def test_hundreds_of_megabytes(make: Make, streams: int | None) -> None:
    pair = make(large(256, None), large(256, POISON), streams=streams)
    order = torch.randperm(64).tolist()
    wanted, into = pair.source.whole(order), pair.target.whole(order[::-1])
    assert pair.fetch(wanted, into) == 256 * MIB
    for ours, theirs in zip(pair.source.regions, pair.target.regions, strict=True):
        assert torch.equal(ours.memory[order], theirs.memory[order[::-1]])


def test_more_pieces_than_one_call_takes(make: Make) -> None:
    pair = make(large(8, None, blocks=16384), large(8, POISON, blocks=16384))
    scattered = list(range(0, 16384, 2))
    pair.fetch(pair.source.whole(scattered), pair.target.whole(scattered))
    for ours, theirs in zip(pair.source.regions, pair.target.regions, strict=True):
        assert torch.equal(ours.memory[scattered], theirs.memory[scattered])
        assert bool((theirs.memory[1::2] == POISON).all())


@pytest.mark.parametrize("count", range(20))
def test_shares_make_up_the_whole(count: int) -> None:
    whole = Selection(range(40), 8, 5, count)
    for streams in (1, 2, 3, 7, 16):
        shares = [tcp_stream.share(whole, stream, streams) for stream in range(streams)]
        units = [n for one in shares for n in range(one.first, one.first + one.count)]
        assert units == list(range(5, 5 + count))
        assert max(one.count for one in shares) - min(one.count for one in shares) <= 1


def test_many_at_once_over_few_connections(make: Make) -> None:
    pair = make(large(24, None, blocks=48), large(24, POISON, blocks=48), streams=2)
    with ThreadPoolExecutor(12) as pool:
        for _ in range(4):
            list(
                pool.map(
                    lambda n: pair.fetch(
                        pair.source.whole([n, (n + 7) % 48]), pair.target.whole([n, n + 24])
                    ),
                    range(24),
                )
            )
    for ours, theirs in zip(pair.source.regions, pair.target.regions, strict=True):
        assert torch.equal(ours.memory[:24], theirs.memory[:24])
        assert torch.equal(ours.memory[7:31], theirs.memory[24:])
    assert pair.sender._listener.connections() <= 24
    assert not pair.sender._fetches


def test_connections_are_kept_and_dead_ones_replaced(make: Make) -> None:
    pair = make(small(None), small(POISON))
    whole = pair.source.whole([1])
    for _ in range(5):
        pair.fetch(whole, whole)
    soon(lambda: pair.sender._listener.connections() == 1)
    (channel,) = pair.sender._listener._connections.values()
    channel.cut()
    soon(lambda: not pair.sender._listener.connections())
    pair.fetch(whole, whole)
    assert content(pair.source, whole) == content(pair.target, whole)


# ---- addresses ------------------------------------------------------------------------------


def addresses() -> Sequence[str]:
    found = ["127.0.0.1", "localhost", "lo", "::1"]
    for name, known in psutil.net_if_addrs().items():
        if psutil.net_if_stats()[name].isup:
            found += [a.address for a in known if a.family == socket.AF_INET6 and "%" in a.address]
    return found


@pytest.mark.parametrize("host", addresses())
def test_any_kind_of_address(make: Make, host: str) -> None:
    try:
        listen(host, 0).close()
    except (OSError, ConfigError) as error:
        pytest.skip(f"{host} is not to be had here: {error}")
    pair = make(small(None), small(POISON), host)
    whole = pair.source.whole([3, 2])
    pair.fetch(whole, whole)
    assert content(pair.source, whole) == content(pair.target, whole)


def test_an_interface_by_name() -> None:
    assert resolve_host("lo") == "127.0.0.1"
    assert resolve_host("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "::ffff:0.0.0.0", "0", "", "no such host", "x\0"]
)
def test_not_one_address(host: str) -> None:
    with pytest.raises(ConfigError):
        TcpSender(small(None), host, SECRET)


def test_listens_nowhere_else(make: Make) -> None:
    pair = make(small(None), small(POISON))
    _, port = msgspec.msgpack.decode(pair.sender.offer())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


# ---- a proxy in the middle ------------------------------------------------------------------


class Proxy:
    """Passes bytes on; `meddle(offset, data)` may change what goes to the consumer, or raise
    `OSError` to cut the connection. While `blocked` is set nothing goes to the consumer."""

    def __init__(self, to: tuple[str, int], meddle: Callable[[int, bytes], bytes]) -> None:
        self._to, self._meddle = to, meddle
        self.blocked = threading.Event()
        self.passed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def redirect(self, answer: bytes) -> bytes:
        at, *rest = msgspec.msgpack.decode(answer)
        assert at[1] == self._to[1]
        return msgspec.msgpack.encode([["127.0.0.1", self.port], *rest])

    def close(self) -> None:
        self.blocked.clear()
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                down, _ = self._listener.accept()
                up = socket.create_connection(self._to)
                self._sockets += [down, up]
                for pump in (self._pump_up, self._pump_down):
                    self._threads.append(threading.Thread(target=pump, args=(down, up)))
                    self._threads[-1].start()

    def _pump_up(self, down: socket.socket, up: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := down.recv(65536):
                up.sendall(data)
            up.shutdown(socket.SHUT_RDWR)

    def _pump_down(self, down: socket.socket, up: socket.socket) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := up.recv(65536):
                while self.blocked.is_set():
                    time.sleep(0.01)
                down.sendall(self._meddle(offset, data))
                offset += len(data)
                self.passed += len(data)
        for sock in (down, up):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def between(pair: Pair, meddle: Callable[[int, bytes], bytes]) -> Iterator[Proxy]:
    host, port = msgspec.msgpack.decode(pair.sender.offer())
    proxy = Proxy((host, port), meddle)
    try:
        yield proxy
    finally:
        proxy.close()


def flip(at: int) -> Callable[[int, bytes], bytes]:
    def meddle(offset: int, data: bytes) -> bytes:
        if not offset <= at < offset + len(data):
            return data
        changed = bytearray(data)
        changed[at - offset] ^= 0x10
        return bytes(changed)

    return meddle


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("at", [200, 3 * MIB + 1])
def test_a_flipped_byte(make: Make, at: int, streams: int) -> None:
    pair = make(large(8, None), large(8, POISON), streams=streams)
    whole = pair.source.whole(range(64))
    with between(pair, flip(at)) as proxy, pytest.raises(DataCorrupt) as error:
        pair.fetch(whole, whole, via=proxy.redirect)
    assert error.value.reason == "tcp_checksum"


@pytest.mark.parametrize("at", [0, 8, 30, 45, 65])
def test_a_flipped_byte_of_the_handshake(make: Make, at: int) -> None:
    pair = make(small(None), small(POISON))
    whole = pair.source.whole([1])
    with between(pair, flip(at)) as proxy, pytest.raises((PeerRefused, PeerLost)):
        pair.fetch(whole, whole, via=proxy.redirect, seconds=3)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("at", [0, 30, 5 * MIB])
def test_a_cut_connection_is_known_at_once(make: Make, at: int, streams: int) -> None:
    def meddle(offset: int, data: bytes) -> bytes:
        if offset + len(data) > at:
            raise ConnectionError
        return data

    pair = make(large(64, None), large(64, POISON), streams=streams)
    whole = pair.source.whole(range(64))
    with between(pair, meddle) as proxy:
        began = time.monotonic()
        with pytest.raises(PeerLost) as error:
            pair.fetch(whole, whole, via=proxy.redirect)
        assert time.monotonic() - began < 5
    assert error.value.reason == "peer_lost"


@pytest.mark.parametrize("streams", [1, 2])
def test_a_stall_ends_at_the_deadline(make: Make, streams: int) -> None:
    pair = make(large(64, None), large(64, POISON), streams=streams)
    whole = pair.source.whole(range(64))
    with between(pair, lambda offset, data: data) as proxy:
        threading.Timer(0, lambda: soon(lambda: proxy.passed > MIB) or proxy.blocked.set()).start()
        began = time.monotonic()
        with pytest.raises(PeerLost) as error:
            pair.fetch(whole, whole, via=proxy.redirect, seconds=1.0)
        assert 0.9 < time.monotonic() - began < 3
    assert error.value.reason in ("deadline", "peer_lost")  # whose deadline was first
    soon(lambda: not pair.sender._fetches)


def test_a_vanished_producer(make: Make) -> None:
    pair = make(small(None), small(POISON))
    whole = pair.source.whole([1])
    job = FetchJob(whole, Deadline.after(5))
    answer = pair.sender.send(whole, pair.receiver.request(job), Deadline.after(5))
    pair.sender.close()
    with pytest.raises(PeerLost):
        pair.receiver.receive(job, answer)
    assert not pair.receiver.open(pair.sender.offer())
    with pytest.raises(TransferError):
        pair.sender.send(whole, pair.receiver.request(job), Deadline.after(5))


# ---- fencing --------------------------------------------------------------------------------


def pull(pair: Pair, answer: bytes, stream: int = 0) -> tuple[Channel, int | None]:
    """Ask for a stream by hand, and read nothing of it yet."""
    staged = tcp_wire.decode_staged(answer)
    pool = tcp_pool.Pool(SECRET)
    channel = pool._open((staged.at.host, staged.at.port), Deadline.after(5))
    channel.send(tcp_wire.encode(tcp_wire.TcpPull(staged.key, stream)), Deadline.after(5))
    sending = tcp_wire.decode_sending(channel.receive(Deadline.after(5)))
    return channel, sending.size


def test_finish_stops_a_stream_to_a_slow_reader(make: Make) -> None:
    pair = make(large(64, 1), large(64, POISON))
    whole = pair.source.whole(range(64))
    answer = pair.sender.send(whole, tcp_wire.encode(tcp_wire.Request(1)), Deadline.after(60))
    channel, size = pull(pair, answer)
    assert size == 64 * MIB
    time.sleep(0.2)  # until its buffers are full
    began = time.monotonic()
    pair.sender.finish(answer)
    assert time.monotonic() - began < 1
    for each in pair.source.regions:
        each.memory.fill_(2)
    received = bytearray()
    channel.sock.settimeout(5)
    with contextlib.suppress(ConnectionError):
        while data := channel.sock.recv(MIB):
            received += data
    channel.close()
    assert len(received) < size
    assert set(received) <= {1}
    soon(lambda: not pair.sender._listener.connections())


@pytest.mark.parametrize("streams", [1, 3])
def test_finish_fails_the_receiver(make: Make, streams: int) -> None:
    pair = make(large(128, 1), large(128, POISON), streams=streams)
    whole = pair.source.whole(range(64))
    job = FetchJob(whole, Deadline.after(20))
    answer = pair.sender.send(whole, pair.receiver.request(job), Deadline.after(20))
    with between(pair, lambda offset, data: data) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.blocked.set()
        received = pool.submit(pair.receiver.receive, job, proxy.redirect(answer))
        proxy.blocked.clear()
        soon(lambda: proxy.passed > MIB)
        proxy.blocked.set()
        pair.sender.finish(answer)
        for each in pair.source.regions:
            each.memory.fill_(2)
        proxy.blocked.clear()
        with pytest.raises(TransferError) as error:
            received.result(5)
    # A stream requested after `finish` is refused; a running one is cut.
    assert error.value.reason in ("peer_lost", "tcp_gone")
    assert all(bool((each.memory != 2).all()) for each in pair.target.regions)


def test_finish_of_a_done_fetch_is_cheap_and_cuts_nothing(make: Make) -> None:
    pair = make(small(None), small(POISON))
    whole = pair.source.whole([1, 2])
    pair.fetch(whole, whole)
    soon(lambda: pair.sender._listener.connections() == 1)
    (channel,) = pair.sender._listener._connections.values()
    began = time.monotonic()
    for _ in range(200):
        pair.fetch(whole, whole)
    assert time.monotonic() - began < 5
    assert list(pair.sender._listener._connections.values()) == [channel]


def test_a_key_works_once(make: Make) -> None:
    pair = make(small(None), small(POISON))
    whole = pair.source.whole([1])
    job = FetchJob(whole, Deadline.after(5))
    answer = pair.sender.send(whole, pair.receiver.request(job), Deadline.after(5))
    pair.receiver.receive(job, answer)
    with pytest.raises(TransferError) as error:
        pair.receiver.receive(job, answer)
    assert error.value.reason == "tcp_gone"
    pair.sender.finish(answer)
    unused = pair.sender.send(whole, pair.receiver.request(job), Deadline.after(5))
    pair.sender.finish(unused)
    with pytest.raises(TransferError) as error:
        pair.receiver.receive(job, unused)
    assert error.value.reason == "tcp_gone"


def test_no_such_key_or_stream(make: Make) -> None:
    pair = make(small(None), small(POISON))
    whole = pair.source.whole([1, 2])
    answer = pair.sender.send(whole, tcp_wire.encode(tcp_wire.Request(2)), Deadline.after(5))
    at, key, size, streams = msgspec.msgpack.decode(answer)
    assert streams == 2
    for stream, other in ((2, key), (-1, key), (1 << 60, key), (0, b""), (0, bytes(16))):
        forged = msgspec.msgpack.encode([at, other, size, 2])
        channel, found = pull(pair, forged, stream)
        assert found is None
        channel.close()
    pair.sender.finish(answer)


def test_sizes_must_agree(make: Make) -> None:
    pair = make(small(None), small(POISON))
    with pytest.raises(DataCorrupt) as error:
        pair.fetch(pair.source.whole([1, 2]), pair.target.whole([1]))
    assert error.value.reason == "tcp_size"


# ---- hostile and broken peers ---------------------------------------------------------------


def test_another_secret(make: Make) -> None:
    pair = make(small(None), small(POISON))
    stranger = TcpReceiver(pair.target, b"guessed")
    assert not stranger.open(pair.sender.offer())
    whole = pair.source.whole([1])
    job = FetchJob(whole, Deadline.after(5))
    answer = pair.sender.send(whole, stranger.request(job), Deadline.after(5))
    with pytest.raises((PeerLost, PeerRefused)):
        stranger.receive(job, answer)
    pair.sender.finish(answer)
    stranger.close()


def test_a_control_connection_is_no_data_connection(make: Make) -> None:
    pair = make(small(None), small(POISON))
    host, port = msgspec.msgpack.decode(pair.sender.offer())
    channel = Channel.connect(host, port, SECRET, Deadline.after(5))
    channel.send(tcp_wire.HELLO, Deadline.after(5))
    with pytest.raises(PeerLost):
        channel.receive(Deadline.after(5))
    channel.close()


@pytest.mark.parametrize(
    "garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, os.urandom(5000)]
)
def test_garbage(make: Make, garbage: bytes) -> None:
    pair = make(small(None), small(POISON))
    host, port = msgspec.msgpack.decode(pair.sender.offer())
    connection = socket.create_connection((host, port), timeout=10)
    with connection as raw, contextlib.suppress(OSError):  # it may hang up before we are through
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(100):
            pass
    whole = pair.source.whole([1])
    pair.fetch(whole, whole)


def test_a_silent_peer_is_dropped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HELLO_S", 0.3)
    pair = make(small(None), small(POISON))
    host, port = msgspec.msgpack.decode(pair.sender.offer())
    with socket.create_connection((host, port), timeout=5) as raw:
        raw.sendall(bytes(16))  # a nonce, and never a frame
        assert len(raw.recv(100)) > 0
        with pytest.raises(ConnectionResetError):
            raw.recv(100)
    soon(lambda: not pair.sender._listener.strangers())


def connections(pair: Pair) -> list[Channel]:
    return list(pair.sender._listener._connections.values())


def all_rest(pair: Pair, count: int) -> bool:
    resting = [one.resting_since for one in connections(pair)]
    return len(resting) == count and None not in resting


def test_too_many_connections(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", 3)
    pair = make(small(None), small(POISON))
    at = tuple(msgspec.msgpack.decode(pair.sender.offer()))
    pool = tcp_pool.Pool(SECRET)
    soon(lambda: not connections(pair))
    with contextlib.ExitStack() as stack:
        held = []
        for count in range(1, 4):  # each rests before the next: their order is the sender's too
            held.append(stack.enter_context(pool.connection((at[0], at[1]), Deadline.after(5))))
            soon(partial(all_rest, pair, count))
        fourth = stack.enter_context(pool.connection((at[0], at[1]), Deadline.after(5)))
        soon(lambda: not held[0].is_quiet())  # the oldest makes place
        soon(lambda: len(connections(pair)) == 3)
        assert all(one.is_quiet() for one in held[1:])
        soon(lambda: all(one.resting_since for one in connections(pair)))
        for one in connections(pair):
            one._resting_since = None  # as if it served a stream
        with pytest.raises(PeerLost), pool.connection((at[0], at[1]), Deadline.after(5)):
            pass
        held[0].close()
        fourth.close()
    pool.close()
    soon(lambda: not pair.sender._listener.connections())
    whole = pair.source.whole([1])
    pair.fetch(whole, whole)


def test_a_reader_that_never_reads_is_dropped_at_the_deadline(make: Make) -> None:
    pair = make(large(64, None), large(64, POISON))
    whole = pair.source.whole(range(64))
    answer = pair.sender.send(whole, tcp_wire.encode(tcp_wire.Request(1)), Deadline.after(0.5))
    channel, _ = pull(pair, answer)
    soon(lambda: not pair.sender._listener.connections(), 3)
    channel.close()
    pair.sender.finish(answer)


def test_staged_fetches_are_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_MAX_STAGED", 2)
    pair = make(small(None), small(POISON))
    whole, detail = pair.source.whole([1]), tcp_wire.encode(tcp_wire.Request(10**9))
    answers = [pair.sender.send(whole, detail, Deadline.after(5)) for _ in range(2)]
    with pytest.raises(TransferError) as error:
        pair.sender.send(whole, detail, Deadline.after(5))
    assert error.value.reason == "tcp_full"
    for answer in answers:
        pair.sender.finish(answer)
    with pytest.raises(PeerRefused):
        pair.sender.send(whole, b"\x81garbage", Deadline.after(5))


def test_close_amid_streams(make: Make) -> None:
    pair = make(large(64, None), large(64, POISON))
    whole = pair.source.whole(range(64))
    channels = []
    for _ in range(4):
        answer = pair.sender.send(whole, tcp_wire.encode(tcp_wire.Request(1)), Deadline.after(60))
        channels.append(pull(pair, answer)[0])
    began = time.monotonic()
    pair.sender.close()
    assert time.monotonic() - began < 2
    assert not pair.sender._listener.connections()
    for channel in channels:
        channel.close()


def test_idle_costs_nothing(make: Make) -> None:
    pair = make(small(None), small(POISON), streams=4)
    pair.fetch(pair.source.whole([1, 2, 3, 4]), pair.target.whole([1, 2, 3, 4]))
    began = psutil.Process().num_ctx_switches().voluntary
    time.sleep(0.5)
    assert psutil.Process().num_ctx_switches().voluntary - began < 20
