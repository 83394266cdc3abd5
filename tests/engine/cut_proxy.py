"""A TCP proxy before an engine that cuts the connection amid streamed answers."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

_ID = re.compile(rb"^x-request-id: *([^\r]+)\r", re.MULTILINE | re.IGNORECASE)
_EVENT = b"data: "


class Cuts:
    """When streams are cut, shared by the proxies of all engines: the legs of one request behind
    the bytes that `plan` has for it.

    cut: how many legs of each request were cut.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cut: Counter[str] = Counter()
        self.plan: dict[str, Sequence[tuple[int, int]]] = {}

    def next(self, request: str) -> tuple[int, int] | None:
        """Of the request's next leg: after how many events it is cut, and how many bytes of the
        next one go along."""
        with self._lock:
            plan = self.plan.get(request, ())
            return plan[self.cut[request]] if self.cut[request] < len(plan) else None

    def was_cut(self, request: str) -> None:
        with self._lock:
            self.cut[request] += 1


class CuttingProxy:
    """Passes bytes on, and counts the events in the answers."""

    def __init__(self, url: str, cuts: Cuts) -> None:
        place = urlsplit(url)
        self._to, self._cuts = (place.hostname or "", place.port or 0), cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            _end(sock)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                down, _ = self._listener.accept()
                up = socket.create_connection(self._to)
                self._sockets += [down, up]
                asked: list[str] = []
                for pump in (self._ask, self._answer):
                    self._threads.append(threading.Thread(target=pump, args=(down, up, asked)))
                    self._threads[-1].start()

    def _ask(self, down: socket.socket, up: socket.socket, asked: list[str]) -> None:
        with contextlib.suppress(OSError):
            while data := down.recv(65536):
                asked.extend(one.decode() for one in _ID.findall(data))
                up.sendall(data)
        _end(up)

    def _answer(self, down: socket.socket, up: socket.socket, asked: list[str]) -> None:
        request, events = "", 0
        with contextlib.suppress(OSError):
            while data := up.recv(65536):
                if asked and asked[-1] != request:
                    request, events = asked[-1], 0
                at = self._cuts.next(request)
                cut = None if at is None else _place(data, at[0] - events, at[1])
                if cut is not None:
                    down.sendall(data[:cut])
                    self._cuts.was_cut(request)
                    break
                events += data.count(_EVENT)
                down.sendall(data)
        _end(down)
        _end(up)


def _place(data: bytes, events: int, more: int) -> int | None:
    """Behind so many events and bytes of the next, if it begins in this data."""
    at = -1
    for _ in range(events + 1):
        at = data.find(_EVENT, at + 1)
        if at < 0:
            return None
    return at + more


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cut_streams(urls: Sequence[str]) -> Iterator[tuple[list[CuttingProxy], Cuts]]:
    """Proxies before these, and when they cut."""
    cuts = Cuts()
    proxies = [CuttingProxy(url, cuts) for url in urls]
    try:
        yield proxies, cuts
    finally:
        for proxy in proxies:
            proxy.close()
