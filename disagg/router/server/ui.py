"""`/ui`: a status page that reads `/ui/state` every 2 s, and the paths that lead people there.
They must never load external assets."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from disagg.router.api.errors import ApiError
from disagg.router.server.api_keys import KeyRing
from disagg.router.server.peer_processes import PeerProcesses
from disagg.router.server.status import PATH, Status

_PAGE, _SCRIPT = (Path(__file__).with_name(name) for name in ("ui.html", "ui.js"))
_SCRIPT_PLACE = "/* ui.js */"
_NO_DOCS = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>disagg: no pages of the API</title>
<style>:root { color-scheme: light dark; } body { font: 15px/1.45 system-ui; margin: 1rem; }</style>
<h1>No pages of the API</h1>
<p><a href="openapi.json">openapi.json</a> describes the API, for the tools of your choice.</p>
<p><a href="ui">ui</a> shows the router and its engines.</p>
</html>
"""
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}


def install(app: FastAPI, keys: KeyRing, root_path: str = "") -> None:
    """Add the page and its data. `app.state.status` exists while the app runs. `root_path`: where a
    proxy publishes the router."""
    page = _PAGE.read_text().replace(_SCRIPT_PLACE, _SCRIPT.read_text())

    @app.api_route("/ui", methods=["GET", "HEAD"])
    async def show() -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    @app.get("/")
    async def lead() -> Response:
        # Relative without a root path: right behind a proxy that was not told to the router, too.
        return RedirectResponse(f"{root_path}/ui" if root_path else "ui")

    async def no_docs() -> Response:
        return HTMLResponse(_NO_DOCS, 404, headers=_HEADERS)

    for path in ("/docs", "/redoc"):  # an engine's pages load their scripts from elsewhere
        app.add_api_route(path, no_docs, methods=["GET", "HEAD"])

    @app.api_route(PATH, methods=["GET", "HEAD"])
    async def state(request: Request) -> Response:
        try:
            since = _since(request)
        except ApiError as error:
            return error.response()
        status: Status = app.state.status
        peer_processes: PeerProcesses = app.state.peer_processes
        has_key = keys.find(request.scope).has_key
        document = await status.document(peer_processes, has_key=has_key)
        if since is not None:
            history = await peer_processes.history(since)
            document = {**document, "history": msgspec.Raw(history.encode())}
        content = msgspec.json.encode(document)
        return Response(content, headers=_HEADERS, media_type="application/json")


def _since(request: Request) -> float | None:
    text = request.query_params.get("since")
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ApiError(400, "since: not a number; give seconds since 1970, or 0 for all")
    return value
