"""Producer and consumer over a real socket and real files: what moves, and what is refused."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from disagg.errors import DataCorrupt, LeaseGone, PeerLost, PeerRefused, TransferError
from disagg.identity import process
from disagg.private_files import PrivateFolder
from disagg.transport import fetch as handoff
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob, Receiver
from disagg.transport.blocks import BlockCache, Region, Selection
from disagg.transport.control import client
from disagg.transport.control.channel import FIRST_FRAME, Channel
from disagg.transport.control.client import Endpoint, Peers
from disagg.transport.control.lease import FETCHED, LeaseTable
from disagg.transport.control.server import ControlServer
from disagg.transport.control.ticket import Handoff
from disagg.transport.deadline import Deadline
from disagg.transport.shared_storage import (
    ProducersFiles,
    SharedStorageReceiver,
    SharedStorageSender,
    Storage,
    _decode_file,
)
from disagg.transport.tcp.tcp import TcpReceiver, TcpSender

BLOCKS = 40
POISON = 0xA5
SECRET = b"correct horse"
FINGERPRINT = {"model": "tiny", "dtype": "bfloat16"}
LAYERS = ("a", "b")


def cache(fill: Callable[[Sequence[int]], torch.Tensor]) -> BlockCache:
    """Two regions of 2 heads and 4 tokens; the second is strided as in block-outermost layouts."""
    small = fill((BLOCKS, 2, 4, 12))
    wide = fill((BLOCKS, 2, 2, 4, 32))
    return BlockCache([Region("a", small, "U8"), Region("b", wide[:, 1], "F32")])


def random_bytes(shape: Sequence[int]) -> torch.Tensor:
    return torch.randint(0, 256, list(shape), dtype=torch.uint8)


def poison(shape: Sequence[int]) -> torch.Tensor:
    return torch.full(list(shape), POISON, dtype=torch.uint8)


class Clock:
    """The time, and as much later as a test says."""

    later = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.later


@dataclass
class Pair:
    """One producer that listens, one consumer that may connect."""

    source: BlockCache
    target: BlockCache
    leases: LeaseTable
    server: ControlServer
    sender: SharedStorageSender
    receiver: SharedStorageReceiver
    peers: Peers
    endpoint: Endpoint
    folder: Path
    clock: Clock
    channels: list[Channel] = field(default_factory=list)

    def grant(self, lease: int, block_ids: list[int], seconds: float = 30) -> None:
        self.leases.grant(lease, f"request-{lease}", block_ids, seconds)

    def wanted(self, lease: int, start: int, stop: int, readers: int = 1) -> handoff.FetchRequest:
        """Whole blocks [start, stop) of a lease."""
        part = p.Part(4, ((start, stop),))
        return handoff.FetchRequest(self.endpoint, lease, part, LAYERS, readers)

    def job(self, block_ids: list[int], seconds: float = 5) -> FetchJob:
        return FetchJob(self.target.whole(block_ids), Deadline.after(seconds))

    def fetch(
        self, lease: int, block_ids: list[int], start: int = 0, readers: int = 1
    ) -> handoff.Moved:
        wanted = self.wanted(lease, start, start + len(block_ids), readers)
        return handoff.fetch(self.peers, wanted, self.job(block_ids), [self.receiver])

    def send(self, block_ids: list[int], sender: SharedStorageSender | None = None) -> bytes:
        blocks = self.source.whole(block_ids)
        return (sender or self.sender).send(blocks, b"", Deadline.after(5))

    def files_of_producer(self) -> ProducersFiles:
        opened = self.receiver.open(self.sender.offer())
        assert opened is not None
        return opened

    def files(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if not name.endswith(".probe")]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    source, target, clock = cache(random_bytes), cache(poison), Clock()
    leases = LeaseTable(20, clock=clock)
    storage = Storage(PrivateFolder(tmp_path / "storage"), 1 << 20)
    sender = SharedStorageSender(source, storage)
    server = ControlServer(
        host="127.0.0.1",
        port=0,
        secret=SECRET,
        hello=p.Welcome("prefill-0", "life-1", {sender.name: sender.offer()}, LAYERS),
        fingerprint=FINGERPRINT,
        cache=source,
        leases=leases,
        senders=[sender],
        use_limit_s=2,
    )
    peers = Peers("decode-0", FINGERPRINT, SECRET)
    receiver = SharedStorageReceiver(target, storage)
    endpoint = Endpoint("127.0.0.1", server.port, "life-1")
    folder = storage.folder.path
    pair = Pair(source, target, leases, server, sender, receiver, peers, endpoint, folder, clock)
    yield pair
    for opened in pair.channels:
        opened.close()
    peers.close()
    server.close()
    sender.close()
    leases.check_integrity()
    assert os.listdir(tmp_path / "storage") == []


def same(pair: Pair, sources: list[int], targets: list[int]) -> bool:
    return all(
        torch.equal(ours.memory[sources], theirs.memory[targets])
        for ours, theirs in zip(pair.source.regions, pair.target.regions, strict=True)
    )


def untouched(pair: Pair, but: list[int]) -> bool:
    rest = [block for block in range(BLOCKS) if block not in but]
    return all(bool((region.memory[rest] == POISON).all()) for region in pair.target.regions)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([7], [3]),
        ([0, 1, 2, 3], [10, 11, 12, 13]),
        ([9, 4, 5, 6, 39], [0, 2, 1, 30, 29]),
        (list(range(BLOCKS)), list(reversed(range(BLOCKS)))),
    ],
    ids=["one", "a-run", "any-order", "all"],
)
def test_the_asked_blocks_and_no_others(pair: Pair, sources: list[int], targets: list[int]) -> None:
    pair.grant(0, sources)
    moved = pair.fetch(0, targets)
    assert same(pair, sources, targets)
    assert untouched(pair, targets)
    assert moved.num_bytes == len(sources) * (96 + 256)
    assert moved.transport == "shared_storage"
    assert [tuple(ended) for ended in pair.leases.take_ended()] == [("request-0", "fetched")]
    assert pair.files() == []


def test_from_a_position_on(pair: Pair) -> None:
    pair.grant(0, [5, 6, 7, 8])
    pair.fetch(0, [20, 21], start=2)
    assert same(pair, [7, 8], [20, 21])
    assert untouched(pair, [20, 21])


def test_heads_and_units_smaller_than_a_block(pair: Pair) -> None:
    """Head 1 of the tokens 2..8, put where our head 0 and our tokens 4..10 are."""
    pair.grant(0, [5, 6])
    wanted = handoff.FetchRequest(pair.endpoint, 0, p.Part(2, ((1, 4),), (1, 2)), LAYERS)
    job = FetchJob(Selection([20, 21, 22], 2, 2, 3, (0, 1)), Deadline.after(5))
    moved = handoff.fetch(pair.peers, wanted, job, [pair.receiver])
    assert moved.num_bytes == 6 * (12 + 32)
    for ours, theirs in zip(pair.source.regions, pair.target.regions, strict=True):
        sent = torch.cat([ours.memory[5], ours.memory[6]], dim=1)[1, 2:8]
        got = torch.cat([theirs.memory[block] for block in (20, 21, 22)], dim=1)
        assert torch.equal(got[0, 4:10], sent)
        assert bool((got[1] == POISON).all())
        assert bool((got[0, :4] == POISON).all())
        assert bool((got[0, 10:] == POISON).all())
    assert untouched(pair, [20, 21, 22])


def test_several_spans_and_blocks_that_are_gone(pair: Pair) -> None:
    """As of a model with a sliding window: the first group whole, the end of the second."""
    pair.grant(0, [7, 3, 9, -1, -1, 20])
    wanted = handoff.FetchRequest(pair.endpoint, 0, p.Part(4, ((1, 3), (5, 6))), LAYERS)
    handoff.fetch(pair.peers, wanted, pair.job([30, 31, 5]), [pair.receiver])
    assert same(pair, [3, 9, 20], [30, 31, 5])
    assert untouched(pair, but=[30, 31, 5])
    pair.grant(1, [7, 3, 9, -1, -1, 20])
    wanted = handoff.FetchRequest(pair.endpoint, 1, p.Part(4, ((1, 3), (4, 6))), LAYERS)
    with pytest.raises(TransferError, match="was freed") as error:
        handoff.fetch(pair.peers, wanted, pair.job([1, 2, 3, 4]), [pair.receiver])
    assert error.value.reason == "window"


def test_a_lease_with_two_readers_ends_with_the_second(pair: Pair) -> None:
    pair.grant(0, [5])
    pair.fetch(0, [1], readers=2)
    assert pair.leases.take_ended() == []
    pair.fetch(0, [2], readers=2)
    assert pair.leases.take_ended()[0].outcome == "fetched"
    assert same(pair, [5, 5], [1, 2])


@pytest.mark.parametrize(
    "part",
    [
        p.Part(3, ((0, 1),)),
        p.Part(0, ((0, 1),)),
        p.Part(-4, ((0, 1),)),
        p.Part(4, ((-1, 1),)),
        p.Part(4, ((2, 1),)),
        p.Part(4, ((0, 1 << 62),)),
        p.Part(4, ((0, 1), (0, 1))),
        p.Part(2, ((0, 1), (1, 2))),
        p.Part(4, ((0, 1),), (0, 3)),
        p.Part(4, ((0, 1),), (1, 1)),
        p.Part(4, ((0, 1),), (-1, 1)),
    ],
)
def test_a_part_outside_of_the_lease_is_refused(pair: Pair, part: p.Part) -> None:
    pair.grant(0, [1, 2])
    opened = hello(pair)
    assert isinstance(ask(opened, p.Acquire("life-1", 0)), p.Acquired)
    refused = ask(opened, p.Fetch("shared_storage", part, b""))
    assert isinstance(refused, p.Failed)
    assert refused.reason == "range"
    opened.close()


def test_many_at_once(pair: Pair) -> None:
    for lease in range(BLOCKS):
        pair.grant(lease, [lease])
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda lease: pair.fetch(lease, [lease]), range(BLOCKS)))
    assert same(pair, list(range(BLOCKS)), list(range(BLOCKS)))
    assert len(pair.leases.take_ended()) == BLOCKS
    assert pair.leases.held() == 0


def test_a_lease_serves_once(pair: Pair) -> None:
    pair.grant(0, [1])
    pair.fetch(0, [1])
    pair.leases.take_ended()
    with pytest.raises(LeaseGone):
        pair.fetch(0, [2])
    assert untouched(pair, [1])


def test_a_lease_that_is_gone_costs_no_connection(pair: Pair) -> None:
    """The fetch that was asked with it is answered, too; the answers stay in step."""
    pair.grant(0, [1])
    pair.fetch(0, [1])
    for lease in (1, 2):
        with pytest.raises(LeaseGone):
            pair.fetch(0, [2])
        pair.grant(lease, [5])
        pair.fetch(lease, [6 + lease])
        assert same(pair, [5], [6 + lease])
    assert pair.server.connections() == 1
    assert pair.files() == []


def test_expired_lease_is_gone(pair: Pair) -> None:
    pair.grant(0, [1], seconds=0.05)
    time.sleep(0.1)
    with pytest.raises(LeaseGone):
        pair.fetch(0, [1])
    assert pair.leases.take_ended()[0].outcome == "expired"


def test_grant_may_come_after_the_consumer(pair: Pair) -> None:
    timer = threading.Timer(0.6, pair.grant, (0, [3]))  # later than the producer looks around
    timer.start()
    pair.fetch(0, [4])
    assert same(pair, [3], [4])


def test_other_life_of_the_producer(pair: Pair) -> None:
    pair.grant(0, [1])
    endpoint = Endpoint("127.0.0.1", pair.server.port, "life-0")
    wanted = handoff.FetchRequest(endpoint, 0, p.Part(4, ((0, 1),)), LAYERS)
    with pytest.raises(LeaseGone):
        handoff.fetch(pair.peers, wanted, pair.job([1]), [pair.receiver])
    assert pair.leases.held() == 1


def test_more_blocks_than_leased(pair: Pair) -> None:
    pair.grant(0, [1, 2])
    with pytest.raises(TransferError, match=r"units 0\.\.3 of 0\.\.2") as error:
        pair.fetch(0, [5, 6, 7])
    assert error.value.reason == "range"
    assert untouched(pair, [])


def test_misfit_is_refused_by_name(pair: Pair) -> None:
    peers = Peers("decode-0", {**FINGERPRINT, "dtype": "float32"}, SECRET)
    pair.grant(0, [1])
    with pytest.raises(PeerRefused, match="dtype differs: 'bfloat16' here, 'float32' there"):
        handoff.fetch(peers, pair.wanted(0, 0, 1), pair.job([1]), [pair.receiver])


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (["other", *LAYERS[1:]], f"layers differ: {LAYERS[0]!r} here, 'other' there"),
        ([*LAYERS, "more"], f"layers differ: {len(LAYERS)} here, {len(LAYERS) + 1} there"),
    ],
    ids=["another-layer", "more-layers"],
)
def test_other_layers_are_refused_by_name(pair: Pair, theirs: list[str], words: str) -> None:
    wanted = pair.wanted(0, 0, 1)
    assert handoff.misfit(wanted, LAYERS) is None
    assert handoff.misfit(wanted, theirs) == words


def test_wrong_secret(pair: Pair) -> None:
    peers = Peers("decode-0", FINGERPRINT, b"guessed")
    pair.grant(0, [1])
    with pytest.raises(PeerLost, match="is the secret the same"):
        handoff.fetch(peers, pair.wanted(0, 0, 1), pair.job([1]), [pair.receiver])
    pair.fetch(0, [1])


def test_no_common_folder(pair: Pair, tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "elsewhere").make("path")
    elsewhere = SharedStorageReceiver(pair.target, Storage(folder, 1 << 20))
    pair.grant(0, [1])
    with pytest.raises(TransferError) as error:
        handoff.fetch(pair.peers, pair.wanted(0, 0, 1), pair.job([1]), [elsewhere])
    assert error.value.reason == "no_transport"
    assert pair.leases.take_ended()[0].outcome == "aborted"


def test_a_folder_that_was_away_is_used_again(pair: Pair, tmp_path: Path) -> None:
    """First unknown at hello, then gone with the connection in use; the connection stays."""
    away = tmp_path / "away"
    for lease, reason in enumerate(("no_transport", "storage_write")):
        pair.folder.rename(away)
        pair.grant(2 * lease, [1])
        with pytest.raises(TransferError) as error:
            pair.fetch(2 * lease, [1])
        assert error.value.reason == reason
        away.rename(pair.folder)
        pair.grant(2 * lease + 1, [1])
        pair.fetch(2 * lease + 1, [1])
        assert same(pair, [1], [1])
        assert pair.server.connections() == 1
    assert [ended.outcome for ended in pair.leases.take_ended()] == ["aborted", "fetched"] * 2


def test_budget_is_kept(pair: Pair, tmp_path: Path) -> None:
    tight = SharedStorageSender(pair.source, Storage(PrivateFolder(tmp_path / "tight"), 2000))
    answer = pair.send([1, 2], tight)
    with pytest.raises(TransferError, match="max_bytes") as error:
        pair.send([1, 2, 3, 4], tight)
    assert error.value.reason == "storage_full"
    tight.finish(answer)
    tight.finish(pair.send([1, 2, 3], tight))
    tight.close()
    assert os.listdir(tmp_path / "tight") == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "storage_size"),
        (lambda data: b"", "storage_size"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "storage_checksum"),
        (lambda data: data[:20] + b"9" + data[21:], "storage_header"),
    ],
    ids=["short", "empty", "flipped", "header"],
)
def test_damaged_file(pair: Pair, damage: Callable[[bytes], bytes], reason: str) -> None:
    answer = pair.send([1, 2, 3])
    path = pair.folder / pair.files()[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataCorrupt) as error:
        pair.files_of_producer().receive(pair.job([1, 2, 3]), answer)
    assert error.value.reason == reason
    assert pair.files() == []
    pair.sender.finish(answer)


def test_file_is_ordinary_safetensors(pair: Pair) -> None:
    from safetensors.torch import load_file

    answer = pair.send([4, 2])
    tensors = load_file(pair.folder / pair.files()[0])
    assert torch.equal(tensors["a"], pair.source.regions[0].memory[[4, 2]])
    assert tensors["b"].shape == (2, 2, 4, 8)
    assert tensors["b"].dtype is torch.float32
    pair.sender.finish(answer)


def test_name_from_the_wire_is_no_path(pair: Pair, tmp_path: Path) -> None:
    victim = tmp_path / "victim.safetensors"
    within = pair.folder / "model-00001-of-00002.safetensors"
    other = SharedStorageSender(pair.source, Storage(PrivateFolder(pair.folder), 1 << 20))
    handoff_of_another = _decode_file(pair.send([1], other)).name
    for path in (victim, within):
        path.write_bytes(b"precious")
    for name in (f"../{victim.name}", str(victim), within.name, handoff_of_another, "", "."):
        answer = msgspec.msgpack.encode({"name": name, "size": 8, "checksum": b""})
        with pytest.raises(DataCorrupt, match="not its own"):
            pair.files_of_producer().receive(pair.job([1]), answer)
    assert (pair.folder / handoff_of_another).exists()
    assert victim.read_bytes() == within.read_bytes() == b"precious"
    other.close()
    within.unlink()


def test_sweep_takes_what_dead_processes_left_and_nothing_else(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    alive = pair.send([1])
    (name,) = pair.files()
    machine, pid, _ = process.name().split("-")
    elsewhere = "f" * 16
    swept = [
        f"disagg-{machine}-4194304-1-00000000-1.safetensors",
        f"disagg-{machine}-4194304-1-00000000-2.safetensors.tmp",
        f"disagg-{machine}-4194304-1-00000000.probe",
        f"disagg-{machine}-{pid}-1-00000000-1.safetensors",  # the pid was reused
        f"disagg-{elsewhere}-1-1-00000000-1.safetensors",
    ]
    kept = [
        f"disagg-{elsewhere}-1-1-00000000-2.safetensors",
        f"disagg-{elsewhere}-1-1-00000000.probe",
        "model-00001-of-00002.safetensors",
        "adapter_model.safetensors",
        "download.tmp",
        "cmpl-1.0123456789abcdef-1.safetensors",
        f"disagg-{machine}-4194304-1-old.safetensors",
        f"{machine}-4194304-1-00000000-1.safetensors",
        "notes.txt",
    ]
    for each in (*swept, *kept):
        (pair.folder / each).write_bytes(b"x")
        os.utime(pair.folder / each, (0, 0))
    (pair.folder / kept[0]).touch()
    (pair.folder / "disagg-run-folder.tmp").mkdir()
    SharedStorageSender(pair.source, Storage(PrivateFolder(pair.folder), 1 << 20)).close()
    left = sorted(os.listdir(pair.folder))
    probe = name.rpartition("-")[0] + ".probe"
    assert left == sorted([name, probe, *kept, "disagg-run-folder.tmp"])
    assert "holds 8 files that are not disagg's" in caplog.text
    pair.sender.finish(alive)
    (pair.folder / "disagg-run-folder.tmp").rmdir()
    for each in kept:
        (pair.folder / each).unlink()


# ---- what hostile or broken peers send ------------------------------------------------------


def channel(pair: Pair, secret: bytes = SECRET) -> Channel:
    opened = Channel.connect("127.0.0.1", pair.server.port, secret, Deadline.after(5))
    pair.channels.append(opened)
    return opened


def ask(on: Channel, message: p.Request) -> p.Answer:
    on.send(p.encode(message), Deadline.after(5))
    return p.decode_answer(on.receive(Deadline.after(5)))


def hello(pair: Pair) -> Channel:
    opened = channel(pair)
    answer = ask(opened, p.Hello(p.VERSION, "decode-0", FINGERPRINT))
    assert isinstance(answer, p.Welcome)
    return opened


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0xFFFFFFFF) + bytes(16),
        struct.pack("<I", 100) + bytes(16),
        os.urandom(4096),
    ],
    ids=["nothing", "http", "oversized", "truncated", "noise"],
)
def test_garbage_ends_the_connection_only(pair: Pair, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", pair.server.port), timeout=5) as raw:
        raw.recv(64)
        raw.settimeout(8)
        # The server may have hung up before all of it was sent, or with some of it unread.
        with contextlib.suppress(ConnectionError):
            raw.sendall(os.urandom(16) + garbage)
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_WR)
            assert raw.recv(64) == b""
    pair.grant(0, [1])
    pair.fetch(0, [1])


def test_frames_cannot_be_replayed(pair: Pair) -> None:
    pair.grant(0, [1])
    opened = hello(pair)
    body = p.encode(p.Renew("life-1", [0]))
    opened.send(body, Deadline.after(5))
    opened.receive(Deadline.after(5))
    opened._sent -= 1  # the same frame once more, bit for bit
    opened.send(body, Deadline.after(5))
    with pytest.raises(PeerLost):
        opened.receive(Deadline.after(5))


def test_what_is_asked_at_once_is_answered_in_order(pair: Pair) -> None:
    pair.grant(0, [1, 2, 3])
    opened = hello(pair)
    renew, gone = p.Renew("life-1", [0]), p.Acquire("life-0", 0)
    requests: list[p.Request] = [p.Acquire("life-1", 0), *[renew] * 40, gone]
    requests.append(p.Release("life-1", 0, FETCHED))
    opened.send_all([p.encode(request) for request in requests], Deadline.after(5))
    answers = [p.decode_answer(opened.receive(Deadline.after(5))) for _ in requests]
    assert answers[:-2] == [p.Acquired(3), *[p.Done()] * 40]
    assert isinstance(answers[-2], p.Failed)
    assert answers[-1] == p.Done()
    opened.close()


def test_requests_before_hello_and_out_of_order(pair: Pair) -> None:
    early = channel(pair)
    early.send(p.encode(p.Acquire("life-1", 0)), Deadline.after(5))
    with pytest.raises(PeerLost):
        early.receive(Deadline.after(5))
    opened = hello(pair)
    unasked = ask(opened, p.Fetch("shared_storage", p.Part(4, ((0, 1),)), b""))
    assert isinstance(unasked, p.Failed)
    assert unasked.reason == "protocol"
    opened.close()


def test_peer_without_cache_may_only_release(pair: Pair) -> None:
    pair.grant(0, [1])
    opened = channel(pair)
    assert isinstance(ask(opened, p.Hello(p.VERSION, "router", {})), p.Welcome)
    refused = ask(opened, p.Acquire("life-1", 0))
    assert isinstance(refused, p.Failed)
    opened.close()
    ticket = Handoff("prefill-0", 0, [pair.endpoint], [1], 1, 1, b"")
    handoff.release_everywhere(ticket, SECRET, Deadline.after(5))
    assert pair.leases.take_ended()[0].outcome == "aborted"


def test_dead_consumer_gives_the_lease_back(pair: Pair) -> None:
    pair.grant(0, [1, 2], seconds=0.3)
    pair.grant(1, [3, 4], seconds=60)
    opened = [hello(pair), hello(pair)]
    for lease, channel in enumerate(opened):
        assert isinstance(ask(channel, p.Acquire("life-1", lease)), p.Acquired)
        fetch = p.Fetch("shared_storage", p.Part(4, ((0, 2),)), b"")
        assert isinstance(ask(channel, fetch), p.Fetched)
    time.sleep(0.5)
    assert pair.leases.take_ended() == [], "a lease in use must not run out"
    assert len(pair.files()) == 2
    for channel in opened:
        channel.close()
    deadline = time.monotonic() + 4
    ended: list[object] = []
    while len(ended) < 2 and time.monotonic() < deadline:
        ended += pair.leases.take_ended()
        time.sleep(0.01)
    assert len(ended) == 2, "also the one that had a minute left"
    assert pair.files() == []


def test_silent_consumer_loses_the_lease(pair: Pair) -> None:
    pair.grant(0, [1], seconds=0.1)
    opened = hello(pair)
    assert isinstance(ask(opened, p.Acquire("life-1", 0)), p.Acquired)
    deadline = time.monotonic() + 5  # the server's use limit is 2 s
    while pair.leases.held() and time.monotonic() < deadline:
        pair.leases.take_ended()
        time.sleep(0.05)
    assert pair.leases.held() == 0


def test_producer_that_closes_is_noticed_at_once(pair: Pair) -> None:
    pair.grant(0, [1])
    pair.fetch(0, [1])
    pair.server.close()
    began = time.monotonic()
    with pytest.raises(PeerLost):
        pair.fetch(1, [1])
    assert time.monotonic() - began < 2


def test_a_rank_that_is_gone_does_not_keep_the_others_from_hearing(pair: Pair) -> None:
    pair.grant(0, [1, 2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        gone = Endpoint("127.0.0.1", taken.getsockname()[1], "life-0")
        with pytest.raises(PeerLost):
            handoff.release_all(
                pair.peers, [gone, pair.endpoint], handoff.LeaseName(0), Deadline.after(5)
            )
    assert [ended.outcome for ended in pair.leases.take_ended()] == ["aborted"]


def test_names_from_the_wire_are_escaped_in_logs(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    evil = "x\nroot: all is well\x1b[2J\u202e" * 9
    for fingerprint in (FINGERPRINT, {"model": evil}, {evil: "x"}):
        opened = channel(pair)
        ask(opened, p.Hello(p.VERSION, evil, fingerprint))
        opened.close()
    for body in (b"\xa5a\nb\x1b", msgspec.msgpack.encode({"type": evil})):
        opened = channel(pair)
        opened.send(body, Deadline.after(5))
        with pytest.raises(PeerLost):
            opened.receive(Deadline.after(5))
    opened = hello(pair)
    pair.leases.grant(0, evil, [1], 30)
    assert isinstance(ask(opened, p.Acquire("life-1", 0)), p.Acquired)
    opened.close()
    deadline = time.monotonic() + 4
    while "disconnected" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(caplog.messages) >= 4
    assert all(message.isprintable() for message in caplog.messages)
    assert max(map(len, caplog.messages)) < 1000


def test_reasons_and_texts_of_a_producer_are_bounded() -> None:
    """A reason is a metric label."""
    request = p.Acquire("life-1", 0)
    evil = p.Failed("made up\n", "\x1b[2J" * 10_000)
    with pytest.raises(TransferError) as error:
        client.expect(p.Acquired, evil, request)
    assert error.value.reason == "transfer"
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 5000


def test_reasons_are_all_known() -> None:
    package = Path(handoff.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py")]
    named = {
        reason
        for source in sources
        for reason in re.findall(r'(?:reason ?= ?|Failed\(\s*)"(\w+)"', source)
    }
    assert len(named) > 20
    assert named - p.REASONS == set()


def test_idle_connections_are_looked_at_while_others_are_taken(pair: Pair) -> None:
    """As when one thread opens a connection to another engine, and another one fetches."""
    deadline = Deadline.after(60)
    with (
        pair.peers.connection(pair.endpoint, deadline),
        pair.peers.connection(pair.endpoint, deadline),
    ):
        pass

    def take(_: int) -> None:
        for _ in range(1000):
            with pair.peers.connection(pair.endpoint, deadline):
                pass

    def look(_: int) -> None:
        for _ in range(3000):
            assert not pair.peers._has_left(pair.endpoint)

    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(work, number) for number, work in enumerate((take, look, take, look))]
        for end in ends:
            end.result()


@pytest.fixture
def two_ways(pair: Pair) -> Iterator[tuple[Pair, TcpSender, TcpReceiver]]:
    """The same pair, whose producer sends over tcp as well."""
    sender = TcpSender(pair.source, "127.0.0.1", SECRET)
    offers = {one.name: one.offer() for one in (sender, pair.sender)}
    server = ControlServer(
        host="127.0.0.1",
        port=0,
        secret=SECRET,
        hello=p.Welcome("prefill-0", "life-1", offers, LAYERS),
        fingerprint=FINGERPRINT,
        cache=pair.source,
        leases=pair.leases,
        senders=[sender, pair.sender],
        use_limit_s=2,
    )
    pair.endpoint = Endpoint("127.0.0.1", server.port, "life-1")
    receiver = TcpReceiver(pair.target, SECRET)
    yield pair, sender, receiver
    pair.peers.close()
    receiver.close()
    server.close()
    sender.close()


def test_the_next_transport_is_taken(two_ways: tuple[Pair, TcpSender, TcpReceiver]) -> None:
    """The first one breaks after both sides had agreed on it."""
    pair, sender, receiver = two_ways
    order: list[Receiver] = [receiver, pair.receiver]
    for lease, sources in ((1, [3, 4, 5]), (2, [7, 8, 9])):
        pair.grant(lease, sources)
        moved = handoff.fetch(pair.peers, pair.wanted(lease, 0, 3), pair.job([0, 1, 2]), order)
        assert (moved.transport, moved.failed_over) == (
            ("tcp", ()) if lease == 1 else ("shared_storage", ("tcp",))
        )
        assert moved.num_bytes > 0
        assert same(pair, sources, [0, 1, 2])
        sender._listener.close()  # what is staged waits for a connection that nobody accepts
    assert [ended.outcome for ended in pair.leases.take_ended()] == ["fetched", "fetched"]


def test_no_transport_is_left(two_ways: tuple[Pair, TcpSender, TcpReceiver]) -> None:
    """Then nobody can use the lease, and it ends."""
    pair, sender, receiver = two_ways
    pair.grant(1, [3])
    handoff.fetch(pair.peers, pair.wanted(1, 0, 1), pair.job([0]), [receiver])
    sender.close()
    pair.grant(2, [3, 4])
    with pytest.raises(TransferError, match=r"^tcp: ") as failed:
        handoff.fetch(pair.peers, pair.wanted(2, 0, 2), pair.job([0, 1]), [receiver])
    assert not isinstance(failed.value, PeerLost), "the producer is there"
    assert [ended.outcome for ended in pair.leases.take_ended()] == ["fetched", "aborted"]


def test_the_longest_hello_fits_into_a_first_frame(pair: Pair) -> None:
    """Overrides of a configuration may hold long lists; here every field does."""
    fields = [f"a_field_of_a_long_name_{number}" for number in range(14)]
    long = {field: f"{field} " + "1.0625, " * 500 for field in fields}
    assert len(p.encode(p.Hello(p.VERSION, "d" * 300, p.shortened(long)))) < FIRST_FRAME
    other = {**long, fields[3]: long[fields[3]] + "x"}
    served = ControlServer(
        host="127.0.0.1",
        port=0,
        secret=SECRET,
        hello=p.Welcome("prefill-0", "life-1", {}, LAYERS),
        fingerprint=long,
        cache=pair.source,
        leases=pair.leases,
        senders=[],
        use_limit_s=2,
    )
    at = Endpoint("127.0.0.1", served.port, "life-1")
    same, differs = Peers("d", long, SECRET), Peers("d", other, SECRET)
    with same.connection(at, Deadline.after(5)) as connection:
        assert connection.welcome.engine == "prefill-0"
    refused = pytest.raises(PeerRefused, match=f"{fields[3]} differs")
    with refused, differs.connection(at, Deadline.after(5)):
        pass
    same.close()
    served.close()
