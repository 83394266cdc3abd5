"""The router's status as one JSON document: engines, pairings, handoffs, requests, failures.

It is made from the metrics of router and engines at most once a second, however many clients ask.
Counters are totals: a client computes rates from two documents. The document must never contain
any part of a prompt, or an address.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import aiohttp

from disagg.router.engines.health import Health
from disagg.router.server.peer_processes import PeerProcesses
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import scrape
from disagg.router.topology import EngineEndpoint, Topology, role_of

PATH = "/ui/state"
_FRESH_S = 1.0
_FAILURES = 50
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "disagg_leases_held": "leases",
}
_TIMES = ("ttft", "between_chunks", "prefill", "handoff", "queue")


class Failures:
    """The last requests of this router process that failed, were retried or migrated."""

    def __init__(self) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=_FAILURES)

    def note(self, status: int, record: Record, why: str | None) -> None:
        """Record a finished request, if any part of it failed."""
        if status < 500 and not record.retries and not record.migrations:
            return
        shown = record.shown()
        shown.pop("key", None)
        self._kept.append({"at": time.time(), "status": status, "why": why, **shown})

    def latest(self) -> list[dict[str, Any]]:
        """The latest first."""
        return list(reversed(self._kept))


class Status:
    """Makes the status document."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        topology: Topology,
        health: Health,
        failures: Failures,
    ) -> None:
        self._client, self._topology = client, topology
        self._health, self._failures = health, failures
        self._lock = asyncio.Lock()
        self._made: dict[str, Any] = {}
        self._made_at = float("-inf")
        self._made_for: tuple[object, object] = (None, None)

    async def document(self, peer_processes: PeerProcesses) -> dict[str, Any]:
        """The document: at most a second old, and for the current engines. docs/router.md
        describes its fields."""
        async with self._lock:
            if time.monotonic() - self._made_at > _FRESH_S or self._made_for != self._known():
                self._made_for = self._known()
                self._made = await self._make(peer_processes)
                self._made_at = time.monotonic()
        return self._made

    def _known(self) -> tuple[object, object]:
        return self._topology.engines, self._topology.down

    async def _make(self, peer_processes: PeerProcesses) -> dict[str, Any]:
        engines, down = self._topology.engines, self._topology.down
        scrapes = asyncio.gather(*(scrape(self._client, engine) for engine in engines))
        own, texts = await asyncio.gather(peer_processes.figures(), scrapes)
        shown = [self._engine(*pair) for pair in zip(engines, texts, strict=True)]
        away = [{"name": name, "role": role_of(name), "state": why} for name, why in down.items()]
        return {
            "at": time.time(),
            "engines": sorted(shown + away, key=lambda e: (e["role"] != "prefill", e["name"])),
            "router": _router(own.decode()),
            "failures": self._failures.latest(),
        }

    def _engine(self, engine: EngineEndpoint, text: str | None) -> dict[str, Any]:
        problem = self._health.problem(engine) or (None if text else "does not answer /metrics")
        return {
            "name": engine.name,
            "role": engine.role,
            "state": problem or "up",
            **_engine_figures(text or ""),
        }


def _engine_figures(text: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    by_transport: dict[str, dict[str, float]] = {}
    reasons: dict[str, float] = {}
    for name, labels, value in _samples(text, (*_GAUGES, "disagg_handoff", "disagg_kv_load")):
        totals = by_transport.setdefault(labels.get("transport", ""), {})
        match name:
            case "disagg_handoffs_total":
                totals[labels["outcome"]] = totals.get(labels["outcome"], 0.0) + value
            case "disagg_handoff_bytes_total":
                totals["bytes"] = value
            case "disagg_handoff_seconds_sum":
                shown["handoff_seconds"] = value
            case "disagg_kv_load_failures_total":
                reasons[labels["reason"]] = value
            case _ if name in _GAUGES:
                shown[_GAUGES[name]] = shown.get(_GAUGES[name], 0.0) + value
    shown["handoffs"] = {name: totals for name, totals in by_transport.items() if totals}
    shown["load_failures"] = {reason: count for reason, count in reasons.items() if count}
    return shown


def _router(text: str) -> dict[str, Any]:
    requests: dict[str, float] = {}
    in_flight: dict[str, float] = {}
    pairings: dict[tuple[str, str], float] = {}
    local: dict[str, float] = {}
    sums = {name: {"sum": 0.0, "count": 0.0} for name in _TIMES}
    queued = 0.0
    for name, labels, value in _samples(text, ("disagg_router_",)):
        short = name.removeprefix("disagg_router_")
        match short:
            case "requests_total":
                requests[labels["status"]] = requests.get(labels["status"], 0.0) + value
            case "in_flight":
                in_flight[labels["role"]] = in_flight.get(labels["role"], 0.0) + value
            case "local_total":
                local[labels["reason"]] = local.get(labels["reason"], 0.0) + value
            case "pairings_total":
                pair = labels["prefill"], labels["decode"]
                pairings[pair] = pairings.get(pair, 0.0) + value
            case "queued":
                queued += value
            case _:
                time_of, _, part = short.rpartition("_seconds_")
                if time_of in sums and part in ("sum", "count"):
                    sums[time_of][part] += value
    return {
        "requests": requests,
        "in_flight": in_flight,
        "queued": queued,
        "local": local,
        "pairings": [
            {"prefill": prefill, "decode": decode, "requests": count}
            for (prefill, decode), count in sorted(pairings.items())
        ],
        "seconds": sums,
    }


def _samples(text: str, prefixes: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str], float]]:
    """The samples whose names begin with a prefix. Other lines, of thousands, are not parsed."""
    for line in text.splitlines():
        if line.startswith(prefixes):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            pairs = (pair.partition("=") for pair in labels.rstrip("}").split(",") if pair)
            yield name, {key: quoted.strip('"') for key, _, quoted in pairs}, float(value)
