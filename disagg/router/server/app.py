"""The FastAPI app: its parts, its routes, and its answers to errors.

It must never send a request to an engine; `request/service.py` and the other parts do.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg import credentials
from disagg.config import ConnectorName, RouterSection
from disagg.credentials import ApiKey
from disagg.router.api import bodies, openapi, paths
from disagg.router.api.errors import ApiError
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.engines.probes import Probes
from disagg.router.request.service import Service
from disagg.router.server import drain_api, engines_api, operators, ui
from disagg.router.server.api_keys import KeyRing
from disagg.router.server.drain import DrainMiddleware
from disagg.router.server.endpoint import INTERNAL_ERROR, Answer, Endpoint
from disagg.router.server.file_descriptors import FileDescriptors
from disagg.router.server.status import Failures, Status
from disagg.router.telemetry.access_log import AccessLog, Record
from disagg.router.telemetry.engine_metrics import EngineTexts
from disagg.router.telemetry.metrics import EnginesUp, Exposition, RouterMetrics
from disagg.router.telemetry.tracing import open_tracer
from disagg.router.topology import Away, EngineEndpoint, Topology
from disagg.router.upstream import client as upstream
from disagg.router.upstream import http1
from disagg.router.upstream.loop_yield import LoopYield

_READ = ["GET", "HEAD"]
_METHODS = [*_READ, "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_app(
    settings: RouterSection,
    engines: Sequence[EngineEndpoint],
    *,
    down: Mapping[str, Away] | None = None,
    api_keys: Sequence[ApiKey] = (),
    engine_key: str | None = None,
    connector: ConnectorName = "disagg",
    strict: bool = False,
) -> FastAPI:
    """The router in front of these engines. Apps share no state with each other."""
    topology, metrics, keys = Topology(engines, down), RouterMetrics(), KeyRing(api_keys)
    tls = credentials.engine_tls(settings)
    health = Health(metrics, is_known=topology.has)
    compatibility, failures = Compatibility(), Failures()
    metrics.registry.register(EnginesUp(topology, health.problem))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            upstream.open_client(settings.limits, engine_key, tls=tls) as client,
            upstream.open_client(settings.limits, engine_key, keep=False, tls=tls) as prober,
        ):
            service = Service(
                client,
                http1.Client(
                    settings.limits.connect_timeout_s,
                    engine_key,
                    loop_yield=LoopYield() if settings.processes > 1 else None,
                    tls=tls,
                ),
                topology,
                health,
                metrics,
                compatibility,
                settings,
                strict=strict,
                connector=connector,
            )
            texts = EngineTexts(client, lambda: topology.engines, metrics.engine_metrics_are_odd)
            app.state.status = Status(texts, topology, health, failures)
            app.state.exposition = Exposition(
                texts, lambda: topology.engines, lambda: app.state.peer_processes.figures()
            )
            probes = Probes(prober, topology, health, compatibility, settings.probe_interval_s)
            app.state.probes = probes
            probes.start()
            app.state.service = service
            service.adapters.equalize(topology)
            yield
            await probes.close()
            await service.close()

    def replace(engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Forget the state of engines that changed. Requests in flight to them are not cut."""
        service: Service = app.state.service
        known, names = set(topology.engines), {*topology.down}
        for engine in known ^ set(engines):
            health.forget(engine)
            compatibility.forget(engine)
        for engine in set(engines) - known:
            service.adapters.engine_added(engine, known & set(engines))
        topology.replace(engines, down)
        names |= {engine.name for engine in known}
        for name in names - {engine.name for engine in engines} - {*down}:
            service.engine_gone(name)
        service.engines_changed()

    app = FastAPI(title="disagg", lifespan=lifespan, docs_url=None, openapi_url=None)
    app.state.settings, app.state.descriptors = settings, FileDescriptors()
    app.state.replace = replace
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _internal_error)
    has_proxies = bool(settings.proxies.networks)
    log = AccessLog(enabled=settings.access_log, shows_clients=has_proxies)
    drain_api.install(app, metrics.registry, keys, log)
    engines_api.install(app, keys, log)
    _add_own_routes(app, topology, health, compatibility, keys)
    ui.install(app, keys)
    _add_api_routes(app, settings, metrics, failures, keys, log)
    return app


def _add_own_routes(
    app: FastAPI, topology: Topology, health: Health, compatibility: Compatibility, keys: KeyRing
) -> None:
    @app.api_route("/health", methods=_READ)
    async def alive() -> Response:
        return Response()

    @app.api_route("/ready", methods=_READ)
    async def ready() -> Response:
        probes: Probes = app.state.probes
        await probes.probe_all()
        problems = {engine.name: health.problem(engine) for engine in topology.engines}
        up = [engine for engine in topology.engines if problems[engine.name] is None]
        if topology.knows("prefill"):
            is_ready = any(
                {one.role, other.role} == {"prefill", "decode"} and compatibility.fit(one, other)
                for one, other in itertools.combinations(up, 2)
            )
        else:
            is_ready = bool(up)  # without a prefill pool, decode engines compute prompts too
        # Words that the router or its supervisor chose; nothing that an engine wrote.
        shown = {name: problem or "up" for name, problem in problems.items()}
        shown.update((name, away.why) for name, away in topology.down.items())
        return JSONResponse({"ready": is_ready, "engines": shown}, 200 if is_ready else 503)

    @app.api_route(openapi.PATH, methods=_READ)
    async def describe() -> Response:
        settings: RouterSection = app.state.settings
        return JSONResponse(openapi.document(settings.root_path))

    @app.api_route("/metrics", methods=_READ)
    async def show_metrics(request: Request) -> Response:
        metrics: Exposition = app.state.exposition
        text = await metrics.text(fresh=keys.find(request.scope).is_operator)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_api_routes(
    app: FastAPI,
    settings: RouterSection,
    metrics: RouterMetrics,
    failures: Failures,
    keys: KeyRing,
    log: AccessLog,
) -> None:
    app.state.direct = {}
    descriptors: FileDescriptors = app.state.descriptors
    limit, tracer = settings.limits.max_body_bytes, open_tracer()

    # Plain functions: each coroutine that a request is in adds a cost to every wait.
    def complete(request: Request, data: bytes, record: Record) -> Awaitable[Answer]:
        service: Service = app.state.service
        if len(data) > bodies.UNCOUNTED:
            return complete_large(service, request, data, record)
        return service.complete(record.route, bodies.parsed(data), request.headers, record)

    async def complete_large(
        service: Service, request: Request, data: bytes, record: Record
    ) -> Answer:
        await bodies.check_elements(data, settings.limits.max_json_elements)
        body = bodies.parsed(data)
        return await service.complete(record.route, body, request.headers, record)

    def forward(request: Request, data: bytes, record: Record) -> Awaitable[Answer]:
        service: Service = app.state.service
        target = operators.raw_target(request.scope)
        return service.forward(request.method, target, data, request.headers, record)

    async def internal(request: Request) -> Response:
        # /disagg/ paths are between router and engines; clients must not reach them.
        return ApiError(404, "there is no such path").response()

    for path in paths.PAIRED:
        completions = Endpoint(
            path, complete, metrics, failures, keys, limit, tracer, log, descriptors
        )
        app.router.routes.append(Route(path, completions, methods=["POST"]))
        app.state.direct[path] = DrainMiddleware(completions, app.state.drain)
    app.add_route("/disagg/{rest:path}", internal, methods=_METHODS)
    other = Endpoint(
        "other", forward, metrics, failures, keys, limit, tracer, log, descriptors, guarded=True
    )
    app.router.routes.append(Route("/{rest:path}", other, methods=_METHODS))


async def _framework_error(request: Request, error: Exception) -> Response:
    """An error that the framework raises itself, such as a method that no route has."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, error.detail, error.headers).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    """A defect of the router. The framework raises it again afterwards, and uvicorn logs it."""
    return INTERNAL_ERROR.response()
