"""The consumer's data connections: pooled by the producer's address, several for one fetch.

A connection carries one stream at a time. It returns to the pool only after a successful stream,
and is reused only if its producer has not closed it since; nothing here retries.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from disagg.errors import PeerLost, PeerRefused
from disagg.transport.control.channel import Channel, open_channel, shut
from disagg.transport.deadline import Deadline
from disagg.transport.tcp import messages as w

_POOLED_PER_PEER = 16

Address = tuple[str, int]


class Pool:
    """Connections past hello. Safe for use from any thread."""

    def __init__(self, secret: bytes) -> None:
        self._secret = w.data_secret(secret)
        self._idle: dict[Address, list[Channel]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def connection(self, address: Address, deadline: Deadline) -> Iterator[Channel]:
        """A connection, for the context; an error within closes it."""
        channel = self._take(address) or self._open(address, deadline)
        try:
            yield channel
        except BaseException:
            channel.close()
            raise
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if not self._closed and len(idle) < _POOLED_PER_PEER:
                idle.append(channel)
                return
        channel.close()

    def close(self) -> None:
        """Close the idle connections; those in use are closed afterwards."""
        with self._lock:
            self._closed = True
            idle = [channel for channels in self._idle.values() for channel in channels]
            self._idle.clear()
        for channel in idle:
            channel.close()

    def _take(self, address: Address) -> Channel | None:
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    self._idle.pop(address, None)
                    return None
                channel = idle.pop()
            if channel.is_quiet():
                return channel
            channel.close()

    def _open(self, address: Address, deadline: Deadline) -> Channel:
        def hello(channel: Channel) -> None:
            # The answer proves that the producer has the same secret, before a fetch depends on it.
            channel.send(w.HELLO, deadline)
            if channel.receive(deadline) != w.HELLO:
                raise PeerRefused(
                    f"data connection: the producer does not speak {w.HELLO.decode()}"
                )

        return open_channel(*address, self._secret, deadline, hello)[0]


class Streams:
    """The streams of one fetch: the first error cuts the others."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def run(self, count: int, pull: Callable[[int, Streams], None]) -> None:
        """Call `pull(stream, self)` for each stream, the first in this thread; raise the first
        error. When it returns, no stream accesses the cache any more."""

        def guarded(stream: int) -> None:
            try:
                pull(stream, self)
            except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
                self._fail(error)

        threads = [
            threading.Thread(target=guarded, args=(stream,), name="disagg-tcp-pull", daemon=True)
            for stream in range(1, count)
        ]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            guarded(0)
        finally:
            for thread in started:
                thread.join()
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def using(self, sock: socket.socket) -> Iterator[None]:
        """Within the context, the failure of another stream cuts this connection."""
        with self._lock:
            if self._error is not None:
                raise PeerLost("another stream of this fetch failed")
            self._sockets.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
            for sock in self._sockets:
                shut(sock)
