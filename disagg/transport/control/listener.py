"""Accepts connections on one address and serves each in its own thread.

A peer's errors end at most its own connection. If this host runs out of threads or descriptors,
connections are refused, and accepting is retried.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from disagg.transport.control.address import listen, resolve_host
from disagg.transport.control.channel import shut

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
_RETRY_S = 0.1


class Listener:
    """Calls `serve` with each connection; closes the connection when `serve` returns.

    name: for its threads and log lines. Its limit of connections includes those before hello.
    `host` becomes one numeric address. Raises `ConfigError` for a host that is not one address,
    `OSError` if it cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        serve: Callable[[socket.socket], None],
        *,
        name: str,
    ) -> None:
        self._serve, self._name = serve, name
        # Not the socket's own name, which lacks the scope of a link-local address.
        self.host = resolve_host(host)
        self._socket = listen(self.host, port)
        self.port: int = self._socket.getsockname()[1]
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._accepting.start()

    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Stop listening and cut every connection; their threads end soon."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        shut(self._socket)  # wakes the accepting thread; close alone would not
        self._socket.close()
        for sock in connections:
            shut(sock)

    def join(self, seconds: float) -> None:
        """After `close`: wait until all threads have ended, at most this long."""
        until = time.monotonic() + seconds
        with self._lock:
            threads = [self._accepting, *self._connections]
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                logger.exception("%s cannot accept; retrying", self._name)
                time.sleep(_RETRY_S)
                continue
            refused = self._start(sock)
            if refused is not None:
                logger.warning("%s refuses a connection: %s", self._name, refused)
                sock.close()

    def _start(self, sock: socket.socket) -> str | None:
        """Serve a connection in a new thread, or say why not."""
        thread = threading.Thread(target=self._run, args=(sock,), name=self._name, daemon=True)
        with self._lock:
            if self._closed:
                return "closed"
            if len(self._connections) >= _MAX_CONNECTIONS:
                return f"{_MAX_CONNECTIONS} open"
            try:
                thread.start()
            except RuntimeError as error:  # the host has no more threads for us
                return str(error)
            self._connections[thread] = sock
        return None

    def _run(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread(), None)
            shut(sock)
            sock.close()
