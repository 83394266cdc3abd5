"""One sample of a router's and its engines' metrics: rates and percentiles since the sample before.

All come from counters and histograms that are kept anyway, so a request costs nothing more. What is
not known is None, never 0.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypedDict

from disagg.router.server.models import Models
from disagg.router.telemetry.engine_metrics import EngineTexts, samples
from disagg.router.topology import EngineEndpoint

EVERY_S = 2.0
UP = "up"
LEAVES = frozenset(["drains"])  # words for an engine that is asked to go
SILENT = "does not answer /metrics"
_LONGEST_S = 5 * EVERY_S  # between two samples whose difference still means something
_ROUTER = "disagg_router_"
_OF_ROUTER = tuple(
    _ROUTER + name
    for name in (
        "requests_total",
        "ttft_seconds_bucket",
        "between_chunks_seconds_bucket",
        "queued",
        "in_flight",
        "pairings_total",
        "cache_prompt_tokens_total",
        "cache_reported_tokens_total",
        "shared_tokens_total",
    )
)
_OF_ENGINES = (
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "disagg_handoff_bytes_total",
    "disagg_handoff_hidden_bytes_total",
    "disagg_handoff_seconds_sum",
)
_OWN = ""  # beside the names of engines
_DIGITS = 4  # of the numbers in a sample

Buckets: TypeAlias = Mapping[float, float]
"""How many fell into each bucket alone, by its upper bound."""
Source: TypeAlias = tuple[str, str]
"""A router process, or an engine at a URL."""
Texts: TypeAlias = Sequence[tuple[EngineEndpoint, str | None]]


class Taken(TypedDict):
    """sample: see `docs/router.md`. states: `up` or why not, by engine. restarted: engines that
    began anew since the sample before."""

    sample: dict[str, Any]
    states: dict[str, str]
    restarted: list[str]


def percentile(share: float, buckets: Buckets) -> float | None:
    """Where this share of the values ends, by a straight line inside its bucket; None without
    values. Values above the last bound count as that bound."""
    count = sum(buckets.values())
    if count <= 0:
        return None
    wanted, below, lower = share * count, 0.0, 0.0
    for upper in sorted(buckets):
        inside = buckets[upper]
        if inside > 0 and below + inside >= wanted:
            if upper == float("inf"):
                return lower
            return lower + (upper - lower) * (wanted - below) / inside
        below += inside
        if upper != float("inf"):
            lower = upper
    return lower


class Differences:
    """How much counters grew between two readings. A counter that fell began again at zero. One
    that is new began at zero too, if its source was read before."""

    def __init__(self) -> None:
        self._before: dict[Hashable, float] = {}
        self._now: dict[Hashable, float] = {}
        self._sources: set[Source] = set()
        self._new_sources: set[Source] = set()
        self.reset: set[Source] = set()
        """The sources of which a counter fell in this reading."""

    def begin(self, *, anew: bool) -> None:
        """Begin a reading. `anew`: the reading before means nothing."""
        self._before, self._now = ({} if anew else self._now), {}
        self._sources, self._new_sources = (set() if anew else self._new_sources), set()
        self.reset = set()

    def of(self, source: Source, key: Hashable, value: float) -> float:
        """The growth of this counter."""
        full = source, key
        self._now[full] = value
        self._new_sources.add(source)
        if source not in self._sources:
            return 0.0
        before = self._before.get(full, 0.0)
        if value < before:
            self.reset.add(source)
            return value
        return value - before


class Sampler:
    """Takes samples in one router process."""

    def __init__(self, texts: EngineTexts, models: Models) -> None:
        self._texts, self._models = texts, models
        self._grown = Differences()
        self._read_at: dict[str, float] = {}
        self._urls: dict[str, str] = {}

    async def take(self, own: Callable[[], Awaitable[bytes]]) -> Taken:
        """A sample of now. `own`: the metrics of all processes of the router, as text."""

        async def read() -> tuple[bytes, float]:
            return await own(), time.monotonic()

        (text, at), texts = await asyncio.gather(read(), self._texts.get())
        seconds = self._seconds({_OWN: at, **self._texts.read_at})
        self._grown.begin(anew=_OWN not in seconds)
        router, chunks = self._router(text.decode(), seconds.get(_OWN))
        engines, tokens = self._engines(texts, seconds)
        between, between_of = _percentiles(tokens), "tokens"
        if between is None:  # engines that tell no time between tokens
            between, between_of = _percentiles(chunks), "chunks"
        sample = {
            "at": round(time.time(), 3),
            **router,
            "between": between,
            "between_of": None if between is None else between_of,
            **engines,
        }
        return {"sample": sample, "states": self._states(texts), "restarted": self._restarted()}

    def _seconds(self, read_at: dict[str, float]) -> dict[str, float]:
        """For each source, the time between this reading and the one before. They differ: an
        engine may be slow, and another viewer may have had its metrics read a second ago."""
        passed = {name: at - self._read_at.get(name, at) for name, at in read_at.items()}
        self._read_at = read_at
        return {name: seconds for name, seconds in passed.items() if 0 < seconds <= _LONGEST_S}

    def _router(self, text: str, seconds: float | None) -> tuple[dict[str, Any], Buckets]:
        requests = failed = queued = in_flight = prompts = spared = shared = 0.0
        pairs: defaultdict[tuple[str, str], float] = defaultdict(float)
        first, chunks = _Histogram(), _Histogram()
        for name, labels, value in samples(text, _OF_ROUTER):
            source = "router", labels.get("process", "")
            grown = partial(self._grown.of, source, (name, *sorted(labels.items())), value)
            match name.removeprefix(_ROUTER):
                case "requests_total":
                    more = grown()
                    requests += more
                    failed += more if labels["status"] >= "500" else 0.0
                case "pairings_total":
                    pairs[labels["prefill"], labels["decode"]] += grown()
                case "ttft_seconds_bucket":
                    first.add(labels, grown())
                case "between_chunks_seconds_bucket":
                    chunks.add(labels, grown())
                case "cache_prompt_tokens_total":
                    prompts += grown()
                case "cache_reported_tokens_total":
                    spared += grown()
                case "shared_tokens_total":
                    shared += grown()
                case "queued":
                    queued += value
                case "in_flight" if labels["role"] == "decode":
                    in_flight += value
        figures = {
            "requests": _rate(requests, seconds),
            "failed": _rate(failed, seconds),
            "queued": queued,
            "in_flight": in_flight,
            "ttft": _percentiles(first.buckets()),
            "pairs": [[*pair, _rate(more, seconds)] for pair, more in pairs.items() if more],
            "spared": _short(min(1.0, spared / prompts)) if prompts > 0 else None,
            "shared": _rate(shared, seconds) if self._models.shares_caches else None,
        }
        return figures, chunks.buckets()

    def _engines(
        self, texts: Texts, seconds: Mapping[str, float]
    ) -> tuple[dict[str, Any], Buckets]:
        tokens: float | None = None
        moved = moved_a_second = moving_s = hidden = 0.0
        to: defaultdict[str, float] = defaultdict(float)
        usage: dict[str, float | None] = {}
        between = _Histogram()
        for engine, text in texts:
            is_decode, passed = engine.role == "decode", seconds.get(engine.name, math.inf)
            for name, labels, value in samples(text or "", _OF_ENGINES):
                key = (name, *sorted(labels.items()))
                grown = partial(self._grown.of, (engine.name, engine.url), key, value)
                match name:
                    case "vllm:generation_tokens_total":
                        more = grown()  # of prefill engines too: it may tell of a restart
                        if is_decode and engine.name in seconds:
                            tokens = (tokens or 0.0) + more / passed
                    case "vllm:inter_token_latency_seconds_bucket" if is_decode:
                        between.add(labels, grown(), engine.name)
                    case "vllm:kv_cache_usage_perc":
                        usage[engine.name] = _short(value)
                    case "disagg_handoff_bytes_total":
                        more = grown()
                        moved += more
                        moved_a_second += more / passed
                        to[engine.name] += more / passed
                    case "disagg_handoff_hidden_bytes_total":
                        hidden += grown()
                    case "disagg_handoff_seconds_sum":
                        moving_s += grown()
        figures = {
            "tokens": _short(tokens),
            "moved": _short(moved_a_second) if seconds.keys() - {_OWN} else None,
            "speed": _short(moved / moving_s) if moved > 0 and moving_s > 0 else None,
            "hidden": _short(min(1.0, hidden / moved)) if moved > 0 else None,
            "to": {name: _short(more) for name, more in to.items() if more},
            "kv": usage,
        }
        return figures, between.buckets()

    def _states(self, texts: Texts) -> dict[str, str]:
        states = {
            engine.name: self._models.problem(engine) or (UP if text else SILENT)
            for engine, text in texts
            if engine in self._models.engines
        }
        return states | {name: away.why for name, away in self._models.down.items()}

    def _restarted(self) -> list[str]:
        urls = {engine.name: engine.url for engine in self._models.engines}
        moved = {name for name, url in urls.items() if self._urls.get(name, url) != url}
        self._urls |= urls
        fell = {source[0] for source in self._grown.reset if source[0] in urls}
        return sorted(moved | fell)


class _Histogram:
    """The growth of a histogram's buckets, summed over its series."""

    def __init__(self) -> None:
        self._series: defaultdict[Hashable, dict[float, float]] = defaultdict(dict)

    def add(self, labels: dict[str, str], grown: float, source: str = "") -> None:
        """`labels`: of a bucket, whose count has those of all smaller buckets too."""
        bound = _number(labels.pop("le", ""))
        if bound is not None:
            self._series[source, *sorted(labels.items())][bound] = grown

    def buckets(self) -> Buckets:
        alone: defaultdict[float, float] = defaultdict(float)
        for series in self._series.values():
            below = 0.0
            for bound in sorted(series):
                alone[bound] += max(0.0, series[bound] - below)
                below = max(below, series[bound])
        return alone


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _percentiles(buckets: Buckets) -> list[float | None] | None:
    """p50 and p99; None without values."""
    if sum(buckets.values()) <= 0:
        return None
    return [_short(percentile(share, buckets)) for share in (0.5, 0.99)]


def _rate(grown: float, seconds: float | None) -> float | None:
    return None if seconds is None else _short(grown / seconds)


def _short(value: float | None) -> float | None:
    """The number with few digits; None for one that JSON has not."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
