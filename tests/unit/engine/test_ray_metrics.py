"""The samples for Ray's metrics endpoint. tests/cluster/test_serve.py reads that endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from disagg.engine import ray_metrics
from disagg.engine.ray_metrics import RayMetrics, RaySample, ray_samples

TAGS = {"deployment": "two", "engine": "decode-1", "role": "decode"}


@pytest.fixture
def registry() -> CollectorRegistry:
    """Metric families like those of vLLM, our connector and our router."""
    registry = CollectorRegistry()
    labels = ("model_name", "engine")
    tokens = Counter("vllm:generation_tokens", "Tokens.", labels, registry=registry)
    tokens.labels("tiny", "0").inc(4)
    seconds = Histogram("disagg_handoff_seconds", "Seconds.", buckets=(0.1, 1), registry=registry)
    for value in (0.05, 0.5, 0.25):
        seconds.observe(value)
    Gauge("disagg_router_in_flight", "Seats.", ("role",), registry=registry).labels("prefill")
    Gauge("process_open_fds", "Of the process.", registry=registry).set(3)
    return registry


def by_name(families: Iterable[Metric], tags: dict[str, str]) -> dict[str, list[RaySample]]:
    found: dict[str, list[RaySample]] = {}
    for sample in (sample for family in ray_samples(families, tags) for sample in family):
        found.setdefault(sample.name, []).append(sample)
    return found


def test_names_labels_and_values_stay(registry: CollectorRegistry) -> None:
    families = by_name(registry.collect(), TAGS)
    assert set(families) == {
        "vllm_generation_tokens_total",
        "disagg_handoff_seconds_bucket",
        "disagg_handoff_seconds_sum",
        "disagg_handoff_seconds_count",
        "disagg_router_in_flight",
    }
    assert families["vllm_generation_tokens_total"] == [
        RaySample("vllm_generation_tokens_total", "Tokens.", {"model_name": "tiny", **TAGS}, 4)
    ]
    buckets = families["disagg_handoff_seconds_bucket"]
    assert {sample.tags["le"]: sample.value for sample in buckets} == {
        "0.1": 1,
        "1.0": 3,
        "+Inf": 3,
    }
    assert families["disagg_handoff_seconds_sum"][0].value == 0.8
    assert families["disagg_handoff_seconds_count"][0].value == 3


def test_the_routers_metrics_keep_their_role_label(registry: CollectorRegistry) -> None:
    text = generate_latest(registry).decode()
    families = by_name(text_string_to_metric_families(text), {"deployment": "two"})
    assert families["disagg_router_in_flight"] == [
        RaySample("disagg_router_in_flight", "Seats.", {"role": "prefill", "deployment": "two"}, 0)
    ]
    assert families["vllm_generation_tokens_total"][0].tags["engine"] == "0"


def test_a_failed_walk_is_logged_once_and_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_metrics, "every_s", lambda: 0.01)
    walks = 0

    async def go() -> None:
        over = asyncio.Event()

        async def families() -> Iterable[Metric]:
            nonlocal walks
            walks += 1
            if walks == 3:
                over.set()
            raise ConnectionResetError("the router's processes are ending")

        async with asyncio.timeout(10):
            await RayMetrics({}).publish(families, over)

    with caplog.at_level(logging.ERROR, ray_metrics.__name__):
        asyncio.run(go())
    assert walks == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
