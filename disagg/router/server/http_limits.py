"""Limits on clients' connections: the time to send a request, the size of its head, the size of all
bodies together, and the file descriptors.

It is uvicorn's HTTP protocol with limits that uvicorn lacks. A client that sends its request too
slowly, sends too large a head, or does not read its answer, loses its connection. So does one whose
body would exceed the bytes that all connections may hold. Malformed HTTP gets an error in the
OpenAI API's format. It must never touch a request that arrived completely, nor an answer in
progress that the client reads.

It also knows what a request says about its connection: the client behind a trusted proxy
(`proxies.py`), and the page in a browser that sent it (`cors.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from disagg.config import LimitsSection
from disagg.router.api.errors import ApiError
from disagg.router.server import admin_socket
from disagg.router.server.api_keys import PEER, SocketPeer
from disagg.router.server.client_disconnect import CONNECTION
from disagg.router.server.cors import Cors, Fields
from disagg.router.server.cycle import Cycle
from disagg.router.server.file_descriptors import FileDescriptors, no_descriptors
from disagg.router.server.head_buffering import HeadBufferingTransport
from disagg.router.server.proxies import TrustedProxies
from disagg.router.server.upgrade_offers import parser_of_body
from disagg.safe_logging import LimitedWarnings

_MAX_HEAD_BYTES = 64 << 10
_MAX_FIELDS = 128
_SMALL_BODY = 64 << 10  # bytes of one connection that are never refused
_LINGER_S = 5.0  # in which a client that is still sending may read its refusal
_NO_ROOM_S = 1.0  # in which a client for which there is no room may send its request


logger = logging.getLogger("uvicorn.error.connections")  # uvicorn's handler writes its lines
logger.setLevel(logging.WARNING)
logger.addFilter(LimitedWarnings())  # any stranger can provoke one with each connection


class _TooLarge(Exception):
    """The request's head is too large. Raised through the parser."""


class HeldBodies:
    """The bytes of bodies that all connections hold, and their limit.

    A body counts from its first byte. One of up to 64 KiB counts until it has arrived: the router
    limits the number of running requests. A larger one counts until its request has ended, since
    the router keeps it until then.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0


class HttpLimits(HttpToolsProtocol):
    """One connection of a client. `protocol_with` makes the class for an app's limits."""

    limits: LimitsSection
    bodies: HeldBodies
    descriptors: FileDescriptors
    cors: Cors | None
    proxies: TrustedProxies | None
    refusal: ApiError | None = None
    """See `client_disconnect.Connection`."""
    _peer: SocketPeer | None = None
    _held = 0
    _timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _idle_until = math.inf
    _unread_timer: asyncio.TimerHandle | None = None
    _in_message = _in_head = False
    _has_begun = _has_ended = False
    _is_refused = _has_offer = _is_proxied = False
    _has_room = True
    _on_close: Callable[[], None] | None = None
    _unparsed = _head_bytes = _fields = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger = logger
        self._buffering = HeadBufferingTransport(transport, self.loop)
        self.transport = cast(asyncio.Transport, self._buffering)
        if self.proxies is not None and self.client is not None:
            self._is_proxied = self.proxies.trusts(self.client[0])
        sock = transport.get_extra_info("socket")
        is_operators = sock.family == socket.AF_UNIX
        self._has_room = self.descriptors.take_connection() or is_operators
        if self._has_room:
            self._becomes_idle()
        elif self.descriptors.is_exhausted():
            self._refuse(no_descriptors())
        else:
            self.loop.call_later(_NO_ROOM_S, self.transport.close)
        if is_operators:
            self._peer = admin_socket.peer_of(sock)
            if not admin_socket.may_operate(self._peer):
                self._is_refused = True
                transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_unread_timer()
        self._is_busy()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self.descriptors.connection_closed()
        super().connection_lost(exc)
        self._give_back()
        self._notify_closed()

    def watch(self, on_close: Callable[[], None] | None) -> None:
        """See `client_disconnect.Connection`."""
        self._on_close = on_close
        if self.transport.is_closing():
            self._notify_closed()
        elif on_close is not None:
            self.flow.resume_reading()  # a paused transport does not notice that the client left

    def give_way(self) -> None:
        """See `file_descriptors.IdleConnection`."""
        self.transport.close()

    def _becomes_idle(self) -> None:
        self.descriptors.idle[self] = None
        self._idle_until = self.loop.time() + self.limits.keep_alive_s
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_at(self._idle_until, self._look_if_idle)

    def _is_busy(self) -> None:
        self.descriptors.idle.pop(self, None)
        self._idle_until = math.inf

    def _look_if_idle(self) -> None:
        """One timer for many requests: one for each costs more than a look at the clock."""
        self._idle_timer = None
        if self.loop.time() >= self._idle_until:
            self.timeout_keep_alive_handler()
        elif self._idle_until < math.inf:
            self._idle_timer = self.loop.call_at(self._idle_until, self._look_if_idle)

    def _notify_closed(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    # ---- the request -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_ended = False
        self._is_busy()
        self._parse(data)
        if not (self._has_room or self._in_head or self._is_refused):
            self._refuse(no_descriptors(), linger=self._in_message)
        if self._timer is None and (self._in_message or not self._has_ended):
            self._arm()  # rare: most requests arrive in one piece
        if self._in_head and not self._is_refused:
            # The parser does not report a field before its end.
            self._unparsed = 0 if self._unparsed < 0 else self._unparsed + len(data)
            if self._unparsed > _MAX_HEAD_BYTES:
                self._refuse(_too_large())

    def _parse(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        try:
            while True:
                try:
                    return self.parser.feed_data(rest)
                except httptools.HttpParserUpgrade as offer:
                    rest = memoryview(rest)[offer.args[0] :]
                    self._has_offer = False
                    version = self.scope["http_version"]
                    self.parser = parser_of_body(self, version, self.headers)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CONNECTION] = self
        if self._peer is not None:
            self.scope["state"][PEER] = self._peer
        self._in_message = self._in_head = self._has_begun = True
        self._unparsed = -1  # earlier requests may be in the same read
        self._head_bytes = self._fields = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)
        if self._head_bytes > _MAX_HEAD_BYTES:
            raise _TooLarge

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._head_bytes += len(name) + len(value)
        if self._fields > _MAX_FIELDS or self._head_bytes > _MAX_HEAD_BYTES:
            raise _TooLarge
        if not self._in_head:
            return  # a trailer: it arrives after the checks of the header fields
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._is_refused or not self._has_room:
            return
        self._buffering.next_is_head = True
        self._has_offer = self.parser.should_upgrade()
        if self._has_offer and self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("the router is no proxy")
        if self._is_proxied:
            self._believe_proxy()
        self._read_first_line()
        self._begin_cycle()

    def _read_first_line(self) -> None:
        scope, url = self.scope, httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = self.parser.get_http_version()
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""

    def _begin_cycle(self) -> None:
        """Serve the request, behind those that came before it on this connection."""
        before = self.cycle
        self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self._default_headers(),
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=self.scope["http_version"] != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _believe_proxy(self) -> None:
        assert self.proxies is not None
        address, scheme = self.proxies.client(self.headers)
        if address is not None:
            self.scope["client"] = (address, 0)
        if scheme is not None:
            self.scope["scheme"] = scheme

    def _default_headers(self) -> Fields:
        if self.cors is None:
            return self.server_state.default_headers
        return self.cors.fields(self.headers)

    def on_body(self, body: bytes) -> None:
        if self._is_refused or not self._has_room:  # the parser reports the rest of what it got
            return
        super().on_body(body)
        if self.cycle.response_complete:
            return  # uvicorn drops it
        self._held += len(body)
        self.bodies.bytes += len(body)
        if self._held > _SMALL_BODY and self.bodies.bytes > self.bodies.limit:
            self.cycle.body = bytearray()
            self._give_back()
            self._refuse(_too_many_bytes(), linger=True)

    def on_message_complete(self) -> None:
        if self._has_offer or self._is_refused:
            return  # with an offer, the parser ends at the head, not at the message's end
        self._in_message, self._has_ended = False, True
        self._disarm()
        if not self._has_room:
            return
        if self._held <= _SMALL_BODY:
            self._give_back()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._give_back()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._in_message:
            self._becomes_idle()

    def _give_back(self) -> None:
        self.bodies.bytes -= self._held
        self._held = 0

    def send_400_response(self, msg: str) -> None:
        is_large = self._fields > _MAX_FIELDS or self._head_bytes > _MAX_HEAD_BYTES
        self._refuse(_too_large() if is_large else ApiError(400, "this is not HTTP/1.1"))

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.limits.receive_timeout_s, self._receive_timed_out)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _receive_timed_out(self) -> None:
        cycle = self.cycle
        if self.pipeline or not (cycle is None or cycle.more_body or cycle.response_complete):
            self._arm()  # the client waits for the answer
        elif not self._has_begun:
            self.transport.close()
        else:
            limit_s = self.limits.receive_timeout_s
            self._refuse(ApiError(408, f"the whole request did not arrive within {limit_s:g} s"))

    def _refuse(self, error: ApiError, *, linger: bool = False) -> None:
        """Answer with the error, if no answer has begun, and close the connection.

        `linger`: drop the bytes that still arrive for some seconds. If the connection closed at
        once, the client's kernel would discard the answer.
        """
        self._is_refused, self.refusal = True, error
        cycle = self.cycle
        is_running = cycle is not None and not cycle.response_complete
        # No error may follow part of an answer, or an answer whose request is still arriving.
        is_answered = cycle is not None and (
            cycle.response_started if is_running else cycle.more_body and not self._in_head
        )
        if not is_answered:
            self._write(error)
        if is_running:
            cycle.disconnected = True
            cycle.message_event.set()
            self._notify_closed()
        if linger and not is_answered:
            self._disarm()
            self.flow.resume_reading()
            self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _write(self, error: ApiError) -> None:
        body = json.dumps(error.content()).encode()
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **(error.headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode()
        if self.cors is not None:
            sent: Sequence[tuple[bytes, bytes]] = self.headers or ()  # none before the first head
            head += b"".join(b"%b: %b\r\n" % field for field in self.cors.fields(sent))
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)

    # ---- the answer ------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        limit_s = self.limits.unread_timeout_s
        self._unread_timer = self.loop.call_later(limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def protocol_with(
    limits: LimitsSection,
    descriptors: FileDescriptors,
    cors: Cors | None = None,
    proxies: TrustedProxies | None = None,
) -> type[HttpLimits]:
    """The protocol class with these limits, as uvicorn takes it."""
    shared = {
        "limits": limits,
        "bodies": HeldBodies(limits.max_receiving_bytes),
        "descriptors": descriptors,
        "cors": cors,
        "proxies": proxies,
    }
    return type("LimitedHttp", (HttpLimits,), shared)


def _too_many_bytes() -> ApiError:
    return ApiError(
        503,
        "the router holds as many bytes of requests as it may (router.limits.max_receiving_bytes)",
        {"Retry-After": "1"},
    )


def _too_large() -> ApiError:
    return ApiError(
        431, f"the request's head has more than {_MAX_HEAD_BYTES} bytes or {_MAX_FIELDS} fields"
    )
