"""The accept loop: what the host lacks refuses a connection and no more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from disagg.transport.control import listener
from disagg.transport.control.listener import Listener


def echo(sock: socket.socket) -> None:
    while data := sock.recv(100):
        sock.sendall(data)


@pytest.fixture
def echoing() -> Iterator[Listener]:
    served = Listener("127.0.0.1", 0, echo, name="echo")
    yield served
    served.close()
    served.join(5)
    assert served.connections() == 0


def ask(at: Listener) -> bytes:
    """What comes back; nothing if the connection is refused."""
    with socket.create_connection((at.host, at.port), timeout=5) as sock:
        try:
            sock.sendall(b"hello")
            return sock.recv(100)
        except ConnectionError:
            return b""


def test_no_threads_left(echoing: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        assert ask(echoing) == b""
    assert ask(echoing) == b"hello"


def test_silent_connections_count(echoing: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", 1)
    with socket.create_connection((echoing.host, echoing.port), timeout=5) as silent:
        assert ask(echoing) == b""
        silent.sendall(b"still here")
        assert silent.recv(100) == b"still here"


def test_close_cuts_connections(echoing: Listener) -> None:
    with socket.create_connection((echoing.host, echoing.port), timeout=5) as open_one:
        open_one.sendall(b"x")
        assert open_one.recv(1) == b"x"
        echoing.close()
        assert open_one.recv(1) == b""
    with pytest.raises(ConnectionError):
        ask(echoing)
