"""The drain command: POST /disagg/drain begins a drain, DELETE undoes it, GET returns its progress.

With API keys configured, the caller must send one. Without keys, only callers on this machine are
served, and all others must get 404.
"""

from __future__ import annotations

import ipaddress

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg.router.api.errors import ApiError
from disagg.router.server.api_keys import KeyRing
from disagg.router.server.drain import PATH, Drain, DrainMiddleware
from disagg.router.server.peer_processes import PeerProcesses, SingleProcess

# A proxy or a web page adds these: its requests arrive locally, but come from elsewhere.
_FORWARDING_HEADERS = ("forwarded", "origin", "via", "x-forwarded-for", "x-real-ip")


def install(app: FastAPI, registry: CollectorRegistry, keys: KeyRing) -> None:
    """Make the app drainable. Sets `drain` and `peer_processes` in the app's state."""
    drain = app.state.drain = Drain()
    app.state.peer_processes = SingleProcess(drain, registry)
    app.add_middleware(DrainMiddleware, drain=drain)

    async def answer(request: Request) -> Response:
        try:
            _check(request, keys)
        except ApiError as error:
            return error.response()
        peer_processes: PeerProcesses = app.state.peer_processes
        if request.method == "DELETE" and drain.ending:
            return ApiError(409, "this router is shutting down; start it again").response()
        if request.method in ("POST", "DELETE"):
            in_flight = await peer_processes.drain(request.method == "POST")
        else:
            in_flight = await peer_processes.in_flight()
        return JSONResponse({"draining": drain.draining, "in_flight": in_flight})

    app.router.routes.append(Route(PATH, answer, methods=["GET", "POST", "DELETE"]))


def _check(request: Request, keys: KeyRing) -> None:
    if keys:
        keys.check(request.headers.get("authorization", ""))
    elif not _from_this_machine(request):
        raise ApiError(404, "there is no such path")


def _from_this_machine(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _FORWARDING_HEADERS):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
