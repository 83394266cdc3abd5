"""Shows a process's Prometheus metrics in Ray's metrics endpoint as well.

The Prometheus of a Ray cluster then finds engines and router without being told of them. A sample
keeps its name (`:` becomes `_`, and Ray puts `ray_` before it), its labels and its value. All are
gauges to Ray: its counters and histograms send increments, which a lost report falsifies, make up
a histogram's sum from its buckets, and stay when the process is gone. PromQL asks for no type.

Never in the way of requests: walks run in a thread and give way after each family. What goes wrong
in one costs metrics alone, and is logged once.
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

# Of Ray's interval. A process reports each value once, and an agent forgets what is not reported.
_PART = 0.8
# Of the Python process itself, which Ray shows of each actor.
_OF_THE_PROCESS = ("python_", "process_")


class Shown(NamedTuple):
    """One sample, as Ray gets it."""

    name: str
    documentation: str
    tags: dict[str, str]
    value: float


def shown(families: Iterable[Metric], tags: Mapping[str, str]) -> Iterator[list[Shown]]:
    """What Ray shows of each family; `tags` are added, and win over labels of the same name."""
    for family in families:
        if not family.name.startswith(_OF_THE_PROCESS):
            yield [
                Shown(
                    sample.name.replace(":", "_"),
                    family.documentation,
                    {**sample.labels, **tags},
                    sample.value,
                )
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]


def every_s() -> float:
    """Seconds between two walks, so that one falls into each report (10 s by default)."""
    interval_ms: int = ray._config.metrics_report_interval_ms()
    return _PART * max(1.0, interval_ms / 1000)


class RayMetrics:
    """Ray's side of one process's metrics."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        self._tags = tags
        self._gauges: dict[str, Gauge] = {}

    def show(self, families: Iterable[Metric]) -> None:
        """Have Ray show these values until the next walk."""
        for samples in shown(families, self._tags):
            for name, documentation, tags, value in samples:
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, documentation, tuple(tags))
                self._gauges[name].set(value, tags)
            time.sleep(0)  # the interpreter is also the server's

    async def keep(
        self, families: Callable[[], Awaitable[Iterable[Metric]]], over: asyncio.Event
    ) -> None:
        """Show them, again and again until it is `over`."""
        failed = False
        while not over.is_set():
            try:
                await asyncio.to_thread(self.show, await families())
            except Exception:
                if not failed:
                    logger.exception("Ray's metrics endpoint does not show all metrics of ours")
                failed = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), every_s())
