"""Prometheus series of what the router hears of the engines' caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disagg.router.caches.events import EngineEvents

_COUNTS = {
    "disagg_router_cache_batches": "Batches of KV events that were applied.",
    "disagg_router_cache_gaps": "Times that batches of KV events were missing.",
    "disagg_router_cache_replays": "Times that an engine was asked for its last KV events.",
    "disagg_router_cache_dropped": "Times that what was known of an engine's cache was dropped.",
    "disagg_router_cache_malformed": "Batches and KV events that could not be read.",
}


class CacheMetrics(Collector):
    """`events`: of each engine that is followed, by its name."""

    def __init__(self, events: Callable[[], Mapping[str, EngineEvents]]) -> None:
        self._events = events

    def collect(self) -> Iterable[Metric]:
        each = dict(self._events())
        known = GaugeMetricFamily(
            "disagg_router_cache_blocks",
            "Blocks that the engine's caches hold, as the router knows.",
            labels=("engine",),
        )
        moved = CounterMetricFamily(
            "disagg_router_cache_event_blocks",
            "Blocks in KV events that were applied.",
            labels=("engine", "event"),
        )
        ignored = CounterMetricFamily(
            "disagg_router_cache_ignored_blocks",
            "Blocks in KV events that were left out, by reason.",
            labels=("engine", "reason"),
        )
        for name, events in each.items():
            picture = events.picture
            known.add_metric((name,), len(picture))
            moved.add_metric((name, "stored"), picture.stored)
            moved.add_metric((name, "removed"), picture.removed)
            for reason, count in sorted(picture.ignored.items()):
                ignored.add_metric((name, reason), count)
        yield from (known, moved, ignored)
        for family_name, documentation in _COUNTS.items():
            family = CounterMetricFamily(family_name, documentation, labels=("engine",))
            what = family_name.rpartition("_")[2]
            for name, events in each.items():
                family.add_metric((name,), getattr(events.counts, what))
            yield family
