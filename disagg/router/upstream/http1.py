"""An HTTP/1.1 client for the two legs: a POST to an engine, and its answer as a stream of chunks.

Both legs of every request use it. A general client would take a third of the router's time per
request. So this one only does POST, keeps connections, uses llhttp's parser, and does no work per
chunk but to pass it on. It never follows a redirect, decompresses a body, or retries a request.

A connection is reused only if its answer was complete and no byte followed. Else such bytes would
be taken for the answer to another client.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

import httptools

from disagg import keepalive
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream.loop_yield import LoopYield
from disagg.router.upstream.response import ROUND_S, Rounds, UpstreamResponse

# vLLM closes a connection that was idle for 5 s.
_IDLE_S = 4.0
_MOST_HEAD_BYTES = 64 << 10
_MOST_HEADS = 1024
_LENGTHS = frozenset([b"content-length", b"transfer-encoding"])
RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]


class EngineLost(ConnectionError):
    """The engine cannot be reached, or its answer broke off, or is not HTTP."""


class NotConnected(EngineLost):
    """There is no connection to the engine, so nothing was sent."""


class _Pool(list["_Connection"]):
    """Idle connections to one engine."""

    is_closed = False


class _Connection(asyncio.Protocol):
    """A connection, for one request at a time. It enters `pool` when it may be reused. `on_data` is
    called for each chunk."""

    def __init__(self, pool: _Pool, rounds: Rounds, on_data: Callable[[], None] | None) -> None:
        self._pool, self._rounds, self._on_data = pool, rounds, on_data
        self._head: asyncio.Future[UpstreamResponse] | None = None
        self._answer: UpstreamResponse | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._has_length = self._is_answered = False
        self._ends_with_connection = self._is_paused = self._is_lost = False
        self._head_until = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()

    def ask(self, request: bytes, limit_s: float) -> asyncio.Future[UpstreamResponse]:
        """Send a request. The future gets the answer once its head has arrived, else an error:
        `TimeoutError` or `EngineLost`."""
        # A new parser for each answer, so that no state of the last one is left.
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._head_bytes, self._answer = [], 0, None
        self._has_length = self._ends_with_connection = False
        self._head = self._loop.create_future()
        self._head_until = self._loop.time() + limit_s
        if self._timer is None or self._timer.when() > self._head_until:
            self._look_again()
        self._transport.write(request)
        return self._head

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent on it."""
        return not self._is_lost and self._loop.time() - self.idle_since < _IDLE_S

    def read_on(self) -> None:
        """Resume reading: the answer's buffer is empty again."""
        if self._is_paused and not self._is_lost:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection at once, even in mid-answer."""
        self._is_lost = True
        self._stop_looking()
        self._transport.abort()

    # ---- the time limit --------------------------------------------------------------------

    def _look(self) -> None:
        """Whether the head is late. One timer for many requests: one for each costs more than a
        look at the clock."""
        self._timer = None
        if self._loop.time() >= self._head_until:
            self._fail(TimeoutError())
        elif self._head_until < math.inf:
            self._look_again()

    def _look_again(self) -> None:
        self._stop_looking()
        self._timer = self._loop.call_at(self._head_until, self._look)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- called by asyncio -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        keepalive.watch(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._on_data is not None:
            self._on_data()
        if self._head is None:
            self.abort()  # no request is under way
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(EngineLost(f"the answer is not HTTP: {error}"))
        if self._is_answered:  # not before: bytes after the end of the answer may have followed
            self._is_answered = False
            self._return_to_pool()
        if self._answer is None and self._head is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._fail(EngineLost(f"the answer's head has more than {_MOST_HEAD_BYTES} bytes"))

    def eof_received(self) -> bool:
        return False  # closes the connection; `connection_lost` follows

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._stop_looking()
        if self in self._pool:
            self._pool.remove(self)
        if self._answer is not None and self._ends_with_connection and error is None:
            self._answer.end()
            self._head = self._answer = None
        else:
            self._fail(EngineLost(f"the connection was lost ({error or 'closed'})"))

    # ---- called by the parser --------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._head is None:
            raise httptools.HttpParserError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length = self._has_length or name in _LENGTHS
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers, self._has_length = [], False  # an interim answer; the final one follows
            return
        self._ends_with_connection = not self._has_length and status not in (204, 304)
        self._head_until = math.inf
        self._answer = UpstreamResponse(self, status, self._headers, self._rounds, self._loop.time)
        if self._head is not None and not self._head.done():
            self._head.set_result(self._answer)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None and self._answer.feed(body) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None:
            return  # an interim answer
        keep = self._parser.should_keep_alive() and not self._ends_with_connection
        self._head = self._answer = None
        answer.end()
        if keep:
            self._is_answered = True
        else:
            self._is_lost = True
            self._transport.close()

    def _return_to_pool(self) -> None:
        if self._pool.is_closed:
            self.abort()
        elif not self._is_lost:
            self.read_on()
            self.idle_since = self._loop.time()
            self._pool.append(self)

    def _fail(self, error: Exception) -> None:
        self._head_until = math.inf
        head, answer = self._head, self._answer
        self._head = self._answer = None
        if not self._is_lost:
            self.abort()
        if answer is not None:
            answer.set_exception(error)
        elif head is not None and not head.done():
            head.set_exception(error)


def fields(headers: RawHeaders) -> bytes:
    """A request's header fields, encoded. Raises ValueError for a line break in a field."""
    sent = b"".join([b"%b: %b\r\n" % header for header in headers])
    if sent.count(b"\n") != len(headers) or sent.count(b"\r") != len(headers):
        raise ValueError("a header has a line break")
    return sent


class Client:
    """A client that keeps its connections to engines.

    `connect_s`: time limit to connect. `key`: the API key for engines. `round_s`: the length of
    `Rounds`; with 0 each chunk can be read when it arrives. `loop_yield`: for a process that shares
    its core with other router processes. `tls`: for engines with https; None trusts the system's
    authorities.
    """

    def __init__(
        self,
        connect_s: float,
        key: str | None = None,
        *,
        round_s: float = ROUND_S,
        loop_yield: LoopYield | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_s = connect_s
        self._key = fields([(b"authorization", b"Bearer " + key.encode())] if key else [])
        self._idle: dict[str, _Pool] = {}
        self._heads: dict[tuple[str, str | None, str], tuple[bytes, bytes]] = {}
        self._tls = tls
        self._rounds = Rounds(round_s)
        self._on_data = loop_yield.data_arrived if loop_yield else None

    async def post(
        self, engine: EngineEndpoint, path: str, data: bytes, header: bytes, limit_s: float
    ) -> UpstreamResponse:
        """POST to an engine. Returns once the answer's head has arrived. Raises `EngineLost`, and
        `TimeoutError` if the head does not arrive within `limit_s` of sending the request.

        `path`: without white space. `header`: from `fields`, without host and content-length.
        """
        known = self._heads.get((engine.url, engine.authorization, path))
        head, key = known or self._new_head(engine, path)
        length = b"content-length: %d\r\n" % len(data)
        request = b"".join((head, length, header, key, b"\r\n", data))
        url = engine.url
        connection = self._idle_connection(url) or await self._connect(url)
        try:
            return await connection.ask(request, limit_s)
        except asyncio.CancelledError:
            connection.abort()
            raise

    def close(self) -> None:
        """Close all idle connections. The others close with their answers."""
        for kept in self._idle.values():
            for connection in [*kept]:
                connection.abort()
            kept.clear()
            kept.is_closed = True

    def _new_head(self, engine: EngineEndpoint, path: str) -> tuple[bytes, bytes]:
        """What every request for this path begins with, and the field with the key."""
        parts = urlsplit(engine.url)
        head = f"POST {parts.path}{path} HTTP/1.1\r\nhost: {parts.netloc}\r\n".encode()
        own = [(name.encode(), value.encode()) for name, value in engine.headers.items()]
        known = head, fields(own) or self._key
        if len(self._heads) < _MOST_HEADS:
            self._heads[engine.url, engine.authorization, path] = known
        return known

    def _idle_connection(self, url: str) -> _Connection | None:
        kept = self._idle.get(url)
        while kept:
            connection = kept.pop()
            if connection.is_usable:
                self._drop_expired(kept)
                return connection
            connection.abort()
        return None

    @staticmethod
    def _drop_expired(kept: list[_Connection]) -> None:
        """Close the connections that were idle for too long; the oldest is the first."""
        while kept and not kept[0].is_usable:
            kept.pop(0).abort()

    async def _connect(self, url: str) -> _Connection:
        parts, pool = urlsplit(url), self._idle.setdefault(url, _Pool())
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        options: dict[str, Any] = {"ssl": self._tls} if secure else {}
        port = parts.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(pool, self._rounds, self._on_data), host, port, **options
                )
        except TimeoutError as error:
            raise NotConnected(f"no connection in {self._connect_s:g} s") from error
        except OSError as error:
            raise NotConnected(f"no connection: {error.strerror or error}") from error
        return connection
