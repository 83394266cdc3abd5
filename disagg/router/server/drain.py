"""A router on its way out: what runs may finish, nothing new comes in.

Counts each request from its first byte to its answer's last. What tells about the router
(health, readiness, metrics, the drain itself) is not counted and always answered.
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
_OPEN = {"/health", "/metrics", PATH}
_CLOSE = {"Connection": "close", "Retry-After": "1"}


class Drain:
    """Whether one app takes new requests, and which it is serving.

    `ending` is set when the drain was asked for as the end of the process: nothing takes that
    back.
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
        """Requests that are being served."""
        return len(self._running)

    def begin(self) -> None:
        """From now on new requests are refused."""
        self.draining = True

    def undo(self) -> None:
        """Take requests again, unless the process is ending."""
        self.draining = self.ending

    async def finish(self, deadline: float) -> None:
        """End for good: wait until all is served, at the latest until `deadline` (monotonic), and
        cut what is left."""
        self.draining = self.ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._idle.wait()
        if self._running:
            logger.warning("cut %d requests that did not end in time", len(self._running))
            self._cutting = True
            for task in self._running:
                task.cancel(CUT)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one counted request with `app`."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._idle.clear()
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._cutting:
                raise
            # Whose answer has begun sees its connection close, which is what a half body means.
            with contextlib.suppress(RuntimeError):
                refusal = _refusal("the router ended before this request")
                await refusal.response(paths.style(scope["path"]))(scope, receive, send)
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()


class WhileOpen:
    """ASGI middleware: lets requests through to the app, and counts them, until it drains."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app, self._drain = app, drain

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["path"] in _OPEN:
            return self._app(scope, receive, send)
        if scope["path"] == "/ready":
            app = _not_ready if self._drain.draining else self._app
            return app(scope, receive, send)
        if self._drain.draining:
            refusal = _refusal("the router takes no new requests")
            return refusal.response(paths.style(scope["path"]))(scope, receive, send)
        return self._drain.serve(self._app, scope, receive, send)


def _refusal(message: str) -> ApiError:
    return ApiError(503, message, _CLOSE)


async def _not_ready(scope: Scope, receive: Receive, send: Send) -> None:
    content = {"ready": False, "draining": True}
    await JSONResponse(content, 503)(scope, receive, send)
