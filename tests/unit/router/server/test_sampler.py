"""Percentiles and growth, as a sample has them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, Histogram

from disagg.config import RouterSection
from disagg.router.server.model_group import ModelGroup
from disagg.router.server.models import Models
from disagg.router.server.sampler import Differences, Sampler, _Histogram, percentile
from disagg.router.telemetry.engine_metrics import EngineTexts
from disagg.router.topology import EngineEndpoint

INF = math.inf
ENGINE = EngineEndpoint("decode-0", "decode", "http://decode")


@pytest.mark.parametrize(
    ("buckets", "share", "wanted"),
    [
        ({}, 0.5, None),
        ({1.0: 0.0, INF: 0.0}, 0.5, None),
        ({1.0: 4.0}, 0.5, 0.5),
        ({1.0: 1.0, 2.0: 1.0}, 0.5, 1.0),
        ({1.0: 1.0, 2.0: 1.0, INF: 0.0}, 0.99, 1.98),
        ({1.0: 0.0, 2.0: 2.0}, 0.5, 1.5),
        ({1.0: 1.0, 2.0: 0.0, 5.0: 1.0}, 0.75, 3.5),
        ({1.0: 1.0, INF: 9.0}, 0.99, 1.0),  # the last bound, of what is beyond it
    ],
)
def test_percentiles(buckets: dict[float, float], share: float, wanted: float | None) -> None:
    assert percentile(share, buckets) == (None if wanted is None else pytest.approx(wanted))


def test_percentiles_are_in_the_bucket_of_the_true_value() -> None:
    draw = random.Random(1)
    bounds = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    values = sorted(draw.lognormvariate(-3, 0.7) for _ in range(5000))
    family = Histogram("h", "h", ["process"], buckets=bounds, registry=CollectorRegistry())
    for number, value in enumerate(values):
        family.labels(str(number % 3)).observe(value)
    summed = _Histogram()
    for metric in family.collect():
        for sample in metric.samples:
            if sample.name == "h_bucket":
                summed.add(dict(sample.labels), sample.value)
    buckets = summed.buckets()
    assert sum(buckets.values()) == len(values)
    for share in (0.01, 0.5, 0.9, 0.99):
        true, found = values[int(share * len(values))], percentile(share, buckets)
        assert found is not None
        lower = max((bound for bound in bounds if bound < true), default=0.0)
        upper = min(bound for bound in bounds if bound >= true)
        assert lower <= found <= upper


def read(grown: Differences, *values: tuple[str, float], anew: bool = False) -> list[float]:
    grown.begin(anew=anew)
    return [grown.of(("a", ""), key, value) for key, value in values]


def test_growth() -> None:
    grown = Differences()
    assert read(grown, ("x", 5.0)) == [0]  # nobody knows since when
    assert read(grown, ("x", 7.0), ("y", 3.0)) == [2, 3]  # y is new, and began at 0
    assert read(grown, ("x", 7.0), ("y", 1.0)) == [0, 1]  # y began again
    assert grown.reset == {("a", "")}
    assert read(grown, ("x", 9.0), ("y", 1.0)) == [2, 0]
    assert grown.reset == set()
    assert read(grown, ("x", 90.0), anew=True) == [0]
    assert read(grown) == []  # it does not answer
    assert read(grown, ("x", 95.0)) == [0]  # nobody knows what was meanwhile


class Texts(EngineTexts):
    """Readings that were made at these times, in place of an engine's."""

    def __init__(self) -> None:
        self.read_at, self.tokens = {}, 0

    def read(self, at: float, tokens: int) -> None:
        self.read_at, self.tokens = {ENGINE.name: at}, tokens

    async def get(self, *, fresh: bool = False) -> Sequence[tuple[EngineEndpoint, str | None]]:
        return [(ENGINE, f"vllm:generation_tokens_total {self.tokens}\n")]


def test_rates_are_over_the_time_between_readings_of_the_same_engine() -> None:
    """Not over the time between samples: an engine may have been slow, or read for a viewer."""
    group = ModelGroup("", RouterSection(), [ENGINE], {}, connector="disagg", strict=False)
    texts = Texts()
    sampler = Sampler(texts, Models([group]))

    async def own() -> bytes:
        return b'disagg_router_requests_total{route="other",status="200"} 5\n'

    async def tokens() -> float | None:
        shown: float | None = (await sampler.take(own))["sample"]["tokens"]
        return shown

    async def run() -> list[float | None]:
        rates = []
        for at, count in ((1000.0, 50), (1002.5, 300), (1003.0, 350), (1090.0, 9000)):
            texts.read(at, count)
            rates.append(await tokens())
        return rates

    # Nobody knows since when; 250 in 2.5 s; 50 in 0.5 s; after a gap, nobody knows either.
    assert asyncio.run(run()) == [None, 100, 100, None]
