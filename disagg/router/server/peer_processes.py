"""The router processes that share one port, as each of them sees the others.

What concerns all of them (a drain, the metrics) is asked here, whichever process a request came
to. Never part of a completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from disagg.router.server.drain import Drain


class PeerProcesses(Protocol):
    """All processes of one router."""

    async def drain(self, on: bool) -> int:
        """Refuse new requests in all of them, or take them again; what they still serve."""

    async def in_flight(self) -> int:
        """Requests that all of them are serving."""

    async def figures(self) -> bytes:
        """The router's own metrics, of all of them."""


class Alone:
    """The one process of its router. `asked`: somebody asked for a drain by command."""

    def __init__(self, drain: Drain, registry: CollectorRegistry) -> None:
        self._drain, self._registry = drain, registry
        self.asked = asyncio.Event()

    async def drain(self, on: bool) -> int:
        if on:
            self._drain.begin()
            self.asked.set()
        else:
            self._drain.undo()
        return self._drain.in_flight

    async def in_flight(self) -> int:
        return self._drain.in_flight

    async def figures(self) -> bytes:
        return generate_latest(self._registry)


def together(texts: Mapping[int, str]) -> bytes:
    """The metrics of several processes as one text, told apart by the label `process`.

    Not added up: a process that was started anew counts from zero, which Prometheus understands
    of a series of its own, but not of a sum.
    """
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class _Labelled(Collector):
    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for process, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                shown = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "process": str(process)}
                    shown.add_sample(sample.name, labels, sample.value)
        return families.values()
