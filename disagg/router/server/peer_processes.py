"""The router processes that share one port.

A drain and the metrics concern all processes, whichever of them accepted the request. This module
must never be used by completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from disagg.router.server.drain import Drain
from disagg.router.server.failures import Failures, Shown
from disagg.router.server.history import History
from disagg.router.telemetry.metrics import merged, text_of


class EngineCalls(Protocol):
    """What operators may do to a router's engines."""

    async def call(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `status` (of HTTP) and `content`; `content.error` is a message."""


class PeerProcesses(Protocol):
    """All processes of one router."""

    async def drain(self, on: bool) -> int:
        """Refuse new requests in all processes, or undo that. Returns the number in flight."""

    async def in_flight(self) -> int:
        """The number of requests in flight in all processes."""

    async def figures(self) -> bytes:
        """The router's own metrics, of all processes."""

    async def failures(self) -> Shown:
        """The requests that failed, of all processes."""

    async def history(self, since: float) -> str:
        """See `History.since`."""

    async def engines(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `EngineCalls.call`."""

    async def gossip(self, message: str) -> None:
        """Pass a message of `gossip.py` to the other processes."""


class SingleProcess:
    """The only process of its router. `drain_requested`: set by a drain command."""

    def __init__(self, drain: Drain, registry: Collector, failures: Failures) -> None:
        self._drain, self._registry, self._failures = drain, registry, failures
        self.kept = History()
        self.drain_requested = asyncio.Event()
        self.engine_calls: EngineCalls | None = None

    async def drain(self, on: bool) -> int:
        if on:
            self._drain.begin()
            self.drain_requested.set()
        else:
            self._drain.undo()
        return self._drain.in_flight

    async def in_flight(self) -> int:
        return self._drain.in_flight

    async def figures(self) -> bytes:
        return text_of(self._registry)

    async def failures(self) -> Shown:
        return self._failures.shown()

    async def history(self, since: float) -> str:
        return self.kept.since(since)

    async def engines(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        return await called(self.engine_calls, name, given)

    async def gossip(self, message: str) -> None:
        """There are no others."""


async def called(
    engines: EngineCalls | None, name: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Call them, if the engines may be changed so."""
    if engines is None:
        words = "the engines are a deployment's: change them with `disagg scale` or `disagg apply`"
        return {"status": 409, "content": {"error": words}}
    return await engines.call(name, given)


def merged_metrics(texts: Mapping[int, str]) -> bytes:
    """The metrics of several processes as one text, with the label `process`.

    Counters are not summed. A restarted process counts from zero again; Prometheus handles that in
    a series of its own, but not in a sum.
    """
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class _Labelled(Collector):
    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        each = self._texts.items()
        return merged("process", ((str(n), text_string_to_metric_families(t)) for n, t in each))
