"""Counters of the tiers, from the scheduler half to vLLM's own Prometheus endpoint.

Moved bytes use the metric names and the label of vLLM's own offloading connector, the tiers'
content uses ours.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from disagg.connector.prom_metrics import PromMetrics
from disagg.store.base import IndexStats

_SIZES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
# Fields of `IndexStats`: counters, and gauges.
_COUNTS = (
    "hits",
    "misses",
    "stored",
    "stores_failed",
    "stores_refused",
    "loads_failed",
    "evictions",
    "too_slow",
)
_HELP = {"too_slow": "Requests that did not wait for a tier, since computing was faster."}
_GAUGES = ("used", "in_use", "capacity")


class OffloadStats(KVConnectorStats):
    """Counts since the last step; plain and serializable, empty if nothing happened.

    moved: medium -> [[bytes, seconds], ...]; failures: "medium|reason" -> count;
    tiers: tier -> its `IndexStats` since the start; the last one counts.
    """

    def reset(self) -> None:
        self.data = {}

    def moved(self, medium: str, num_bytes: int, seconds: float, reason: str = "") -> None:
        """One job of one rank ended."""
        if num_bytes:
            moved = self.data.setdefault("moved", {})
            moved.setdefault(medium, []).append([num_bytes, seconds])
        if reason:
            failures = self.data.setdefault("failures", {})
            label = f"{medium}|{reason}"
            failures[label] = failures.get(label, 0) + 1

    def set_tier(self, tier: str, stats: IndexStats) -> None:
        """A tier's counts since the start."""
        self.data.setdefault("tiers", {})[tier] = asdict(stats)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for medium, moved in other.data.get("moved", {}).items():
            self.data.setdefault("moved", {}).setdefault(medium, []).extend(moved)
        for label, count in other.data.get("failures", {}).items():
            failures = self.data.setdefault("failures", {})
            failures[label] = failures.get(label, 0) + count
        if "tiers" in other.data:
            self.data["tiers"] = {**self.data.get("tiers", {}), **other.data["tiers"]}
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's periodic log."""
        shown: dict[str, int | float] = {}
        for medium, moved in self.data.get("moved", {}).items():
            size, seconds = (sum(column) for column in zip(*moved, strict=True))
            shown[f"{medium} MB"] = round(size / 1e6, 1)
            shown[f"{medium} MB/s"] = round(size / 1e6 / max(seconds, 1e-9))
        for label, count in self.data.get("failures", {}).items():
            shown[f"failed {label}"] = count
        for tier, stats in self.data.get("tiers", {}).items():
            for name in ("hits", "misses", "evictions", "used"):
                shown[f"{tier} {name}"] = stats[name]
        return shown

    def is_empty(self) -> bool:
        return not self.data


class OffloadPromMetrics(PromMetrics):
    """`vllm:kv_offload_*` and `disagg_tier_*` families in the engine's `/metrics`."""

    def declare(self) -> None:
        medium = "transfer_type"
        self._bytes = self.counter(
            "vllm:kv_offload_total_bytes",
            "Bytes moved between the accelerator, host memory and files.",
            medium,
        )
        self._time = self.counter(
            "vllm:kv_offload_total_time",
            "Seconds that moving them took, all ranks together.",
            medium,
        )
        self._size = self.histogram(
            "vllm:kv_offload_size", "Bytes of one job of one rank.", medium, buckets=_SIZES
        )
        self._failures = self.counter(
            "disagg_tier_failures",
            "Jobs that failed: prompts are computed, stores forgotten.",
            medium,
            "reason",
        )
        self._counts = {
            name: self.counter(
                f"disagg_tier_{name}",
                _HELP.get(name) or f"Chunks of a tier: {name.replace('_', ' ')}.",
                "tier",
            )
            for name in _COUNTS
        }
        self._gauges = {
            name: self.gauge(
                f"disagg_tier_{name}_chunks",
                f"Chunks of a tier: {name.replace('_', ' ')} now.",
                "tier",
            )
            for name in _GAUGES
        }
        self._seen: dict[tuple[int, str, str], int] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, engine = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        for medium, moved in data.get("moved", {}).items():
            for size, seconds in moved:
                self._bytes.labels(*engine, medium).inc(size)
                self._time.labels(*engine, medium).inc(seconds)
                self._size.labels(*engine, medium).observe(size)
        for label, count in data.get("failures", {}).items():
            self._failures.labels(*engine, *label.split("|")).inc(count)
        for tier, stats in data.get("tiers", {}).items():
            for name, metric in self._counts.items():
                seen = (engine_idx, tier, name)
                metric.labels(*engine, tier).inc(stats[name] - self._seen.get(seen, 0))
                self._seen[seen] = stats[name]
            for name, metric in self._gauges.items():
                metric.labels(*engine, tier).set(stats[name])
