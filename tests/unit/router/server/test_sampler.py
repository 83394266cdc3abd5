"""Percentiles and growth, as a sample has them."""

from __future__ import annotations

import math
import random

import pytest
from prometheus_client import CollectorRegistry, Histogram

from disagg.router.server.sampler import Differences, _Histogram, percentile

INF = math.inf


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
