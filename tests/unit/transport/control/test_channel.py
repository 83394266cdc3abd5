"""Frames over a real socket: in order, also where several were read at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from disagg.errors import PeerLost, PeerRefused
from disagg.transport.control.channel import Channel, Opening
from disagg.transport.deadline import Deadline

SECRET, FIRST = b"correct horse", b"hello"
BODIES = [b"a", b"", b"b" * 100_000, b"c" * 7]


def after(seconds: float = 5) -> Deadline:
    return Deadline.after(seconds)


def accept(server: socket.socket, ahead: bool) -> Channel:
    """The server's end, once the first frame is there."""
    opening, end = Opening(server.accept()[0], SECRET), after()
    while not opening.advance():
        assert end.left()
        time.sleep(0.001)
    return opening.channel(ahead=ahead)


@pytest.fixture(params=[False, True], ids=["exactly", "ahead"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    """The two ends of one connection."""
    ahead: bool = request.param
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, server, ahead)
        port = server.getsockname()[1]
        ours = Channel.connect("127.0.0.1", port, SECRET, after(), ahead=ahead)
        ours.send(FIRST, after())
        theirs = accepted.result(5)
    assert theirs.receive(after()) == FIRST
    yield ours, theirs
    ours.close()
    theirs.close()


def test_every_frame_arrives_once_and_in_order(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(ours.send_all, BODIES, after())
            assert [theirs.receive(after()) for _ in BODIES] == BODIES
            sent.result(5)
        theirs.send_all(BODIES[::-1][:2], after())
        assert [ours.receive(after()) for _ in range(2)] == BODIES[::-1][:2]
    assert not theirs.holds_more
    with pytest.raises(PeerLost) as error:
        theirs.receive(after(0.05))
    assert error.value.reason == "deadline"


def test_what_came_at_once_is_known_to_be_there(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send_all([b"one", b"two", b"three"], after())
    assert theirs.receive(after()) == b"one"
    assert theirs.holds_more == bool(theirs._least), "one that reads no frame ahead holds none"
    assert [theirs.receive(after()) for _ in range(2)] == [b"two", b"three"]
    assert not theirs.holds_more


def test_the_socket_is_for_those_who_read_nothing_ahead(ends: tuple[Channel, Channel]) -> None:
    ours, _ = ends
    if ours._least:
        with pytest.raises(ValueError, match="read already"):
            _ = ours.sock
    else:
        assert ours.sock.fileno() > 0


def test_a_changed_frame_behind_a_right_one_is_refused(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send(b"right", after())
    ours._send_key = bytes(32)
    ours.send(b"wrong", after())
    assert theirs.receive(after()) == b"right"
    with pytest.raises(PeerRefused):
        theirs.receive(after())
