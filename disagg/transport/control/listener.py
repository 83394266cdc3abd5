"""Accepts connections on one address. Serves each in its own thread once it has shown the secret.

Until then a connection has no thread: one loop greets all strangers and reads their first frames,
of 4 KiB at most. There is a limit of strangers for each remote address, and one in total. Where a
limit is reached, the oldest stranger is reset for the newcomer, so that silent connections keep
nobody out; `channel.open_channel` then tries again. Connections past the secret have a limit of
their own, which strangers cannot use up. Where that one is reached, the connection that is at rest
for longest is cut.

A peer's errors end at most its own connection. If this host runs out of threads or descriptors,
connections are refused, and accepting is retried.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import PeerLost, TransferError
from disagg.safe_logging import LimitedLog
from disagg.transport.control.address import listen, resolve_host
from disagg.transport.control.channel import FIRST_FRAME, Channel, Opening, shut

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
_MAX_STRANGERS = 256
_MAX_STRANGERS_OF_ONE = 64
# Long enough for a machine that stalls for some seconds under load.
_HELLO_S = 10.0
_RETRY_S = 0.1
# Newcomers are accepted in small groups, so that first frames are read in time between them.
_AT_ONCE = 16
_CLOSE_S = 5.0


@dataclass(frozen=True, eq=False)
class _Stranger:
    """A connection that has not shown the secret. origin: an IPv4 address, or an IPv6 /64."""

    opening: Opening
    address: str
    origin: str | bytes
    until: float


class Listener:
    """Calls `serve` with each connection whose first frame is signed with `secret`; that frame is
    the first that the channel receives. Closes the connection when `serve` returns.

    name: for its threads and log lines. ahead, most: of the channels. `host` becomes one numeric
    address. Raises `ConfigError` for a host that is not one address, `OSError` if it cannot be
    bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        serve: Callable[[Channel], None],
        *,
        name: str,
        ahead: bool = False,
        most: int = FIRST_FRAME,
    ) -> None:
        self._serve, self._name, self._secret = serve, name, secret
        self._ahead, self._most = ahead, most
        # Not the socket's own name, which lacks the scope of a link-local address.
        self.host = resolve_host(host)
        self._socket = listen(self.host, port)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._connections: dict[threading.Thread, Channel] = {}
        self._ending: set[threading.Thread] = set()  # of connections that were cut for others
        self._lock = threading.Lock()
        self._closed = False
        # Both in the order of arrival; only the loop's thread uses them.
        self._strangers: dict[_Stranger, None] = {}
        self._by_origin: dict[str | bytes, dict[_Stranger, None]] = {}
        self._log, self._drops_log = LimitedLog(logger), LimitedLog(logger, 1)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._accepting = threading.Thread(target=self._loop, name=f"{name}-accept", daemon=True)
        self._accepting.start()

    def connections(self) -> int:
        """How many are open that have shown the secret."""
        with self._lock:
            return len(self._connections)

    def strangers(self) -> int:
        """How many are open that have not shown the secret."""
        return len(self._strangers)

    def close(self) -> None:
        """Stop listening and cut every connection; their threads end soon."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        shut(self._socket)  # wakes the accepting thread; close alone would not
        for channel in connections:
            channel.cut()
        self._accepting.join(_CLOSE_S)

    def join(self, seconds: float) -> None:
        """After `close`: wait until all threads have ended, at most this long."""
        until = time.monotonic() + seconds
        with self._lock:
            threads = [self._accepting, *self._connections, *self._ending]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    # ---- strangers: the loop's thread ------------------------------------------------------

    def _loop(self) -> None:
        with self._selector, self._socket:
            while not self._closed:
                try:
                    self._turn()
                except Exception:  # noqa: BLE001 - nobody else would accept
                    self._log.exception("%s: accepting failed; retrying", self._name)
                    time.sleep(_RETRY_S)
            for stranger in list(self._strangers):
                self._forget(stranger).drop()

    def _turn(self) -> None:
        found = self._selector.select(self._patience())
        # First frames come before newcomers, who may take their places.
        for key, _ in found:
            if isinstance(key.data, _Stranger):
                self._read(key.data)
        if any(key.data is None for key, _ in found):
            self._accept()
        now = time.monotonic()
        while self._strangers and (oldest := next(iter(self._strangers))).until <= now:
            self._forget(oldest).drop()

    def _patience(self) -> float | None:
        if not self._strangers:
            return None
        return max(0.0, next(iter(self._strangers)).until - time.monotonic())

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._closed:
                    return
                self._log.warning("%s cannot accept, retrying: %s", self._name, error)
                if self._strangers:  # it may be descriptors that are missing
                    self._forget(next(iter(self._strangers))).drop()
                time.sleep(_RETRY_S)
                return
            self._greet(sock, str(address[0]))

    def _greet(self, sock: socket.socket, address: str) -> None:
        origin = _origin(sock, address)
        of_origin = self._by_origin.get(origin, {})
        if len(of_origin) >= _MAX_STRANGERS_OF_ONE:
            self._drop_oldest(of_origin)
        elif len(self._strangers) >= _MAX_STRANGERS:
            self._drop_oldest(self._strangers)
        try:
            opening = Opening(sock, self._secret)
        except PeerLost:
            sock.close()
            return
        stranger = _Stranger(opening, address, origin, time.monotonic() + _HELLO_S)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        self._strangers[stranger] = None
        self._by_origin.setdefault(origin, {})[stranger] = None

    def _drop_oldest(self, among: dict[_Stranger, None]) -> None:
        oldest = next(iter(among))
        self._drops_log.warning(
            "%s: %d connections have not shown the secret, %d of them from %s; the oldest are "
            "dropped for new ones",
            self._name,
            len(self._strangers),
            len(self._by_origin[oldest.origin]),
            oldest.address,
        )
        self._forget(oldest).drop()

    def _read(self, stranger: _Stranger) -> None:
        if stranger not in self._strangers:
            return
        try:
            if not stranger.opening.advance():
                return
            opening = self._forget(stranger)
            channel = opening.channel(ahead=self._ahead, most=self._most)
        except (TransferError, OSError) as error:
            if not isinstance(error, PeerLost):
                self._log.warning(
                    "%s refuses a connection from %s: %s", self._name, stranger.address, error
                )
            self._forget(stranger).sock.close()
            return
        refused = self._start(channel)
        if refused is not None:
            self._log.warning(
                "%s refuses a connection from %s: %s", self._name, stranger.address, refused
            )
            channel.close()

    def _forget(self, stranger: _Stranger) -> Opening:
        """The connection, which is no stranger of ours any more."""
        if self._strangers.pop(stranger, stranger) is None:
            self._selector.unregister(stranger.opening.sock)
            of_origin = self._by_origin[stranger.origin]
            del of_origin[stranger]
            if not of_origin:
                del self._by_origin[stranger.origin]
        return stranger.opening

    # ---- connections past the secret -------------------------------------------------------

    def _start(self, channel: Channel) -> str | None:
        """Serve a connection in a new thread, or say why not."""
        thread = threading.Thread(target=self._run, args=(channel,), name=self._name, daemon=True)
        with self._lock:
            if self._closed:
                return "closed"
            if len(self._connections) >= _MAX_CONNECTIONS and not self._cut_resting():
                return f"{_MAX_CONNECTIONS} in use"
            try:
                thread.start()
            except RuntimeError as error:  # the host has no more threads for us
                return str(error)
            self._connections[thread] = channel
        return None

    def _cut_resting(self) -> bool:
        """Cut the connection that is at rest for longest, if there is one."""
        resting = [
            (since, thread)
            for thread, channel in self._connections.items()
            if (since := channel.resting_since) is not None
        ]
        if not resting or len(self._ending) >= _MAX_CONNECTIONS:
            return False
        _, thread = min(resting, key=lambda one: one[0])
        self._ending.add(thread)
        self._connections.pop(thread).cut()
        return True

    def _run(self, channel: Channel) -> None:
        try:
            self._serve(channel)
        except Exception:  # noqa: BLE001 - whatever a peer sends, only its connection ends
            self._log.exception("%s: a connection failed unexpectedly", self._name)
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread(), None)
                self._ending.discard(threading.current_thread())
            channel.close()


def _origin(sock: socket.socket, address: str) -> str | bytes:
    """What counts as one remote address: who has one IPv6 address has all of its /64."""
    if sock.family != socket.AF_INET6:
        return address
    with contextlib.suppress(OSError):
        return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8]
    return address
