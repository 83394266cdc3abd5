"""Operators' calls about engines: GET /disagg/engines lists them, POST adds one, and
DELETE /disagg/engines/NAME lets one drain and go.

Each process passes the call on to whoever knows the engines of all processes.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg.config import Role
from disagg.router.api.errors import ApiError
from disagg.router.server import operators
from disagg.router.server.api_keys import KeyRing
from disagg.router.server.peer_processes import PeerProcesses
from disagg.router.telemetry.access_log import AccessLog

PATH = "/disagg/engines"
_MOST_BYTES = 16 << 10


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST."""

    role: Role
    url: str


_GIVEN = msgspec.json.Decoder(_Given)


def install(app: FastAPI, keys: KeyRing, log: AccessLog) -> None:
    """Add the routes."""

    async def act(request: Request) -> Response:
        peer_processes: PeerProcesses = app.state.peer_processes
        name, given = await _call(request)
        done = await peer_processes.engines(name, given)
        if "error" in done["content"]:
            raise ApiError(done["status"], done["content"]["error"])
        return JSONResponse(done["content"], done["status"])

    answer = operators.guarded(act, keys, log)
    app.router.routes.append(Route(PATH, answer, methods=["GET", "POST"]))
    app.router.routes.append(Route(PATH + "/{name}", answer, methods=["DELETE"]))


async def _call(request: Request) -> tuple[str, dict[str, Any]]:
    if request.method == "DELETE":
        return "remove", {"name": request.path_params["name"]}
    if request.method != "POST":
        return "list", {}
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise ApiError(413, f"the body is over {_MOST_BYTES} bytes")
    try:
        given = _GIVEN.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        example = '{"role": "decode", "url": "http://HOST:8000"}'
        raise ApiError(400, f"{error}; send {example}") from error
    return "add", msgspec.structs.asdict(given)
