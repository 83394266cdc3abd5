"""An engine's answer on its way to the client, as it is and as it comes.

Owns the connection to the engine until the answer has ended in whatever way, and never lets an
incomplete answer look like a complete one. A stream that is watched goes on at another engine
when its own breaks off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from disagg.router.api.errors import CUT, ApiError, Style
from disagg.router.api.event_stream import Watcher
from disagg.router.request.decode_leg import Opened
from disagg.router.request.failover import GoesOn, Movable
from disagg.router.request.first_token import Begun
from disagg.router.telemetry.access_log import ID_HEADER
from disagg.router.upstream import client as upstream

logger = logging.getLogger(__name__)
# The router says the id itself. Of a stream it says no length: an error event must fit behind.
_NOT_PASSED_ON = upstream.NOT_DOWNSTREAM | {ID_HEADER.encode()}
_NOT_OF_EVENTS = _NOT_PASSED_ON | {b"content-length"}


@dataclass
class Progress:
    """What `Relayed` tells about an answer: the first bytes, and how many chunks there were."""

    first_byte: Callable[[], None]
    ended: Callable[[int], None]


class Relayed:
    """Sends one answer, as an ASGI app.

    `watcher` sees what is sent; if it is a `Stream` or a `Replay`, `go_on` opens the rest at
    another engine, or answers None if that is not to be. `style`: of errors in mid-stream.
    """

    def __init__(
        self,
        opened: Opened | Begun,
        request_id: str,
        silence_s: float,
        progress: Progress,
        watcher: Watcher | None = None,
        go_on: GoesOn | None = None,
        *,
        style: Style = "openai",
    ) -> None:
        self.status_code = opened.status
        self._opened, self._silence_s, self._progress = opened, silence_s, progress
        self._id = (ID_HEADER.encode(), request_id.encode())
        self._watcher, self._go_on, self._style = watcher, go_on, style

    def discard(self) -> None:
        """Nobody gets this answer: close it unread."""
        self._opened.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay to the end; sends an error event, or cuts the connection, if that is not to be."""
        opened = self._opened
        if isinstance(opened, Opened) and self._watcher is None and opened.answer.content.at_eof():
            await self._send_whole(opened, send)
        else:
            await self._send_as_it_comes(send)

    async def _send_whole(self, opened: Opened, send: Send) -> None:
        """The answer has come in one piece, so nothing can go wrong with it any more."""
        try:
            await send(self._start())
            self._progress.first_byte()
        finally:
            opened.close()
            self._progress.ended(0)
        await send({"type": "http.response.body", "body": opened.first, "more_body": False})

    async def _send_as_it_comes(self, send: Send) -> None:
        last, chunks = b"", 0

        async def pass_on(data: bytes) -> None:
            nonlocal chunks
            chunks += 1
            if chunks == 1:
                self._opened.seat.answers()
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await send(self._start())
            if not isinstance(self._opened, Begun):
                self._progress.first_byte()
            last = await self._relay(pass_on)
            chunks += bool(chunks and last)
        except ApiError as error:
            logger.warning("the answer of %s broke off: %s", self._opened.engine.name, error)
            if not self._opened.is_events:
                return  # the server cuts the connection, which is what an incomplete body means
            last = error.event(self._style)
        except asyncio.CancelledError as error:
            if error.args != (CUT,) or not self._opened.is_events:
                raise
            last = ApiError(503, CUT).event(self._style)
        finally:
            self._opened.close()
            self._progress.ended(chunks)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _start(self) -> Message:
        left_out = _NOT_OF_EVENTS if self._opened.is_events else _NOT_PASSED_ON
        headers = upstream.to_client(self._opened.raw_headers, left_out)
        headers.append(self._id)
        return {"type": "http.response.start", "status": self.status_code, "headers": headers}

    async def _relay(self, pass_on: Callable[[bytes], Awaitable[None]]) -> bytes:
        """Returns what is left to send at the end."""
        watcher, opened = self._watcher, self._opened
        if isinstance(opened, Begun):
            self._opened = opened = await self._begin(opened, pass_on)
        if watcher is None:
            return await self._pass_on_all(opened, pass_on)
        while True:
            last = b""
            try:
                last = await self._pass_on_all(opened, pass_on)
                if not watcher.is_whole:
                    if last:
                        await pass_on(last)  # whoever goes on begins behind it
                    raise watcher.failure or ApiError(502, "the answer ended too early")
            except ApiError as error:
                if not watcher.is_whole:
                    other = await self._goes_on(opened, error)
                    if other is None:
                        raise
                    self._opened = opened = other
            if watcher.is_whole:
                return last + watcher.left()

    async def _begin(self, begun: Begun, pass_on: Callable[[bytes], Awaitable[None]]) -> Opened:
        assert self._watcher is not None
        first = self._watcher.feed(begun.first)  # decode's leg follows what was fed

        async def pass_first() -> None:
            self._progress.first_byte()
            await pass_on(first)

        return await begun.go_on(pass_first)

    async def _pass_on_all(
        self, opened: Opened, pass_on: Callable[[bytes], Awaitable[None]]
    ) -> bytes:
        """Returns what came with the end, which is sent with it too."""
        watcher, chunk = self._watcher, opened.first
        while chunk:
            data = chunk if watcher is None else watcher.feed(chunk)
            failure = None if watcher is None else watcher.failure
            if failure is None and opened.answer.content.at_eof():
                return data if watcher is None else data + watcher.finish()
            if data:
                await pass_on(data)
            if failure is not None:
                raise failure
            chunk = await opened.chunk(self._silence_s)
        return b"" if watcher is None else watcher.finish()

    async def _goes_on(self, broken: Opened, error: ApiError) -> Opened | None:
        """What is missing, of another engine, if there is one that adds it."""
        stream = self._watcher
        if self._go_on is None or not isinstance(stream, Movable):
            return None
        broken.close()
        logger.warning("the answer of %s broke off: %s", broken.engine.name, error)
        return await self._go_on(stream, broken)
