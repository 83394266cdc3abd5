"""The accept loop: strangers make place for each other, and what the host lacks refuses a
connection and no more."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from disagg.errors import PeerLost, TransferError
from disagg.transport.control import listener
from disagg.transport.control.channel import FIRST_FRAME, GREETING, Channel, open_channel
from disagg.transport.control.listener import Listener
from disagg.transport.deadline import Deadline

SECRET = b"correct horse battery"


def echo(channel: Channel) -> None:
    with contextlib.suppress(PeerLost):
        while True:
            channel.send(channel.receive_at_rest(Deadline.after(20)), Deadline.after(5))


@pytest.fixture
def echoing() -> Iterator[Listener]:
    served = Listener("127.0.0.1", 0, SECRET, echo, name="echo")
    yield served
    served.close()
    served.join(5)
    assert served.connections() == served.strangers() == 0


def opened(at: Listener, body: bytes = b"hello", secret: bytes = SECRET) -> Channel:
    def hello(channel: Channel) -> bytes:
        channel.send(body, Deadline.after(5))
        return channel.receive(Deadline.after(5))

    channel, answer = open_channel(at.host, at.port, secret, Deadline.after(5), hello)
    assert answer == body
    return channel


def stranger(at: Listener, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection((at.host, at.port), timeout=5)
    assert sock.recv(100).startswith(GREETING)
    sock.sendall(data)
    return sock


def soon(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_no_threads_left(echoing: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(PeerLost):
            opened(echoing)
    opened(echoing).close()


def test_close_cuts_connections(echoing: Listener) -> None:
    channel, silent = opened(echoing), stranger(echoing)
    echoing.close()
    with pytest.raises(PeerLost):
        channel.receive(Deadline.after(5))
    with pytest.raises(ConnectionResetError):
        silent.recv(1)
    with pytest.raises(PeerLost):
        opened(echoing)
    channel.close()
    silent.close()


def test_a_stranger_has_no_thread(echoing: Listener) -> None:
    before = threading.active_count()
    silent = [stranger(echoing, bytes(n % 36)) for n in range(40)]
    soon(lambda: echoing.strangers() == 40)
    assert echoing.connections() == 0
    assert threading.active_count() == before
    for one in silent:
        one.close()
    soon(lambda: echoing.strangers() == 0)


def test_the_oldest_stranger_makes_place(
    echoing: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_STRANGERS_OF_ONE", 3)
    silent = [stranger(echoing, b"half") for _ in range(5)]
    for one in silent[:2]:
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    soon(lambda: echoing.strangers() == 3)
    opened(echoing).close()
    for one in silent:
        one.close()


def test_the_oldest_stranger_of_all_makes_place(
    echoing: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_STRANGERS", 3)
    silent = [stranger(echoing) for _ in range(4)]
    with pytest.raises(ConnectionResetError):
        silent[0].recv(1)
    soon(lambda: echoing.strangers() == 3)
    for one in silent:
        one.close()


def test_strangers_take_no_place_of_others(
    echoing: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", 1)
    silent = [stranger(echoing) for _ in range(10)]
    opened(echoing).close()
    for one in silent:
        one.close()


@pytest.mark.parametrize("length", [FIRST_FRAME + 1, 1 << 20, 0xFFFFFFFF])
def test_a_long_first_frame_is_refused_at_its_header(echoing: Listener, length: int) -> None:
    with stranger(echoing, os.urandom(16) + struct.pack("<I", length) + bytes(16)) as sock:
        assert sock.recv(1) == b""


def test_a_first_frame_at_the_limit(echoing: Listener) -> None:
    opened(echoing, b"x" * FIRST_FRAME).close()
    with pytest.raises(TransferError):
        opened(echoing, b"x" * (FIRST_FRAME + 1))


def test_log_lines_of_strangers_are_bounded(
    echoing: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(200):
        with stranger(echoing, os.urandom(16) + bytes(20)) as sock:
            assert sock.recv(1) == b""
    assert 1 <= len(caplog.records) <= 20
    assert "127.0.0.1" in caplog.text


def test_a_wrong_secret_is_refused_at_once_and_not_shown(
    echoing: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = b"wrong horse battery"
    began = time.monotonic()
    with pytest.raises(PeerLost) as error:
        opened(echoing, secret=wrong)
    assert time.monotonic() - began < 2, "nothing is tried again"
    assert "not signed" in caplog.text
    for text in (caplog.text, str(error.value), repr(error.value)):
        assert "horse" not in text
        assert "battery" not in text


def test_a_reset_before_the_answer_is_tried_again() -> None:
    """A server that resets the first connections, as a crowded one does."""
    resets = 3
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(resets):
                sock, _ = server.accept()
                sock.sendall(GREETING + bytes(16))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
            sock, _ = server.accept()
            sock.sendall(GREETING + bytes(16))
            sock.recv(16)
            sock.close()  # refuses: that is final

        server.settimeout(5)
        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        soon = Deadline.after(5)
        with pytest.raises(PeerLost, match="closed by the peer"):
            open_channel("127.0.0.1", port, SECRET, soon, lambda one: one.receive(soon))
        thread.join(5)
        assert not thread.is_alive()


def test_a_worker_that_starts_again_gets_its_port_at_once() -> None:
    """The kernel keeps connections that this side closed first for a minute."""
    before = Listener("127.0.0.1", 0, SECRET, echo, name="echo")
    clients = [opened(before) for _ in range(3)]
    before.close()
    before.join(5)
    for client in clients:
        client.close()
    after = Listener("127.0.0.1", before.port, SECRET, echo, name="echo")
    opened(after).close()
    with pytest.raises(OSError, match="in use"):
        Listener("127.0.0.1", before.port, SECRET, echo, name="echo")
    after.close()
    after.join(5)
