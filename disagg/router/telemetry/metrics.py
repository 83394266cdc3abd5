"""The router's own metrics, and those of the engines behind it, as one exposition.

Every `disagg_*` family of every engine is shown with the labels `engine` and `role`, and of
vLLM's own the few that tell how busy an engine is. A dead engine costs its series and a short
wait, nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from disagg.router.topology import EngineEndpoint, Topology, role_of

SCRAPE_S = 2.0
_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# Of the thousands of lines that each engine has.
OF_VLLM = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:inter_token_latency_seconds",
    }
)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class RouterMetrics:
    """One set per app, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # A counter of each set of labels that was met; the library looks for it for longer than
        # it takes to count.
        self._met: dict[tuple[object, ...], Counter] = {}
        self.requests = Counter(
            "disagg_router_requests",
            "Requests by the endpoint and the status the client got (499: the client left).",
            ("route", "status"),
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "disagg_router_in_flight",
            "Requests that have a seat at an engine of this role: are there, or on the way.",
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
        self.first_tokens = Counter(
            "disagg_router_first_tokens_from_prefill",
            "Streams that began with the prefill engine's first token.",
            registry=self.registry,
        )
        self.pairings = Counter(
            "disagg_router_pairings",
            "Requests that were handed over, by who computed the prompt and who answered.",
            ("prefill", "decode"),
            registry=self.registry,
        )
        self.releases = Counter(
            "disagg_router_releases",
            "Leases given back because nobody will fetch them, by how that went.",
            ("outcome",),
            registry=self.registry,
        )
        self.retries = Counter(
            "disagg_router_retries",
            "Legs sent to another engine because the first one failed.",
            ("role",),
            registry=self.registry,
        )
        self.engine_resting = Gauge(
            "disagg_router_engine_resting",
            "1 while an engine that keeps failing gets trial requests alone.",
            ("engine", "role"),
            registry=self.registry,
        )
        self.migrations = Counter(
            "disagg_router_migrations",
            "Streams whose engine died, by how another one went on with them, if any did.",
            ("outcome",),
            registry=self.registry,
        )
        self.queued = Gauge(
            "disagg_router_queued",
            "Requests that wait for a seat at an engine.",
            registry=self.registry,
        )
        self.queue_time = self._seconds("queue", "How long requests waited that had to wait.")
        self.prefill_time = self._seconds("prefill", "From a prefill leg's begin to its answer.")
        self.handoff_time = self._seconds(
            "handoff", "From a prefill leg's answer to the first bytes of decode's."
        )
        self.between_chunks = self._seconds(
            "between_chunks", "Mean time between the chunks of an answer.", _BETWEEN
        )

    def answered(self, route: str, status: int) -> None:
        """A request of this route is over."""
        self._count(self.requests, route, status)

    def paired(self, prefill: str, decode: str) -> None:
        """A request was handed over between these."""
        self._count(self.pairings, prefill, decode)

    def _count(self, family: Counter, *labels: object) -> None:
        key = (family, *labels)
        counter = self._met.get(key)
        if counter is None:
            counter = self._met[key] = family.labels(*labels)
        counter.inc()

    def _seconds(
        self, name: str, documentation: str, buckets: Sequence[float] = _TTFT
    ) -> Histogram:
        full = f"disagg_router_{name}_seconds"
        return Histogram(full, documentation, buckets=buckets, registry=self.registry)


class EnginesUp(Collector):
    """Which engines are up, also of those that are away. `problem`: why one is not."""

    def __init__(self, topology: Topology, problem: Callable[[EngineEndpoint], str | None]) -> None:
        self._topology, self._problem = topology, problem

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "disagg_router_engine_up",
            "1, or 0 for an engine that is away or has a problem; /ui says which.",
            labels=("engine", "role"),
        )
        for engine in self._topology.engines:
            up.add_metric((engine.name, engine.role), float(self._problem(engine) is None))
        for name in self._topology.down:
            up.add_metric((name, role_of(name)), 0.0)
        yield up


async def exposition(
    own: bytes, client: aiohttp.ClientSession, engines: Sequence[EngineEndpoint]
) -> bytes:
    """The text of /metrics; `own` is the router's part."""
    texts = await asyncio.gather(*(scrape(client, engine) for engine in engines))
    registry = CollectorRegistry()
    registry.register(_Merged(engines, texts))
    return own + generate_latest(registry)


async def scrape(client: aiohttp.ClientSession, engine: EngineEndpoint) -> str | None:
    """The engine's metrics; None if it gives none in time."""
    timeout = aiohttp.ClientTimeout(total=SCRAPE_S)
    try:
        async with client.get(f"{engine.url}/metrics", timeout=timeout) as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return None


class _Merged(Collector):
    """Families of the same name from several engines, told apart by labels."""

    def __init__(self, engines: Sequence[EngineEndpoint], texts: Sequence[str | None]) -> None:
        self._scrapes = list(zip(engines, texts, strict=True))

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for engine, text in self._scrapes:
            labels = {"engine": engine.name, "role": engine.role}
            for family in text_string_to_metric_families(text or ""):
                if family.name.startswith("disagg_") or family.name in OF_VLLM:
                    self._add(families, family, labels)
        return families.values()

    @staticmethod
    def _add(families: dict[str, Metric], family: Metric, labels: dict[str, str]) -> None:
        merged = families.setdefault(
            family.name, Metric(family.name, family.documentation, family.type)
        )
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                merged.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
