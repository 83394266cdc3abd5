"""Comments in streams that are silent for long, so that load balancers keep their connections.

A stream may wait in the queue, for prefill, or for decode. If no answer has come after the
interval, the client gets status 200 and a comment; an error that follows becomes an event. Without
the setting (`router.stream_keep_alive_s`) nothing here runs. An answer that is no stream must never
get a comment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from disagg.router.api.errors import CUT, ApiError, EngineRefusal, Style
from disagg.router.request.relay import Relayed
from disagg.router.telemetry.access_log import ID_HEADER

COMMENT = b": keep-alive\n\n"  # vLLM's own
_EVENTS = b"text/event-stream"
_LONGEST_REFUSAL = 64 << 10
Answer: TypeAlias = Response | Relayed
Work: TypeAlias = Coroutine[Any, Any, Answer]


async def kept_alive(
    work: Work, interval_s: float, request_id: str, style: Style
) -> Answer | KeptAlive:
    """The answer of `work`, which gets a comment after each `interval_s` of silence. Returns after
    that time at the latest. Raises what `work` raises within it. `style`: of errors after it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=interval_s)
        if task.done() and isinstance(answer := task.result(), Response):
            return answer
    except asyncio.CancelledError:
        _give_up(task)
        raise
    return KeptAlive(task, interval_s, request_id, style)


class KeptAlive:
    """A stream, as an ASGI app. `task` has its answer, or will."""

    def __init__(
        self, task: asyncio.Task[Answer], interval_s: float, request_id: str, style: Style
    ) -> None:
        self._task, self._interval_s, self._style = task, interval_s, style
        self._id = (ID_HEADER.encode(), request_id.encode())
        self.status_code = task.result().status_code if task.done() else 200
        self._has_begun = self._is_taken = False
        self._refusal: tuple[int, bytearray] | None = None
        """The status and the body of an answer that is no stream, though the client has begun to
        get one."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, and comments while it is silent."""
        self._send = send
        try:
            if not self._task.done():
                await self._begin()
                await asyncio.wait([self._task])
            answer = self._task.result()
            self._is_taken = True
            await answer(scope, receive, self._pass)
            if self._refusal is None:
                return
            status, content = self._refusal
            error = EngineRefusal.of(status if status >= 400 else 502, bytes(content))
        except ApiError as failure:
            error = failure
        except asyncio.CancelledError as cancelled:
            if self._is_taken:
                raise
            _give_up(self._task)
            if cancelled.args != (CUT,):
                raise
            error = ApiError(503, CUT)
        finally:
            self._stop()
        body = error.event(self._style)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self) -> None:
        headers = [(b"content-type", _EVENTS + b"; charset=utf-8"), self._id]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        self._has_begun = True
        self._watch()

    async def _pass(self, message: Message) -> None:
        """Send a message of the answer. Its start is left out if the client has one."""
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message["headers"]}
            is_plain = b"content-encoding" not in headers
            kind = headers.get(b"content-type", b"")
            is_stream = message["status"] == 200 and kind.startswith(_EVENTS) and is_plain
            if self._has_begun:
                if not is_stream:
                    self._refusal = message["status"], bytearray()
                return
            await self._send(message)
            if is_stream:
                self._watch()
        elif self._refusal is not None:
            if len(self._refusal[1]) < _LONGEST_REFUSAL:
                self._refusal[1].extend(message.get("body", b""))
        else:
            if not message.get("more_body"):
                self._stop()  # nothing may follow
            await self._send(message)
            self._sent_at = self._loop.time()

    # ---- comments ------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(self._interval_s, self._look)

    def _look(self) -> None:
        """One timer for a stream: one for each chunk would cost more than the chunk."""
        now = self._loop.time()
        if now >= self._sent_at + self._interval_s:
            self._sent_at = now
            if self._comment is None or self._comment.done():
                self._comment = asyncio.create_task(self._send_comment())
        self._timer = self._loop.call_at(self._sent_at + self._interval_s, self._look)

    async def _send_comment(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the client has gone
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comment is not None:
            self._comment.cancel()


def _give_up(task: asyncio.Task[Answer]) -> None:
    """Nobody wants the answer any more."""
    task.cancel()
    task.add_done_callback(_discard)


def _discard(task: asyncio.Task[Answer]) -> None:
    """Of an answer that came when nobody wanted it any more."""
    if not task.cancelled() and task.exception() is None:
        answer = task.result()
        if isinstance(answer, Relayed):
            answer.discard()
