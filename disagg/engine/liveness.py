"""Whether an engine makes progress.

vLLM's API server answers `/health` also while the engine process hangs. So the engine process gets
a small call every second. It answers between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

EVERY_S = 1.0
# Longer than a step. After it `/health` fails, and routers avoid the engine until it answers.
SILENT_S = 3.0


class Liveness:
    """Calls the engine process. `ask` returns when that process has answered."""

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self._asked_at: float | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the call that the engine process has not answered; 0 if it answered."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    async def run(self) -> None:
        """Ask until cancelled. Raises what `ask` raises, for example that the engine is dead."""
        while True:
            self._asked_at = time.monotonic()
            await self._ask()
            self._asked_at = None
            await asyncio.sleep(EVERY_S)


class LivenessHealth:
    """ASGI middleware: `/health` is 503 while the engine does not answer."""

    def __init__(self, app: ASGIApp, liveness: Liveness) -> None:
        self._app, self._liveness = app, liveness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        silent_s = self._liveness.silent_s
        if silent_s > SILENT_S and scope["type"] == "http" and scope["path"] == "/health":
            answer = JSONResponse({"error": f"no progress for {silent_s:.0f} s"}, 503)
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)
