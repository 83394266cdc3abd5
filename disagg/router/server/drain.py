"""Drains the router: requests in flight may finish, new ones are refused.

A request is in flight from its first byte to the last byte of its answer. The paths about the
router itself (/health, /ready, /metrics, the drain) are not counted, and must always be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.router.api import paths
from disagg.router.api.errors import CUT, ApiError

logger = logging.getLogger(__name__)

PATH = "/disagg/drain"
_ALWAYS_ANSWERED = {"/health", "/metrics", PATH}
_REFUSAL_HEADERS = {"Connection": "close", "Retry-After": "1"}


class Drain:
    """Whether one app takes new requests, and which requests are in flight.

    `ending`: the process is going to exit, so the drain cannot be undone.
    """

    def __init__(self) -> None:
        self.draining = False
        self.ending = False
        self._running: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._cutting = False

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return len(self._running)

    def begin(self) -> None:
        """Refuse new requests."""
        self.draining = True

    def undo(self) -> None:
        """Take requests again, unless the process is ending."""
        self.draining = self.ending

    async def finish(self, deadline: float) -> None:
        """Drain for good: wait until no request is in flight, at most until `deadline` (monotonic),
        then cut the rest."""
        self.draining = self.ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._idle.wait()
        if self._running:
            logger.warning("cut %d requests that did not finish in time", len(self._running))
            self._cutting = True
            for task in self._running:
                task.cancel(CUT)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with `app`, and count it as in flight."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._idle.clear()
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._cutting:
                raise
            # If the answer has begun, this fails: then the connection closes in mid-body.
            with contextlib.suppress(RuntimeError):
                refusal = _refusal("the router stopped before it answered this request")
                await refusal.response(paths.style(scope["path"]))(scope, receive, send)
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()


class DrainMiddleware:
    """ASGI middleware: counts the requests in flight, and refuses new ones during a drain."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app, self._drain = app, drain

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["path"] in _ALWAYS_ANSWERED:
            return self._app(scope, receive, send)
        if scope["path"] == "/ready":
            app = _not_ready if self._drain.draining else self._app
            return app(scope, receive, send)
        if self._drain.draining:
            refusal = _refusal("the router takes no new requests")
            return refusal.response(paths.style(scope["path"]))(scope, receive, send)
        return self._drain.serve(self._app, scope, receive, send)


def _refusal(message: str) -> ApiError:
    return ApiError(503, message, _REFUSAL_HEADERS)


async def _not_ready(scope: Scope, receive: Receive, send: Send) -> None:
    content = {"ready": False, "draining": True}
    await JSONResponse(content, 503)(scope, receive, send)
