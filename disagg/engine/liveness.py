"""Whether an engine still moves: vLLM's server answers health while the process behind it hangs.

That process is asked a small question every second, which it answers between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

EVERY_S = 1.0
# More than a step takes; routers then leave the engine alone, and come back when it answers.
SILENT_S = 3.0


class Liveness:
    """`ask` returns when the engine's process has answered."""

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self._asked_at: float | None = None

    @property
    def silent_s(self) -> float:
        """For how long it owes an answer."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    async def run(self) -> None:
        """Ask until cancelled. Raises what `ask` raises, such as that the engine is dead."""
        while True:
            self._asked_at = time.monotonic()
            await self._ask()
            self._asked_at = None
            await asyncio.sleep(EVERY_S)


class LivenessHealth:
    """ASGI: `/health` is 503 while the engine is silent; all else is the app's."""

    def __init__(self, app: ASGIApp, pulse: Liveness) -> None:
        self._app, self._pulse = app, pulse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        silent_s = self._pulse.silent_s
        if silent_s > SILENT_S and scope["type"] == "http" and scope["path"] == "/health":
            answer = JSONResponse({"error": f"no progress for {silent_s:.0f} s"}, 503)
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)
