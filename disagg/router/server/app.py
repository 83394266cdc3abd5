"""The FastAPI app: its parts, its routes, and its answers to errors.

It must never send a request to an engine; `request/service.py` and the other parts do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg import credentials
from disagg.config import ConnectorName, ModelRouteSection, RouterSection
from disagg.credentials import ApiKey
from disagg.router.api import bodies, openapi, paths
from disagg.router.api.errors import ApiError
from disagg.router.server import drain_api, engines_api, ui
from disagg.router.server import gossip as gossip_api
from disagg.router.server.api_keys import KeyRing
from disagg.router.server.drain import DrainMiddleware
from disagg.router.server.endpoint import INTERNAL_ERROR, Answer, Endpoint
from disagg.router.server.failures import Failures
from disagg.router.server.file_descriptors import FileDescriptors
from disagg.router.server.forwarding import Forwarding
from disagg.router.server.gossip import Gossip
from disagg.router.server.model_group import ModelGroup
from disagg.router.server.models import Models
from disagg.router.server.peer_processes import SingleProcess
from disagg.router.server.sampler import Sampler
from disagg.router.server.status import Status
from disagg.router.telemetry.access_log import AccessLog, Record
from disagg.router.telemetry.engine_metrics import EngineTexts
from disagg.router.telemetry.metrics import ByDeployment, Exposition, RouterMetrics
from disagg.router.telemetry.tracing import open_tracer
from disagg.router.topology import Away, EngineEndpoint, deployment_of
from disagg.router.upstream import client as upstream
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
    models = Models(_groups(settings, engines, down or {}, connector, strict))
    keys, failures = KeyRing(api_keys), Failures()
    tls = credentials.engine_tls(settings)
    gossip = Gossip(models, settings, api_keys, tls)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop_yield = LoopYield() if settings.processes > 1 else None
        async with AsyncExitStack() as running:
            for group in models.groups.values():
                await running.enter_async_context(group.running(engine_key, tls, loop_yield))
            await running.enter_async_context(models.running())
            await running.enter_async_context(gossip.running(lambda: app.state.peer_processes))
            scraper = await running.enter_async_context(
                upstream.open_client(settings.limits, engine_key, tls=tls)
            )
            texts = EngineTexts(scraper, lambda: models.engines, models.metrics_are_odd)
            app.state.status = Status(texts, models)
            await running.enter_async_context(_history(app, Sampler(texts, models)))
            app.state.exposition = Exposition(
                texts, lambda: models.engines, lambda: app.state.peer_processes.figures()
            )
            yield

    app = FastAPI(title="disagg", lifespan=lifespan, docs_url=None, openapi_url=None)
    app.state.settings, app.state.descriptors = settings, FileDescriptors()
    app.state.models, app.state.replace = models, models.replace
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _internal_error)
    has_proxies = bool(settings.proxies.networks)
    log = AccessLog(enabled=settings.access_log, shows_clients=has_proxies)
    metrics = {name: group.metrics for name, group in models.groups.items()}
    registry: Collector = metrics[""].registry if models.only else _several(metrics)
    drain_api.install(app, registry, failures, keys, log)
    engines_api.install(app, keys, log)
    gossip_api.install(app, gossip, keys)
    _add_own_routes(app, models, keys)
    ui.install(app, keys, settings.root_path)
    _add_api_routes(app, settings, models, metrics, failures, keys, log)
    return app


@asynccontextmanager
async def _history(app: FastAPI, sampler: Sampler) -> AsyncIterator[None]:
    """Sets `take_sample` in the app's state. Keeps the history, unless the parent of several
    processes does."""
    app.state.take_sample = lambda: sampler.take(app.state.peer_processes.figures)
    own = app.state.peer_processes
    if isinstance(own, SingleProcess):
        async with own.kept.running(app.state.take_sample):
            yield
    else:
        yield


def _groups(
    settings: RouterSection,
    engines: Sequence[EngineEndpoint],
    down: Mapping[str, Away],
    connector: ConnectorName,
    strict: bool,
) -> list[ModelGroup]:
    def group(model: ModelRouteSection) -> ModelGroup:
        return ModelGroup(
            model.name,
            settings.of_model(model),
            [engine for engine in engines if deployment_of(engine.name) == model.name],
            {name: away for name, away in down.items() if deployment_of(name) == model.name},
            connector=model.connector or connector,
            strict=strict or model.is_strict,
            model=model.model,
        )

    if settings.models:
        return [group(model) for model in settings.models]
    return [ModelGroup("", settings, engines, down, connector=connector, strict=strict)]


def _several(metrics: dict[str, RouterMetrics]) -> ByDeployment:
    """The metrics of all groups as one. Adds those of no group: of requests that none served."""
    metrics[""] = RouterMetrics()
    return ByDeployment({name: each.registry for name, each in metrics.items()})


def _add_own_routes(app: FastAPI, models: Models, keys: KeyRing) -> None:
    @app.api_route("/health", methods=_READ)
    async def alive() -> Response:
        return Response()

    @app.api_route("/ready", methods=_READ)
    async def ready() -> Response:
        each = models.groups.values()
        problems = await asyncio.gather(*(group.problems() for group in each))
        are_ready = {group.name: group.is_ready() for group in each}
        # Words that the router or its supervisor chose; nothing that an engine wrote.
        shown = {name: why or "up" for found in problems for name, why in found.items()}
        # With several models, one is enough: a load balancer takes the router out as a whole.
        is_ready = any(are_ready.values())
        content: dict[str, object] = {"ready": is_ready, "engines": shown}
        if models.only is None:
            content["models"] = are_ready
        return JSONResponse(content, 200 if is_ready else 503)

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
    models: Models,
    metrics: Mapping[str, RouterMetrics],
    failures: Failures,
    keys: KeyRing,
    log: AccessLog,
) -> None:
    app.state.direct = {}
    descriptors: FileDescriptors = app.state.descriptors
    limit, tracer = settings.limits.max_body_bytes, open_tracer()
    forward = Forwarding(models).forward

    # Plain functions: each coroutine that a request is in adds a cost to every wait.
    def complete(request: Request, data: bytes, record: Record) -> Awaitable[Answer]:
        if len(data) > bodies.UNCOUNTED:
            return complete_large(request, data, record)
        return served(request, bodies.parsed(data), record)

    def served(request: Request, body: dict[str, Any], record: Record) -> Awaitable[Answer]:
        group = models.known(body.get("model"))
        if group is None:
            return find(request, body, record)
        record.deployment = group.name
        return group.service.complete(record.route, body, request.headers, record)

    async def find(request: Request, body: dict[str, Any], record: Record) -> Answer:
        group = await models.find(body.get("model"))
        record.deployment = group.name
        return await group.service.complete(record.route, body, request.headers, record)

    async def complete_large(request: Request, data: bytes, record: Record) -> Answer:
        await bodies.check_elements(data, settings.limits.max_json_elements)
        return await served(request, bodies.parsed(data), record)

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
        "other",
        forward,
        metrics,
        failures,
        keys,
        limit,
        tracer,
        log,
        descriptors,
        guarded=True,
    )
    app.router.routes.append(Route("/{rest:path}", other, methods=_METHODS))


async def _framework_error(request: Request, error: Exception) -> Response:
    """An error that the framework raises itself, such as a method that no route has."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, error.detail, error.headers).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    """A defect of the router. The framework raises it again afterwards, and uvicorn logs it."""
    return INTERNAL_ERROR.response()
