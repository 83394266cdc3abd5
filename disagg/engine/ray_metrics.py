"""Publishes a process's Prometheus metrics in Ray's metrics endpoint as well.

So the Prometheus of a Ray cluster finds engines and router without configuration. A sample keeps
its name (`:` becomes `_`, and Ray adds the prefix `ray_`), its labels and its value. In Ray every
sample is a gauge, for three reasons. Ray's counters and histograms send increments, so a lost
report makes them wrong. Ray estimates a histogram's sum from its buckets. And they stay when the
process has ended. PromQL does not depend on the type.

Must never delay requests: a walk over all metrics runs in a thread and yields after each family. An
error in a walk costs only metrics, and is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import ray
from prometheus_client.core import Metric
from ray.util.metrics import Gauge

logger = logging.getLogger(__name__)

# Share of Ray's report interval between two walks. A process reports each value once, and Ray's
# agent drops a value that is not reported again.
_INTERVAL_SHARE = 0.8
# Metrics of the Python process. Ray shows memory and CPU of each actor itself.
_PROCESS_PREFIXES = ("python_", "process_")


class RaySample(NamedTuple):
    """One sample for Ray."""

    name: str
    documentation: str
    tags: dict[str, str]
    value: float


def ray_samples(families: Iterable[Metric], tags: Mapping[str, str]) -> Iterator[list[RaySample]]:
    """The samples of each family for Ray. `tags` are added, and replace labels of the same name."""
    for family in families:
        if not family.name.startswith(_PROCESS_PREFIXES):
            yield [
                RaySample(
                    sample.name.replace(":", "_"),
                    family.documentation,
                    {**sample.labels, **tags},
                    sample.value,
                )
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]


def every_s() -> float:
    """Seconds between two walks: less than Ray's report interval, which is 10 s by default."""
    interval_ms: int = ray._config.metrics_report_interval_ms()
    return _INTERVAL_SHARE * max(1.0, interval_ms / 1000)


class RayMetrics:
    """Publishes one process's metrics. `tags` are added to every sample."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        self._tags = tags
        self._gauges: dict[str, Gauge] = {}

    def publish_once(self, families: Iterable[Metric]) -> None:
        """Give these values to Ray, which shows them until the next walk."""
        for samples in ray_samples(families, self._tags):
            for name, documentation, tags, value in samples:
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, documentation, tuple(tags))
                self._gauges[name].set(value, tags)
            time.sleep(0)  # yield the GIL to the server's threads

    async def publish(
        self, families: Callable[[], Awaitable[Iterable[Metric]]], stop: asyncio.Event
    ) -> None:
        """Publish all families every `every_s` seconds, until `stop` is set."""
        failed = False
        while not stop.is_set():
            try:
                await asyncio.to_thread(self.publish_once, await families())
            except Exception:
                if not failed:
                    logger.exception("Ray's metrics endpoint does not show all metrics of disagg")
                failed = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s()):
                    await stop.wait()
