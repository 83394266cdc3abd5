"""The router's own metrics, and the metrics of its engines, as one Prometheus exposition.

It shows every `disagg_*` family of every engine, with the labels `engine` and `role`, and those of
vLLM's families that tell how busy an engine is. An engine that is dead, or whose metrics are
malformed, must never fail the exposition: it costs its own series, and a wait of 2 s at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as TypeCount
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from disagg import __version__
from disagg.router.telemetry.counts import Counts, Seconds
from disagg.router.telemetry.engine_metrics import Cached, EngineTexts
from disagg.router.topology import EngineEndpoint, Topology, deployment_of, role_of

logger = logging.getLogger(__name__)

_BUILD = "disagg_build_info"
_OF_NO_DEPLOYMENT = frozenset([_BUILD, "disagg_router_requests"])
_OF_ENGINES = "Of the engines; docs of disagg and vLLM describe it."
_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class RouterMetrics:
    """The metrics of one app, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        build = Gauge(_BUILD, "The router's version.", ("version",), registry=self.registry)
        build.labels(__version__).set(1)
        self._requests = Counts(
            "disagg_router_requests",
            "Requests by the endpoint and the status the client got (499: the client left).",
            ("route", "status"),
            self.registry,
        )
        self.in_flight = Gauge(
            "disagg_router_in_flight",
            "Requests that have a seat at an engine of this role.",
            ("role",),
            registry=self.registry,
        )
        self.ttft = self._seconds("ttft", "From a request's arrival to its answer's first byte.")
        self.local = Counter(
            "disagg_router_local",
            "Requests sent to decode without a prefill leg's result, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.idle_prefill = Gauge(
            "disagg_router_idle_prefill_ratio",
            "Of the last 200 requests, those that decode computed while prefill was idle.",
            registry=self.registry,
        )
        self.other_routers = Gauge(
            "disagg_router_other_routers",
            "Router processes that told their loads within the last second.",
            registry=self.registry,
        )
        self.heard = Counter(
            "disagg_router_prompts_of_others",
            "Prompts of other router processes, as they told them.",
            registry=self.registry,
        )
        self.first_tokens = Counter(
            "disagg_router_first_tokens_from_prefill",
            "Streams that began with the prefill engine's first token.",
            registry=self.registry,
        )
        self.followed = Counter(
            "disagg_router_followed",
            "Requests whose decode leg could begin with their prefill leg, by what came of it.",
            ("outcome",),
            registry=self.registry,
        )
        self._pairings = Counts(
            "disagg_router_pairings",
            "Requests that were handed off, by prefill engine and decode engine.",
            ("prefill", "decode"),
            self.registry,
        )
        self.releases = Counter(
            "disagg_router_releases",
            "Leases that the router released because no engine will fetch them, by outcome.",
            ("outcome",),
            registry=self.registry,
        )
        self.retries = Counter(
            "disagg_router_retries",
            "Legs sent to another engine because the first one failed.",
            ("role",),
            registry=self.registry,
        )
        self.tokenized = Counter(
            "disagg_router_tokenized",
            "Prompts whose token ids the router wanted of an engine, by what came of it.",
            ("outcome",),
            registry=self.registry,
        )
        self.cache_expected = Counter(
            "disagg_router_cache_expected_tokens",
            "Tokens that the prefill engine held of prompts, as its KV events told the router.",
            registry=self.registry,
        )
        self.cache_reported = Counter(
            "disagg_router_cache_reported_tokens",
            "Tokens of the same prompts that the engine then took from its caches.",
            registry=self.registry,
        )
        self.cache_prompts = Counter(
            "disagg_router_cache_prompt_tokens",
            "All tokens of the same prompts.",
            registry=self.registry,
        )
        self.sources = Counter(
            "disagg_router_sources",
            "Engines that were asked for what their caches hold of a prompt, by what came of it.",
            ("outcome",),
            registry=self.registry,
        )
        self.shared_tokens = Counter(
            "disagg_router_shared_tokens",
            "Tokens of prompts that one engine lacked and another's cache had under a lease.",
            registry=self.registry,
        )
        self.engine_resting = Gauge(
            "disagg_router_engine_resting",
            "1 while an engine that keeps failing gets only trial requests.",
            ("engine", "role"),
            registry=self.registry,
        )
        self.migrations = Counter(
            "disagg_router_migrations",
            "Streams whose engine died, by how another engine continued them, if one did.",
            ("outcome",),
            registry=self.registry,
        )
        self._engine_metrics_problems = Counts(
            "disagg_router_engine_metrics_problems",
            "Readings of an engine's metrics of which something was left out, by what is wrong.",
            ("engine", "problem"),
            self.registry,
        )
        self.queued = Gauge(
            "disagg_router_queued",
            "Requests that wait for a seat at an engine.",
            registry=self.registry,
        )
        self.queue_time = self._seconds("queue", "How long queued requests waited for a seat.")
        self.prefill_time = self._seconds("prefill", "From a prefill leg's start to its answer.")
        self.handoff_time = self._seconds(
            "handoff", "From a prefill leg's answer to the first bytes of the decode leg's."
        )
        self.between_chunks = self._seconds(
            "between_chunks", "Mean time between the chunks of an answer.", _BETWEEN
        )

    def answered(self, route: str, status: int) -> None:
        """A request of this route is finished."""
        self._requests.add(route, status)

    def paired(self, prefill: str, decode: str) -> None:
        """A request was handed off between these engines."""
        self._pairings.add(prefill, decode)

    def forget(self, engine: str) -> None:
        """Drop the series of an engine that is gone: engines that come and go must not add up."""
        for role in ("prefill", "decode"):
            self.engine_resting.remove(engine, role)
        self._pairings.forget(engine)
        self._engine_metrics_problems.forget(engine)

    def engine_metrics_are_odd(self, engine: str, problem: str) -> None:
        """Something of this engine's metrics was left out."""
        self._engine_metrics_problems.add(engine, problem)

    def _seconds(self, name: str, documentation: str, bounds: Sequence[float] = _TTFT) -> Seconds:
        return Seconds(f"disagg_router_{name}_seconds", documentation, bounds, self.registry)


def text_of(registry: Collector) -> bytes:
    """The metrics in Prometheus's text format, without the times at which counters were created.

    These are families of their own, `*_created`, as many as all others, and no query needs them.
    """
    return generate_latest(_WithoutCreated(registry))


class _WithoutCreated(Collector):
    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            created = f"{family.name}_created"
            family.samples = [one for one in family.samples if one.name != created]
            yield family


def merged(label: str, each: Iterable[tuple[str, Iterable[Metric]]]) -> Iterable[Metric]:
    """Several sets of families as one. `label` gets the name of the set, in every sample."""
    families: dict[str, Metric] = {}
    for name, members in each:
        for family in members:
            shown = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                shown.add_sample(sample.name, {**sample.labels, label: name}, sample.value)
    return families.values()


class ByDeployment(Collector):
    """The router's metrics if it has several deployments: those of each, by its name, with the
    label `deployment`. The registry of "" has what belongs to none of them."""

    def __init__(self, registries: Mapping[str, Collector]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        return merged("deployment", ((name, self._of(name)) for name in self._registries))

    def _of(self, name: str) -> Iterable[Metric]:
        for family in self._registries[name].collect():
            is_shown = family.name in _OF_NO_DEPLOYMENT if name == "" else family.name != _BUILD
            if is_shown:
                yield family


class EnginesUp(Collector):
    """Which engines are up, including engines that are missing. `problem`: why one is not up."""

    def __init__(self, topology: Topology, problem: Callable[[EngineEndpoint], str | None]) -> None:
        self._topology, self._problem = topology, problem

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "disagg_router_engine_up",
            "1, or 0 for an engine that is missing or has a problem; /ui says which.",
            labels=("engine", "role"),
        )
        for engine in self._topology.engines:
            up.add_metric((engine.name, engine.role), float(self._problem(engine) is None))
        drains = GaugeMetricFamily(
            "disagg_router_engine_drains",
            "1 while an engine that goes finishes its requests.",
            labels=("engine", "role"),
        )
        for name, away in self._topology.down.items():
            if away.leaves:
                drains.add_metric((name, role_of(name)), 1.0)
            else:
                up.add_metric((name, role_of(name)), 0.0)
        yield up
        yield drains


class Exposition:
    """Makes the text of /metrics. The engines' part is at most a second old; the router's own
    figures are those of the moment. Requests that wait together get one text."""

    def __init__(
        self,
        texts: EngineTexts,
        engines: Callable[[], Sequence[EngineEndpoint]],
        own: Callable[[], Awaitable[bytes]],
    ) -> None:
        self._texts, self._engines, self._own = texts, engines, own
        self._merged = Cached(self._merge)
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None

    async def text(self, *, fresh: bool = False) -> bytes:
        """The router's own metrics, then those of its engines. `fresh`: all of the moment."""
        if fresh:
            return await self._own() + await self._merge(fresh=True)
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)

    async def _make(self) -> bytes:
        async with self._lock:
            self._next = None  # those who come from now on need a newer text
            return await self._own() + await self._merged.get(self._engines())

    async def _merge(self, *, fresh: bool = False) -> bytes:
        registry = CollectorRegistry()
        registry.register(_Merged(await self._texts.get(fresh=fresh)))
        return generate_latest(registry)


class _Merged(Collector):
    """Merges families of the same name from several engines; labels name the engine."""

    def __init__(self, scrapes: Sequence[tuple[EngineEndpoint, str | None]]) -> None:
        self._scrapes = scrapes

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        each = [(engine, self._families(engine, text or "")) for engine, text in self._scrapes]
        types: dict[str, TypeCount[str]] = defaultdict(TypeCount)
        for _, families in each:
            for family in families:
                types[family.name][family.type] += 1
        for engine, families in each:
            labels = {"engine": engine.name, "role": engine.role}
            if deployment := deployment_of(engine.name):
                labels["deployment"] = deployment
            for family in families:
                # An engine that gives a family another type than most must not change it for them.
                if family.type == types[family.name].most_common(1)[0][0]:
                    self._add(merged, family, labels)
        return merged.values()

    @staticmethod
    def _families(engine: EngineEndpoint, text: str) -> list[Metric]:
        try:
            return list(text_string_to_metric_families(text))
        except ValueError as error:  # its lines are well-formed, but contradict each other
            logger.warning("metrics of %s left out: %r", engine.name, str(error)[:200])
            return []

    @staticmethod
    def _add(families: dict[str, Metric], family: Metric, labels: dict[str, str]) -> None:
        merged = families.setdefault(family.name, Metric(family.name, _OF_ENGINES, family.type))
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                merged.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
