"""A router whose engines a registry keeps, over real sockets, as `disagg router` has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from unit.router.conftest import AS_OPERATOR, OPERATOR, FakeEngine, Loop

from disagg.config import EngineUrlsSection, LimitsSection, PairingSection, Role, RouterSection
from disagg.router.discovery.calls import RegistryCalls
from disagg.router.discovery.registry import Registry
from disagg.router.discovery.sources import open_registry
from disagg.router.server.server import RouterPlan, bind
from disagg.testing.http import client

PATH = "/disagg/engines"


@dataclass
class Managed:
    """A router's URL, and what keeps its engines."""

    url: str
    registry: Registry

    def engines(self) -> dict[str, dict[str, Any]]:
        """By name."""
        answer = client().get(self.url + PATH, headers=AS_OPERATOR)
        return {one["name"]: one for one in answer.json()["engines"]}

    def states(self) -> dict[str, str]:
        return {name: one["state"] for name, one in self.engines().items()}

    def add(self, role: Role, url: str) -> httpx.Response:
        given = {"role": role, "url": url}
        return client().post(self.url + PATH, json=given, headers=AS_OPERATOR, timeout=20)

    def remove(self, name: str) -> httpx.Response:
        return client().delete(f"{self.url}{PATH}/{name}", headers=AS_OPERATOR, timeout=20)

    def complete(self, **body: Any) -> httpx.Response:
        asked = {"model": "m", "prompt": "x", **body}
        return client().post(f"{self.url}/v1/completions", json=asked, timeout=60)

    def ready(self) -> httpx.Response:
        return client().get(f"{self.url}/ready")


@contextmanager
def managed(
    loop: Loop,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    *,
    limits: dict[str, Any] | None = None,
    engines: dict[str, Any] | None = None,
    operators_add: bool = True,
) -> Iterator[Managed]:
    """A router in front of these URLs. `engines`: other keys of the section."""
    found = EngineUrlsSection(**{"refresh_s": 0.05, **(engines or {})})
    section = RouterSection(
        port=0,
        limits=LimitsSection(**(limits or {})),
        engines=found,
        pairing=PairingSection(local_prefill_tokens=0),
        probe_interval_s=0.2,
    )

    async def opened() -> Registry:
        return open_registry(
            found,
            prefill,
            decode,
            drain_s=section.limits.drain_s,
            operators_add=operators_add,
        )

    registry = loop.run(opened())
    plan = RouterPlan(section, registry.engines, [OPERATOR], down=registry.down)
    sock = bind("127.0.0.1", 0)

    async def start() -> Any:
        server = plan.server(sock)
        server.manage(RegistryCalls(registry))
        await server.start()
        registry.start(server)
        return server

    server = loop.run(start())
    try:
        yield Managed(f"http://127.0.0.1:{sock.getsockname()[1]}", registry)
    finally:
        loop.run(registry.close())
        loop.run(server.stop(1))


@contextmanager
def fakes(loop: Loop, *roles: Role) -> Iterator[list[FakeEngine]]:
    """Engines of these roles."""
    made = [FakeEngine(role) for role in roles]
    for engine in made:
        loop.run(engine.start())
    try:
        yield made
    finally:
        for engine in made:
            loop.run(engine.stop())
