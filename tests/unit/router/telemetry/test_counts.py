"""The router's own counters and histograms show what those of `prometheus_client` would show."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from disagg.router.telemetry.counts import Counts, Seconds
from disagg.router.telemetry.metrics import text_of

BOUNDS = (0.005, 0.5, 1, 10)
# Each bound, what is beside it, and what no bound holds.
DURATIONS = (0.0, 0.005, 0.0051, 0.3, 0.5, 1.0, 1.5, 10.0, 10.1, 1e6)


def text(registry: Collector) -> list[str]:
    return text_of(registry).decode().splitlines()


def test_durations() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = Seconds("wait_seconds", "How long.", BOUNDS, ours)
    other = Histogram("wait_seconds", "How long.", buckets=BOUNDS, registry=theirs)
    assert text(ours) == text(theirs)
    for duration in random.Random(1).choices(DURATIONS, k=100):
        own.observe(duration)
        other.observe(duration)
    assert text(ours) == text(theirs)


def test_counts() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = Counts("requests", "Requests.", ("route", "status"), ours)
    other = Counter("requests", "Requests.", ("route", "status"), registry=theirs)
    assert text(ours) == text(theirs)
    for labels in (("/a", 200), ("/b", 200), ("/a", 200), ("/a", 404)):
        own.add(*labels)
        other.labels(*labels).inc()
    assert text(ours) == text(theirs)


def test_series_that_are_gone() -> None:
    registry = CollectorRegistry()
    pairings = Counts("pairings", "Pairings.", ("prefill", "decode"), registry)
    pairings.add("prefill-0", "decode-0")
    pairings.add("prefill-1", "decode-0")
    pairings.forget("prefill-0")
    shown = generate_latest(registry).decode()
    assert "prefill-0" not in shown
    assert 'pairings_total{decode="decode-0",prefill="prefill-1"} 1.0' in shown
