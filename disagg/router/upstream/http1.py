"""HTTP/1.1 for the two legs: a POST to an engine, and its answer as it comes.

Both legs of every request go through here, and a general client takes a third of what a request
costs the router. So: POST alone, kept connections, llhttp's parser, and no work per chunk but to
hand it on. It follows no redirect, unpacks nothing, and asks for nothing again by itself.

A connection is used again only if its answer came whole and nothing came after it: what an engine
says more than it was asked would be taken for another client's answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

import httptools

from disagg import keepalive
from disagg.router.upstream.loop_yield import LoopYield
from disagg.router.upstream.response import ROUND_S, Rounds, UpstreamResponse

# vLLM closes a connection that was idle for five seconds.
_IDLE_S = 4.0
_MOST_HEAD_BYTES = 64 << 10
_MOST_HEADS = 1024
_LENGTHS = (b"content-length", b"transfer-encoding")
RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]


class EngineLost(ConnectionError):
    """The engine cannot be reached, or its answer broke off or is no HTTP."""


class _Connection(asyncio.Protocol):
    """One request at a time. `pool` is where it goes when it may be used again."""

    def __init__(
        self, pool: list[_Connection], rounds: Rounds, came: Callable[[], None] | None
    ) -> None:
        self._pool, self._rounds, self._came = pool, rounds, came
        self._head: asyncio.Future[UpstreamResponse] | None = None
        self._answer: UpstreamResponse | None = None
        self._raw: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._ends_with_connection = self._is_paused = self._is_lost = False
        self._timer: asyncio.TimerHandle | None = None
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()

    def ask(self, request: bytes, limit_s: float) -> asyncio.Future[UpstreamResponse]:
        """Send a request; the future has its answer when the head is there, or `TimeoutError`."""
        # A parser of its own for each answer: what one left behind is nothing to the next.
        self._parser = httptools.HttpResponseParser(self)
        self._raw, self._head_bytes, self._answer = [], 0, None
        self._ends_with_connection = False
        self._head = self._loop.create_future()
        # For little: a scope of `asyncio.timeout` costs as much as the rest of this.
        self._timer = self._loop.call_later(limit_s, self._fail, TimeoutError())
        self._transport.write(request)
        return self._head

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent on it."""
        return not self._is_lost and self._loop.time() - self.idle_since < _IDLE_S

    def read_on(self) -> None:
        """What lay unread was read."""
        if self._is_paused and not self._is_lost:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """End it, whatever it is doing."""
        self._is_lost = True
        self._stop_waiting()
        self._transport.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- asyncio's calls -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        keepalive.watch(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._came is not None:
            self._came()
        if self._head is None:
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(EngineLost(f"that is no HTTP: {error}"))
        if self._answer is None and self._head is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._fail(EngineLost("the answer's head has no end"))

    def eof_received(self) -> bool:
        return False  # closes, and `connection_lost` follows

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self in self._pool:
            self._pool.remove(self)
        if self._answer is not None and self._ends_with_connection and error is None:
            self._answer.end()
            self._head = self._answer = None
        else:
            self._fail(EngineLost(f"the connection was lost ({error or 'closed'})"))

    # ---- the parser's calls ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._head is None:
            raise httptools.HttpParserError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._raw.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._raw = []  # an interim answer; the real one follows
            return
        says_length = [name for name, _ in self._raw if name in _LENGTHS]
        self._ends_with_connection = not says_length and status not in (204, 304)
        self._stop_waiting()
        self._answer = UpstreamResponse(self, status, self._raw, self._rounds)
        if self._head is not None and not self._head.done():
            self._head.set_result(self._answer)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None and self._answer.feed(body) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None:
            return  # an interim one
        keep = self._parser.should_keep_alive() and not self._ends_with_connection
        self._head = self._answer = None
        answer.end()
        if keep:
            # Not before all that came with the end was seen to be nothing more.
            self._loop.call_soon(self._rest)
        else:
            self._is_lost = True
            self._transport.close()

    def _rest(self) -> None:
        if not self._is_lost:
            self.read_on()
            self.idle_since = self._loop.time()
            self._pool.append(self)

    def _fail(self, error: Exception) -> None:
        self._stop_waiting()
        head, answer = self._head, self._answer
        self._head = self._answer = None
        if not self._is_lost:
            self.abort()
        if answer is not None:
            answer.set_exception(error)
        elif head is not None and not head.done():
            head.set_exception(error)


def fields(headers: RawHeaders) -> bytes:
    """A request's header fields as they are sent. Raises ValueError for a line break in one."""
    sent = b"".join([b"%b: %b\r\n" % header for header in headers])
    if sent.count(b"\n") != len(headers) or sent.count(b"\r") != len(headers):
        raise ValueError("a header has a line break")
    return sent


class Client:
    """Kept connections to engines, and what every request shows.

    `connect_s`: time to connect. `round_s`: of `Rounds`; 0 for who wants each chunk when it comes.
    `turns`: for a process that shares its core with others of its kind.
    """

    def __init__(
        self,
        connect_s: float,
        key: str | None = None,
        *,
        round_s: float = ROUND_S,
        turns: LoopYield | None = None,
    ) -> None:
        self._connect_s = connect_s
        self._key = fields([(b"authorization", b"Bearer " + key.encode())] if key else [])
        self._idle: dict[str, list[_Connection]] = {}
        self._heads: dict[tuple[str, str], bytes] = {}
        self._tls: ssl.SSLContext | None = None
        self._rounds = Rounds(round_s)
        self._came = turns.came if turns else None

    async def post(
        self, url: str, path: str, data: bytes, header: bytes, limit_s: float
    ) -> UpstreamResponse:
        """POST to an engine; returns when the answer's head is there. Raises `EngineLost`, and
        `TimeoutError` if it is not so long after the request was sent.

        `path`: of one word. `header`: of `fields`, without host and content-length.
        """
        head = self._heads.get((url, path))
        if head is None:
            head = f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n".encode()
            if len(self._heads) < _MOST_HEADS:
                self._heads[url, path] = head
        length = b"content-length: %d\r\n" % len(data)
        request = b"".join((head, length, header, self._key, b"\r\n", data))
        connection = self._kept(url) or await self._connect(url)
        try:
            return await connection.ask(request, limit_s)
        except asyncio.CancelledError:
            connection.abort()
            raise

    def close(self) -> None:
        """End all connections that are idle; the others end with their answers."""
        for kept in self._idle.values():
            for connection in [*kept]:
                connection.abort()
            kept.clear()

    def _kept(self, url: str) -> _Connection | None:
        kept = self._idle.get(url)
        while kept:
            connection = kept.pop()
            if connection.is_usable:
                self._tidy(kept)
                return connection
            connection.abort()
        return None

    @staticmethod
    def _tidy(kept: list[_Connection]) -> None:
        """The oldest first: what was not needed for so long is not needed."""
        while kept and not kept[0].is_usable:
            kept.pop(0).abort()

    async def _connect(self, url: str) -> _Connection:
        parts, pool = urlsplit(url), self._idle.setdefault(url, [])
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        options: dict[str, Any] = {"ssl": self._tls} if secure else {}
        port = parts.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(pool, self._rounds, self._came), host, port, **options
                )
        except TimeoutError as error:
            raise EngineLost(f"no connection in {self._connect_s:g} s") from error
        except OSError as error:
            raise EngineLost(f"no connection: {error.strerror or error}") from error
        return connection
