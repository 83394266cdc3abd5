"""Operators' calls: who may make them, and an audit line for each.

A path that does more than infer or read is an operator's. It needs an admin key, or the router's
own socket. The decision must be made on the bytes of the path that are sent to the engine, decoded
once, as the engine decodes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from disagg.router.api import paths
from disagg.router.api.errors import ApiError
from disagg.router.server.api_keys import Caller, KeyRing
from disagg.router.telemetry.access_log import AccessLog

Act: TypeAlias = Callable[[Request], Awaitable[Response]]


def is_operators(scope: Scope) -> bool:
    """Whether this request's path needs an operator."""
    return not paths.is_for_clients(unquote(raw_path(scope)))


def check(caller: Caller, keys: KeyRing) -> None:
    """`ApiError` 403 if the caller is no operator."""
    if caller.is_operator:
        return
    if keys.has_admin_keys:
        raise ApiError(
            403,
            "this path is for operators: send an admin key (router.admin_keys_file), or use the "
            "router's own socket",
        )
    raise ApiError(
        403,
        "this path is for operators, and closed without an admin key: set router.admin_keys_file, "
        "or use the router's own socket",
    )


def guarded(act: Act, keys: KeyRing, log: AccessLog) -> Act:
    """A route of the router's own that only operators may use. An `ApiError` of `act` becomes its
    answer; every call of an operator is in the audit."""

    async def answer(request: Request) -> Response:
        try:
            caller = keys.check(request.scope)
            check(caller, keys)
        except ApiError as error:
            return error.response()
        try:
            response = await act(request)
        except ApiError as error:
            response = error.response()
        audit(log, caller, request.scope, response.status_code)
        return response

    return answer


def raw_path(scope: Scope) -> str:
    """The path exactly as the client sent it."""
    path: bytes = scope["raw_path"]
    return path.decode("latin-1")


def raw_target(scope: Scope) -> str:
    """Path and query exactly as the client sent them."""
    query: bytes = scope["query_string"]
    return raw_path(scope) + ("?" + query.decode("latin-1") if query else "")


def audit(log: AccessLog, caller: Caller, scope: Scope, status: int) -> None:
    """Write the line of an operator's call. The socket's line has the peer's process and user."""
    peer = caller.peer
    who: dict[str, object] = {"who": caller.name}
    if log.shows_clients and scope["client"] is not None:
        who["client"] = scope["client"][0]
    if peer is not None:
        who |= {"pid": peer.pid, "uid": peer.uid}
    log.audit({**who, "method": scope["method"], "path": raw_target(scope), "status": status})
