"""A router for several models, in front of fake engines."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from unit.router.conftest import OPERATOR, FakeEngine, Loop

from disagg.config import ModelRouteSection, Role, RouterSection, ServedModelSection
from disagg.credentials import ApiKey
from disagg.router.main import RouterServer, bind, create_app
from disagg.router.server.models import endpoints
from disagg.testing.http import client

LIMIT_S = 20.0


@dataclass
class Engine(FakeEngine):
    """A fake engine that loads adapters. `served`: models besides its own."""

    served: list[str] = field(default_factory=list)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/load_lora_adapter":
            self.served.append((await request.json())["lora_name"])
        return await super()._respond(request)

    @property
    def calls(self) -> list[str]:
        """What it was asked besides probes."""
        probes = ("/health", "/version", "/disagg/")
        return [path for path in self.asked if not path.startswith(probes)]

    async def _other(self, request: web.Request) -> web.Response:
        if request.path == "/v1/unload_lora_adapter":
            self.served.remove((await request.json())["lora_name"])
        return await super()._other(request)

    async def _models(self, request: web.Request) -> web.Response:
        data = [{"id": name, "object": "model"} for name in (self.model, *self.served)]
        return web.json_response({"object": "list", "data": data})


@dataclass
class Models:
    """A router with several models, and the engines of each."""

    url: str
    engines: dict[str, list[Engine]]
    loop: Loop
    server: RouterServer

    def decode(self, model: str) -> Engine:
        return next(engine for engine in self.engines[model] if engine.role == "decode")

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return client().post(f"{self.url}{path}", json=body, timeout=LIMIT_S, **options)

    def complete(self, model: str, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": model, "prompt": "x", **body})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return client().get(f"{self.url}{path}", timeout=LIMIT_S, **options)

    def listed(self) -> list[str]:
        """The names in `/v1/models`."""
        return [model["id"] for model in self.get("/v1/models").json()["data"]]

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        families = text_string_to_metric_families(self.get("/metrics").text)
        return [(s.name, s.labels, s.value) for family in families for s in family.samples]


StartModels = Callable[..., Models]


@pytest.fixture
def start_models(loop: Loop) -> Iterator[StartModels]:
    """Starts a router for the models `chat` and `org/code`, each with its engines. `kind`: of the
    engines; `own`: settings by model; `deployments`: the name of each model's deployment, and
    whether it is strict, as `disagg serve` gives them; `section`: of the router."""
    undo: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def start(
        *,
        roles: Sequence[Role] = ("prefill", "decode"),
        names: Sequence[str] = ("chat", "org/code"),
        own: dict[str, dict[str, Any]] | None = None,
        kind: type[Engine] = Engine,
        api_keys: Sequence[ApiKey] = (OPERATOR,),
        deployments: dict[str, tuple[str, bool]] | None = None,
        **section: Any,
    ) -> Models:
        engines: dict[str, list[Engine]] = {}
        for name in names:
            engines[name] = [kind(role, model=name) for role in roles]
            for engine in engines[name]:
                loop.run(engine.start())
                undo.append(engine.stop)
        listed = [
            {
                "name": name,
                "engines": {
                    role: [engine.url for engine in group if engine.role == role]
                    for role in ("prefill", "decode")
                },
                **(own or {}).get(name, {}),
            }
            for name, group in engines.items()
        ]
        section.setdefault("pairing", {"local_prefill_tokens": 0})
        settings = RouterSection.model_validate({"port": 0, "models": listed, **section})
        if deployments is not None:
            served = [_served(model, *deployments[model.name]) for model in settings.models]
            settings = settings.model_copy(update={"models": served})
        sock = bind("127.0.0.1", 0)
        app = create_app(settings, endpoints(settings.models), api_keys=list(api_keys))
        server = RouterServer(app, sock)
        loop.run(server.start())
        undo.append(lambda: server.stop(1))
        return Models(f"http://127.0.0.1:{sock.getsockname()[1]}", engines, loop, server)

    yield start
    for stop in reversed(undo):
        loop.run(stop())


def _served(model: ModelRouteSection, deployment: str, strict: bool) -> ServedModelSection:
    return ServedModelSection(
        name=deployment, served_name=model.name, strict=strict, engines=model.engines
    )


@pytest.fixture
def models(start_models: StartModels) -> Models:
    return start_models()
