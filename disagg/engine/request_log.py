"""One line of JSON in an engine's log for each request from the router, with the router's id.

vLLM's own log line of a request holds all its parameters, and with them the signed ticket of a
handoff. This line must never hold anything that opens a lease. Of what a client wrote it holds only
the request's id.
"""

from __future__ import annotations

import logging
import sys
import time

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg.safe_logging import foreign

_ID = b"x-request-id"
_CLIENT_LEFT = 499
_requests = logging.getLogger("disagg.requests")


def open_request_log(*, enabled: bool) -> None:
    """Write the lines to standard output without a prefix; or drop them if not `enabled`."""
    _requests.propagate = False
    _requests.setLevel(logging.INFO if enabled else logging.CRITICAL)
    if enabled and not _requests.handlers:
        _requests.addHandler(logging.StreamHandler(sys.stdout))


class RequestLog:
    """ASGI middleware: logs each request with an id when it has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _id(scope) if _requests.isEnabledFor(logging.INFO) else None
        if given is None:
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), _CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]

        try:
            await self._app(scope, receive, watched)
        finally:
            total_ms = round((time.monotonic() - began) * 1000, 1)
            route = foreign(scope["path"])
            line = {"status": status, "id": given, "route": route, "total_ms": total_ms}
            _requests.info("%s", msgspec.json.encode(line).decode())


def _id(scope: Scope) -> str | None:
    if scope["type"] != "http":
        return None
    given = (value.decode("latin-1") for name, value in scope["headers"] if name == _ID)
    return next(map(foreign, given), None)
