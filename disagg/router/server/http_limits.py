"""What a client may send before it is a request: how long it may take, and how large its head is.

uvicorn's own HTTP protocol with bounds that it lacks. A client that dribbles its request, sends a
head without end, or leaves its answer unread loses its connection; what is not HTTP is refused as
the OpenAI API refuses. Must never touch a request that has come whole, nor an answer under way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from disagg.config import LimitsSection
from disagg.router.api.errors import ApiError
from disagg.router.server.client_disconnect import CONNECTION

_MAX_HEAD_BYTES = 64 << 10
_MAX_FIELDS = 128


class _TooLarge(Exception):
    """The head is; raised through the parser."""


class _Joining:
    """A client's transport, where an answer's head waits for what is written behind it.

    One packet and one system call instead of two; nobody waits for longer than this turn of the
    event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.is_closing = transport.is_closing  # asked often
        self._head: bytes | None = None
        self.head_comes = False
        """Whether the next write is a head."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head is not None:
            self._transport.write(self._head + data)
            self._head = None
        elif self.head_comes:
            self.head_comes, self._head = False, data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self._transport.write(head)


class HttpLimits(HttpToolsProtocol):
    """One connection of a client. `within` makes the class for one app's limits."""

    limits: LimitsSection
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _in_message = _in_head = False
    _has_begun = _has_ended = False
    _is_refused = False
    _left: Callable[[], None] | None = None
    _unparsed = _head_bytes = _fields = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._joining = _Joining(transport, self.loop)
        self.transport = cast(asyncio.Transport, self._joining)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._read_again()
        super().connection_lost(exc)
        self._say_left()

    def watch(self, left: Callable[[], None] | None) -> None:
        """See `presence.Connection`."""
        self._left = left
        if self.transport.is_closing():
            self._say_left()
        elif left is not None:
            self.flow.resume_reading()  # or nobody would see its end

    def _say_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            left()

    # ---- the request -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_ended = False
        super().data_received(data)
        if self._timer is None and (self._in_message or not self._has_ended):
            self._arm()  # seldom: most requests come whole
        if self._in_head and not self._is_refused:
            # Of a field that has not ended the parser says nothing yet.
            self._unparsed += len(data)
            if self._unparsed > _MAX_HEAD_BYTES:
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CONNECTION] = self
        self._in_message = self._in_head = self._has_begun = True
        self._unparsed = self._head_bytes = self._fields = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count(len(name) + len(value))
        if self._in_head:  # trailers come after the checks that fields have to pass
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._fields > _MAX_FIELDS or self._head_bytes > _MAX_HEAD_BYTES:
            raise _TooLarge

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._joining.head_comes = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message, self._has_ended = False, True
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        is_large = self._fields > _MAX_FIELDS or self._head_bytes > _MAX_HEAD_BYTES
        self._refuse(_too_large() if is_large else ApiError(400, "this is not HTTP/1.1"))

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.limits.receive_timeout_s, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        cycle = self.cycle
        if self.pipeline or not (cycle is None or cycle.more_body or cycle.response_complete):
            self._arm()  # it waits for us, not we for it
        elif not self._has_begun:
            self.transport.close()
        else:
            seconds = self.limits.receive_timeout_s
            self._refuse(ApiError(408, f"the request did not come whole within {seconds:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Answer if that can still be, and close."""
        self._is_refused = True
        cycle = self.cycle
        is_running = cycle is not None and not cycle.response_complete
        # In mid-answer, and after one whose request is still being sent, no answer has its place.
        is_answered = cycle is not None and (
            cycle.response_started if is_running else cycle.more_body and not self._in_head
        )
        if not is_answered:
            self._write(error)
        if is_running:
            cycle.disconnected = True
            cycle.message_event.set()
            self._say_left()
        self.transport.close()

    def _write(self, error: ApiError) -> None:
        body = json.dumps(error.content()).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)

    # ---- the answer ------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_again()

    def _read_again(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def within(limits: LimitsSection) -> type[HttpLimits]:
    """The protocol of an app with these limits, as uvicorn wants it: a class."""
    return type("Intake", (HttpLimits,), {"limits": limits})


def _too_large() -> ApiError:
    return ApiError(
        431, f"the request's head has more than {_MAX_HEAD_BYTES} bytes or {_MAX_FIELDS} fields"
    )
