"""The drain command: POST /disagg/drain begins a drain, DELETE undoes it, GET returns its progress.

It is for operators alone; see `operators.py`.
"""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg.router.api.errors import ApiError
from disagg.router.server import operators
from disagg.router.server.api_keys import KeyRing
from disagg.router.server.drain import PATH, Drain, DrainMiddleware
from disagg.router.server.failures import Failures
from disagg.router.server.peer_processes import PeerProcesses, SingleProcess
from disagg.router.telemetry.access_log import AccessLog


def install(
    app: FastAPI, registry: Collector, failures: Failures, keys: KeyRing, log: AccessLog
) -> None:
    """Make the app drainable. Sets `drain` and `peer_processes` in the app's state."""
    drain = app.state.drain = Drain()
    app.state.peer_processes = SingleProcess(drain, registry, failures)
    app.add_middleware(DrainMiddleware, drain=drain)

    async def act(request: Request) -> Response:
        method = request.method
        peer_processes: PeerProcesses = app.state.peer_processes
        if method == "DELETE" and drain.ending:
            raise ApiError(409, "this router is shutting down; start it again")
        if method in ("POST", "DELETE"):
            in_flight = await peer_processes.drain(method == "POST")
        else:
            in_flight = await peer_processes.in_flight()
        return JSONResponse({"draining": drain.draining, "in_flight": in_flight})

    answer = operators.guarded(act, keys, log)
    app.router.routes.append(Route(PATH, answer, methods=["GET", "POST", "DELETE"]))
