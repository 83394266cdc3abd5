"""A consumer follows a lease that grows, over a real socket and real files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from unit.transport.test_fetch import (
    FINGERPRINT,
    LAYERS,
    SECRET,
    Pair,
    cache,
    pair,
    poison,
    random_bytes,
    same,
    untouched,
)

from disagg.errors import LeaseGone, PeerLost, PeerRefused, TransferError
from disagg.private_files import PrivateFolder
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob, Receiver
from disagg.transport.blocks import BlockCache
from disagg.transport.control.client import Endpoint, Peers
from disagg.transport.control.lease import LeaseTable
from disagg.transport.control.server import ControlServer
from disagg.transport.deadline import Deadline
from disagg.transport.fetch import FetchRequest, Moved
from disagg.transport.follow import Followed, Stream, awaited, followed
from disagg.transport.registry import Means, make_receivers, make_senders
from disagg.transport.shared_storage import Storage

__all__ = ["pair"]

NAME, PROMPT = b"s" * 16, b"p" * 16
STREAM = Stream(NAME, PROMPT)
THEIRS = [5, 6, 7]


def grow(pair: Pair, lease: int = 0) -> None:
    pair.leases.grow(lease, f"request-{lease}", NAME, PROMPT, len(THEIRS))


def follow(
    pair: Pair, readers: int = 1, stream: Stream = STREAM
) -> contextlib.AbstractContextManager[Followed]:
    wanted = pair.wanted(-1, 0, len(THEIRS), readers)
    return followed(pair.peers, wanted, stream, [pair.receiver], Deadline.after(5))


def fetch(pair: Pair, lease: Followed, first: int, ours: list[int]) -> Moved:
    """Blocks from this position on."""
    return lease.fetch(p.Part(4, ((first, first + len(ours)),)), pair.job(ours))


def waits_while(lease: Followed, happens: Callable[[], object]) -> bool:
    happens()
    return lease.proceed(60, Deadline.after(5))


def outcomes(pair: Pair) -> list[str]:
    return [ended.outcome for ended in pair.leases.take_ended()]


def users(pair: Pair) -> int:
    return sum(held.users for held in pair.leases._leases.values())


def test_a_lease_is_fetched_while_it_grows(pair: Pair) -> None:
    grow(pair, lease=4)
    with contextlib.ExitStack() as later, follow(pair) as lease:
        assert lease.request.lease == 4
        assert lease.grown == p.Grown(4, 0, 0, False)
        pair.leases.extend(4, 0, [(0, THEIRS[:1])], 4)
        assert lease.proceed(60, Deadline.after(5))
        moved = fetch(pair, lease, 0, [20])
        assert (moved.transport, moved.num_bytes) == ("shared_storage", 96 + 256)
        assert same(pair, THEIRS[:1], [20])
        pair.grant(4, THEIRS)
        assert lease.proceed(60, Deadline.after(5))
        assert lease.grown == p.Grown(4, 0, 4, True)
        fetch(pair, lease, 1, [21, 22])
        lease.end(Deadline.after(5), later)
        assert pair.leases.held() == 1, "its consumer reports first"
        later.close()
        assert outcomes(pair) == ["fetched"]
    assert same(pair, THEIRS, [20, 21, 22])
    assert untouched(pair, [20, 21, 22])
    assert (pair.files(), pair.server.connections()) == ([], 1)
    # The connection serves the next one.
    pair.grant(5, [9])
    pair.fetch(5, [30])
    assert pair.server.connections() == 1


def test_without_news_it_waits_no_longer_than_asked(pair: Pair) -> None:
    grow(pair)
    with follow(pair) as lease:
        assert lease.proceed(0.0, Deadline.after(5))
        assert lease.grown == p.Grown(0, 0, 0, False)
        with pytest.raises(PeerLost):
            lease.proceed(60, Deadline.after(0.1))


def test_a_request_that_begins_anew_makes_all_before_wrong(pair: Pair) -> None:
    grow(pair)
    pair.leases.extend(0, 0, [(0, THEIRS[:2])], 8)
    with follow(pair) as lease:
        assert lease.grown.tokens == 8
        fetch(pair, lease, 0, [20, 21])
        pair.leases.begin_anew(0, 1)
        pair.leases.extend(0, 1, [(0, [30])], 4)
        assert not lease.proceed(60, Deadline.after(5))
        assert lease.grown == p.Grown(0, 1, 4, False)
        fetch(pair, lease, 0, [20])
        assert lease.proceed(0.0, Deadline.after(5))
        assert same(pair, [30], [20])


@pytest.mark.parametrize("end", ["stop", "take_back", "revoke", "leave"])
def test_a_request_that_ends_ends_what_follows_it(pair: Pair, end: str) -> None:
    """The connection serves others."""
    grow(pair)
    ends: dict[str, Callable[[], object]] = {
        "stop": lambda: pair.leases.stop(0),
        "take_back": lambda: pair.leases.take_back([0]),
        "revoke": lambda: pair.leases.revoke(1),
        "leave": lambda: pair.leases.leave(NAME),
    }
    with pytest.raises(LeaseGone), follow(pair) as lease:
        waits_while(lease, ends[end])
    assert users(pair) == 0
    pair.grant(1, [9])
    pair.fetch(1, [30])
    assert pair.server.connections() == 1


def test_who_fails_gives_the_lease_up(pair: Pair) -> None:
    grow(pair)
    with pytest.raises(ZeroDivisionError), follow(pair):
        _ = 1 // 0
    assert users(pair) == 0
    pair.grant(0, THEIRS)
    assert outcomes(pair) == ["aborted"]
    pair.grant(1, [9])
    pair.fetch(1, [30])
    assert pair.server.connections() == 1


def test_a_fetch_that_fails_gives_the_lease_up(pair: Pair, tmp_path: Path) -> None:
    grow(pair)
    with pytest.raises(TransferError) as error, follow(pair) as lease:
        fetch(pair, lease, 0, [20])
    assert error.value.reason == "window", "none of it is final"
    assert users(pair) == 0
    pair.leases.stop(0)
    pair.leases._past.clear()
    grow(pair, 1)
    pair.leases.extend(1, 0, [(0, THEIRS)], 12)
    away = tmp_path / "away"
    pair.folder.rename(away)
    with pytest.raises(TransferError) as error, follow(pair) as lease:
        fetch(pair, lease, 0, [20, 21, 22])
    away.rename(pair.folder)
    assert error.value.reason == "storage_write"
    pair.grant(1, THEIRS)
    assert outcomes(pair) == ["aborted"]
    assert pair.server.connections() == 1


def test_what_is_not_there_or_does_not_fit_is_refused(pair: Pair) -> None:
    with pytest.raises(LeaseGone), follow(pair):
        pass
    grow(pair)
    with pytest.raises(TransferError) as error, follow(pair, stream=Stream(NAME, b"q" * 16)):
        pass
    assert error.value.reason == "prompt_mismatch"
    wanted = replace(pair.wanted(-1, 0, 3), layers=("a", "c"))
    with (
        pytest.raises(PeerRefused, match="layers differ: 'c' here, 'b' there"),
        followed(pair.peers, wanted, STREAM, [pair.receiver], Deadline.after(5)),
    ):
        pass
    earlier = replace(wanted, layers=LAYERS, endpoint=replace_life(pair.endpoint))
    with (
        pytest.raises(LeaseGone),
        followed(pair.peers, earlier, STREAM, [pair.receiver], Deadline.after(5)),
    ):
        pass
    assert users(pair) == 0
    assert pair.leases.check_stream(NAME, PROMPT)


def replace_life(endpoint: Endpoint) -> Endpoint:
    return Endpoint(endpoint.host, endpoint.port, "life-0")


def test_a_producer_that_is_gone_is_forgotten(pair: Pair) -> None:
    grow(pair)
    pair.grant(1, [9])
    pair.fetch(1, [30])
    assert pair.peers._opened.keys() == {pair.endpoint}
    with pytest.raises(PeerLost), follow(pair) as lease:
        waits_while(lease, pair.server.close)
    assert pair.peers._opened == {}


def test_a_connection_with_a_lease_in_use_serves_no_other(pair: Pair) -> None:
    """Neither given back nor given up."""
    grow(pair)
    with follow(pair):
        pass
    assert sum(map(len, pair.peers._idle.values())) == 0
    pair.grant(1, [9])
    pair.fetch(1, [30])
    assert sum(map(len, pair.peers._idle.values())) == 1


def test_several_readers_end_it_together(pair: Pair) -> None:
    grow(pair)
    with contextlib.ExitStack() as later, contextlib.ExitStack() as both:
        leases = [both.enter_context(follow(pair, readers=2)) for _ in range(2)]
        pair.grant(0, THEIRS)
        for number, lease in enumerate(leases):
            assert outcomes(pair) == []
            assert lease.proceed(60, Deadline.after(5))
            fetch(pair, lease, 0, [10 * number + at for at in range(3)])
            lease.end(Deadline.after(5), later)
        later.close()
    assert outcomes(pair) == ["fetched"]
    assert same(pair, THEIRS * 2, [0, 1, 2, 10, 11, 12])


def test_whether_a_stream_has_begun(pair: Pair) -> None:
    def begun(seconds: float = 0.0, stream: Stream = STREAM) -> p.Awaited:
        return awaited(pair.peers, pair.endpoint, stream, seconds, Deadline.after(5))

    assert begun() == p.Awaited(has_begun=False)
    pair.leases.queue(NAME)
    assert begun() == p.Awaited(has_begun=False, is_queued=True)
    grow(pair)
    assert begun(60) == p.Awaited(has_begun=True)
    with pytest.raises(TransferError) as error:
        begun(60, Stream(NAME, b"q" * 16))
    assert error.value.reason == "prompt_mismatch"
    pair.leases.stop(0)
    with pytest.raises(LeaseGone):
        begun(60)
    assert (users(pair), pair.server.connections()) == (0, 1)


# ---- transports that read without asking -------------------------------------------------------


@pytest.fixture
def reads(tmp_path: Path) -> Iterator[tuple[ControlServer, LeaseTable, BlockCache, list[Receiver]]]:
    """A producer whose memory is read."""
    source, target, leases = cache(random_bytes), cache(poison), LeaseTable(20)
    storage = Storage(PrivateFolder(tmp_path / "storage"), 1 << 20)
    means = Means("127.0.0.1", SECRET, storage, board=leases.board)
    (sender,) = make_senders(["process_memory"], source, means)
    server = ControlServer(
        host="127.0.0.1",
        port=0,
        secret=SECRET,
        hello=p.Welcome("prefill-0", "life-1", {sender.name: sender.offer()}, LAYERS),
        fingerprint=FINGERPRINT,
        cache=source,
        leases=leases,
        senders=[sender],
        use_limit_s=60,
    )
    receivers = make_receivers(["process_memory"], target, means)
    yield server, leases, target, receivers
    server.close()
    sender.close()
    for receiver in receivers:
        receiver.close()


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_was_read_counts_if_the_lease_was_in_use_until_the_end(
    reads: tuple[ControlServer, LeaseTable, BlockCache, list[Receiver]], is_cut: bool
) -> None:
    """The producer's last answer says so; then it is released at once."""
    server, leases, target, receivers = reads
    leases.grow(0, "request-0", NAME, PROMPT, 3)
    leases.grant(0, "request-0", THEIRS, 30)
    peers = Peers("decode-0", FINGERPRINT, SECRET)
    part, endpoint = p.Part(4, ((0, 3),)), Endpoint("127.0.0.1", server.port, "life-1")
    wanted = FetchRequest(endpoint, -1, part, LAYERS)
    with contextlib.ExitStack() as later:
        with followed(peers, wanted, STREAM, receivers, Deadline.after(5)) as lease:
            job = FetchJob(target.whole([20, 21, 22]), Deadline.after(5))
            assert lease.fetch(part, job).transport == "process_memory"
            if is_cut:
                lease._connection.channel.cut()
                with pytest.raises(PeerLost):
                    lease.end(Deadline.after(5), later)
            else:
                lease.end(Deadline.after(5), later)
                assert [ended.outcome for ended in leases.take_ended()] == ["fetched"]
        later.close()
    peers.close()
    deadline = time.monotonic() + 20
    while any(held.users for held in leases._leases.values()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert leases.take_ended() == []
