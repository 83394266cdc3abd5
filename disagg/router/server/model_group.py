"""The engines of one model: what the router knows of them, and the service that asks them.

Groups share no state. So one model's load, limits and failures must never touch another model's
requests.
"""

from __future__ import annotations

import itertools
import logging
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from disagg.config import ConnectorName, RouterSection
from disagg.router.caches import block_keys
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.caches.listeners import Listeners
from disagg.router.caches.metrics import CacheMetrics
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.engines.probes import Probes
from disagg.router.request.service import Service
from disagg.router.telemetry.metrics import EnginesUp, RouterMetrics
from disagg.router.topology import Away, EngineEndpoint, Topology, with_events
from disagg.router.upstream import client as upstream
from disagg.router.upstream import http1
from disagg.router.upstream.loop_yield import LoopYield

logger = logging.getLogger(__name__)


class ModelGroup:
    """One model. `name`: of its deployment, empty if the router's settings name no models; see
    `topology.name_in`. `model`: its name in requests. `service` exists while it runs."""

    service: Service
    _probes: Probes

    def __init__(
        self,
        name: str,
        settings: RouterSection,
        engines: Sequence[EngineEndpoint],
        down: Mapping[str, Away],
        *,
        connector: ConnectorName,
        strict: bool,
        model: str = "",
    ) -> None:
        self.name, self.model = name, model
        self._settings, self._connector, self._strict = settings, connector, strict
        self.topology, self.metrics = Topology(self._located(engines), down), RouterMetrics()
        self.health = Health(self.metrics, is_known=self.topology.has)
        self._compatibility = Compatibility()
        self.metrics.registry.register(EnginesUp(self.topology, self.health.problem))
        self._caches = EngineCaches()
        self._listeners: Listeners | None = None
        if self.hears_caches:
            if not block_keys.is_compiled:
                logger.warning(
                    "cache_aware takes about 0.1 ms more for each prompt of 8,000 tokens: disagg "
                    "was installed without its compiled module; install a C compiler (gcc), then "
                    "disagg again"
                )
            self.metrics.registry.register(
                CacheMetrics(lambda: self._listeners.events if self._listeners else {})
            )

    @property
    def hears_caches(self) -> bool:
        """Whether the router knows what the engines' caches hold."""
        return self._settings.pairing.hears_caches

    @property
    def shares_caches(self) -> bool:
        """Whether an engine may fetch from another engine's cache."""
        return self._settings.pairing.shares_caches

    @asynccontextmanager
    async def running(
        self, engine_key: str | None, tls: ssl.SSLContext | None, loop_yield: LoopYield | None
    ) -> AsyncIterator[None]:
        """Probe the engines and serve requests. See `upstream.client.open_client`."""
        limits = self._settings.limits
        async with (
            upstream.open_client(limits, engine_key, tls=tls) as client,
            upstream.open_client(limits, engine_key, keep=False, tls=tls) as prober,
        ):
            self.service = Service(
                client,
                http1.Client(limits.connect_timeout_s, engine_key, loop_yield=loop_yield, tls=tls),
                self.topology,
                self.health,
                self.metrics,
                self._compatibility,
                self._settings,
                strict=self._strict,
                connector=self._connector,
                caches=self._caches,
            )
            self._probes = Probes(
                prober,
                self.topology,
                self.health,
                self._compatibility,
                self._settings.probe_interval_s,
            )
            self._probes.start()
            if self.hears_caches:
                self._listeners = Listeners(self._caches)
                self._listeners.follow(self.topology.engines)
            self.service.adapters.equalize(self.topology)
            yield
            await self._probes.close()
            if self._listeners is not None:
                await self._listeners.close()
            await self.service.close()

    def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Forget the state of engines that changed. Requests in flight to them are not cut."""
        engines = self._located(engines)
        known, names = set(self.topology.engines), {*self.topology.down}
        for engine in known ^ set(engines):
            self.health.forget(engine)
            self._compatibility.forget(engine)
        for engine in set(engines) - known:
            self.service.adapters.engine_added(engine, known & set(engines))
        self.topology.replace(engines, down)
        if self._listeners is not None:
            self._listeners.follow(engines)
        names |= {engine.name for engine in known}
        for name in names - {engine.name for engine in engines} - {*down}:
            self.service.engine_gone(name)
        self.service.engines_changed()

    def _located(self, engines: Sequence[EngineEndpoint]) -> Sequence[EngineEndpoint]:
        sections = self._settings.engines.kv_events
        return [with_events(engine, sections) for engine in engines] if sections else engines

    async def problems(self) -> Mapping[str, str | None]:
        """What is wrong with each engine now, by name; None with one that is up."""
        await self._probes.probe_all()
        found = {engine.name: self.health.problem(engine) for engine in self.topology.engines}
        return {**found, **{name: away.why for name, away in self.topology.down.items()}}

    def is_ready(self) -> bool:
        """Whether it can serve as it should: engines of both roles are up and fit."""
        up = [engine for engine in self.topology.engines if self.health.problem(engine) is None]
        if not self.topology.knows("prefill"):
            return bool(up)  # decode engines compute prompts too
        return any(
            {one.role, other.role} == {"prefill", "decode"} and self._compatibility.fit(one, other)
            for one, other in itertools.combinations(up, 2)
        )
