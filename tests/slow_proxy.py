"""A TCP proxy in front of a server that is far away, or busy: each of its bytes comes late."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator


class SlowProxy:
    """Passes on to a port of the loopback at once, and back `delay_s` after the server's bytes
    came. So it takes nothing of the rate."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.delay_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @contextlib.contextmanager
    def by(self, delay_s: float) -> Iterator[None]:
        """So slow meanwhile."""
        self.delay_s = delay_s
        try:
            yield
        finally:
            self.delay_s = 0.0

    def close(self) -> None:
        for one in (self._listener, *self._open):
            _end(one)
        self._accepting.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                down, _ = self._listener.accept()
                try:
                    up = socket.create_connection(("127.0.0.1", self._to), 5)
                except OSError:
                    down.close()
                    continue
                up.settimeout(None)
                self._open |= {down, up}
                late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                for work in (self._ask, self._hear, self._answer):
                    threading.Thread(target=work, args=(down, up, late), daemon=True).start()

    def _ask(self, down: socket.socket, up: socket.socket, _: object) -> None:
        with contextlib.suppress(OSError):
            while data := down.recv(1 << 16):
                up.sendall(data)
        _end(up)

    def _hear(
        self, _: socket.socket, up: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := up.recv(1 << 16):
                late.put((time.monotonic() + self.delay_s, data))
        late.put((time.monotonic(), b""))

    def _answer(
        self, down: socket.socket, up: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        with contextlib.suppress(OSError):
            while (due := late.get())[1]:
                time.sleep(max(0.0, due[0] - time.monotonic()))
                down.sendall(due[1])
        for one in (down, up):
            _end(one)
            one.close()
        self._open -= {down, up}


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def slow_proxy(port: int) -> Iterator[SlowProxy]:
    proxy = SlowProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
