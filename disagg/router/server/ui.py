"""`/ui`: a status page that reads `/ui/state` every 2 s. It must never load external assets."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from disagg.router.server.api_keys import KeyRing
from disagg.router.server.peer_processes import PeerProcesses
from disagg.router.server.status import PATH, Status

_PAGE = Path(__file__).with_name("ui.html")
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}


def install(app: FastAPI, keys: KeyRing) -> None:
    """Add the page and its data. `app.state.status` exists while the app runs."""
    page = _PAGE.read_text()

    @app.api_route("/ui", methods=["GET", "HEAD"])
    async def show() -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    @app.api_route(PATH, methods=["GET", "HEAD"])
    async def state(request: Request) -> Response:
        status: Status = app.state.status
        peer_processes: PeerProcesses = app.state.peer_processes
        has_key = keys.find(request.scope).has_key
        document = await status.document(peer_processes, has_key=has_key)
        return JSONResponse(document, headers=_HEADERS)
