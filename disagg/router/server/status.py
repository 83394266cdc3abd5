"""The router's status as one JSON document: engines, pairings, handoffs, requests, failures.

It is made from the metrics of router and engines at most once a second, however many clients ask.
Counters are totals: a client computes rates from two documents. The document must never contain
any part of a prompt, or an address. Without a key it has only words that the router itself chose,
and numbers.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from disagg.config import TransferSection
from disagg.router.server.failures import open_part
from disagg.router.server.models import Models
from disagg.router.server.peer_processes import PeerProcesses
from disagg.router.server.sampler import SILENT, UP
from disagg.router.telemetry.engine_metrics import Cached, EngineTexts, samples
from disagg.router.topology import EngineEndpoint, role_of

PATH = "/ui/state"
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "disagg_leases_held": "leases",
}
_OUTCOMES = frozenset(["loaded", "failed", "aborted", "bytes", "hidden_bytes"])
_TRANSPORTS = frozenset(TransferSection().transports)
_OTHER = "other"  # in place of a word that an engine chose
_CACHES = {
    "disagg_router_cache_prompt_tokens_total": "prompt_tokens",
    "disagg_router_cache_expected_tokens_total": "expected_tokens",
    "disagg_router_cache_reported_tokens_total": "reported_tokens",
}
_SOURCES, _SHARED = "disagg_router_sources_total", "disagg_router_shared_tokens_total"
_TIMES = ("ttft", "between_chunks", "prefill", "handoff", "queue")


class Status:
    """Makes the status document."""

    def __init__(self, texts: EngineTexts, models: Models) -> None:
        self._texts, self._models = texts, models
        self._cached: Cached[dict[str, Any]] | None = None

    async def document(self, peer_processes: PeerProcesses, *, has_key: bool) -> dict[str, Any]:
        """The document: at most a second old, and for the current engines. docs/router.md
        describes its fields. `has_key`: whether the viewer may see all of it."""
        if self._cached is None:
            self._cached = Cached(lambda: self._make(peer_processes))
        made = await self._cached.get((self._models.engines, self._models.down))
        return made if has_key else _for_everybody(made)

    async def _make(self, peer_processes: PeerProcesses) -> dict[str, Any]:
        down = self._models.down
        own, texts, failures = await asyncio.gather(
            peer_processes.figures(), self._texts.get(), peer_processes.failures()
        )
        shown = [self._engine(*pair) for pair in texts]
        away = [
            {"name": name, "role": role_of(name), "state": one.why} for name, one in down.items()
        ]
        return {
            "at": time.time(),
            "engines": sorted(shown + away, key=lambda e: (e["role"] != "prefill", e["name"])),
            "router": {**_router(own.decode()), **self._caches(own.decode())},
            "failures": failures["latest"],
            "failure_groups": failures["groups"],
        }

    def _caches(self, text: str) -> dict[str, Any]:
        """What caches spared, and how engines shared them; None where the settings have neither."""
        caches, sources, shared = dict.fromkeys(_CACHES.values(), 0.0), dict[str, float](), 0.0
        for name, labels, value in samples(text, (*_CACHES, _SOURCES, _SHARED)):
            if name in _CACHES:
                caches[_CACHES[name]] += value
            elif name == _SOURCES:
                sources[labels["outcome"]] = sources.get(labels["outcome"], 0.0) + value
            elif name == _SHARED:
                shared += value
        sharing = {"sources": sources, "tokens": shared}
        return {
            "caches": caches if self._models.hears_caches else None,
            "sharing": sharing if self._models.shares_caches else None,
        }

    def _engine(self, engine: EngineEndpoint, text: str | None) -> dict[str, Any]:
        problem = self._models.problem(engine) or (None if text else SILENT)
        return {
            "name": engine.name,
            "role": engine.role,
            "state": problem or UP,
            **_engine_figures(text or ""),
        }


def _for_everybody(document: dict[str, Any]) -> dict[str, Any]:
    """The document without words that an engine or a client chose."""
    failures = {"latest": document["failures"], "groups": document["failure_groups"]}
    shown = open_part(failures)
    return {
        **document,
        "engines": [_open_engine(engine) for engine in document["engines"]],
        "failures": shown["latest"],
        "failure_groups": shown["groups"],
    }


def _open_engine(engine: dict[str, Any]) -> dict[str, Any]:
    shown = dict(engine)
    if "handoffs" in engine:
        by_transport: dict[str, dict[str, float]] = {}
        shown["handoffs"] = by_transport
        for transport, totals in engine["handoffs"].items():
            name = transport if transport in _TRANSPORTS else _OTHER
            known = {key: value for key, value in totals.items() if key in _OUTCOMES}
            _add(by_transport.setdefault(name, {}), known)
    if "load_failures" in engine:
        count = sum(engine["load_failures"].values())
        shown["load_failures"] = {"all": count} if count else {}
    return shown


def _add(totals: dict[str, float], more: dict[str, float]) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0.0) + value


def _engine_figures(text: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    by_transport: dict[str, dict[str, float]] = {}
    reasons: dict[str, float] = {}
    for name, labels, value in samples(text, (*_GAUGES, "disagg_handoff", "disagg_kv_load")):
        totals = by_transport.setdefault(labels.get("transport", ""), {})
        match name:
            case "disagg_handoffs_total":
                outcome = labels.get("outcome", "")
                totals[outcome] = totals.get(outcome, 0.0) + value
            case "disagg_handoff_bytes_total":
                totals["bytes"] = value
            case "disagg_handoff_hidden_bytes_total":
                totals["hidden_bytes"] = value
            case "disagg_handoff_seconds_sum":
                shown["handoff_seconds"] = value
            case "disagg_kv_load_failures_total":
                reasons[labels.get("reason", "")] = value
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
    for name, labels, value in samples(text, "disagg_router_"):
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
