"""The connector's counters, from the scheduler half to vLLM's own Prometheus endpoint.

A handoff counts once, however many ranks moved it. After each step vLLM sends `ConnectorStats` to
the API process and calls `observe` there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from disagg.connector.prom_metrics import SECONDS, PromMetrics


class ConnectorStats(KVConnectorStats):
    """Counts since the last step. `data` is plain and serializable; empty if nothing happened.

    handoffs: "transport|outcome" -> count; bytes, hidden: transport -> count; seconds: list;
    failures: reason -> count; leases: outcome -> count; leases_held: gauge.
    """

    def reset(self) -> None:
        self.data = {}

    def count(self, family: str, label: str, amount: int = 1) -> None:
        """Add to one counter."""
        counts = self.data.setdefault(family, {})
        counts[label] = counts.get(label, 0) + amount

    def observe_seconds(self, seconds: float) -> None:
        """Record how long one handoff took on the consumer."""
        self.data.setdefault("seconds", []).append(seconds)

    def set_leases_held(self, held: int) -> None:
        """Record how many leases keep blocks now."""
        self.data["leases_held"] = held

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for family, value in other.data.items():
            if isinstance(value, dict):
                self.data[family] = dict(Counter(self.data.get(family, {})) + Counter(value))
            elif isinstance(value, list):
                self.data[family] = self.data.get(family, []) + value
            else:
                self.data[family] = value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's periodic log."""
        shown: dict[str, int | float] = {}
        for family in ("handoffs", "bytes", "hidden", "failures", "leases"):
            for label, count in self.data.get(family, {}).items():
                shown[f"{family} {label}"] = count
        if seconds := self.data.get("seconds"):
            shown["slowest handoff s"] = round(max(seconds), 4)
        if "leases_held" in self.data:
            shown["leases held"] = self.data["leases_held"]
        return shown

    def is_empty(self) -> bool:
        return not self.data


class ConnectorPromMetrics(PromMetrics):
    """`disagg_*` families in the engine's `/metrics`."""

    def declare(self) -> None:
        self._handoffs = self.counter(
            "disagg_handoffs", "Handoffs by how they ended on the consumer.", "transport", "outcome"
        )
        self._bytes = self.counter("disagg_handoff_bytes", "KV bytes received.", "transport")
        self._hidden = self.counter(
            "disagg_handoff_hidden_bytes",
            "KV bytes received while prefill still computed the prompt.",
            "transport",
        )
        self._failures = self.counter(
            "disagg_kv_load_failures", "Prompts computed locally instead, by reason.", "reason"
        )
        self._leases = self.counter(
            "disagg_leases", "Leases given by this engine, by how they ended.", "outcome"
        )
        self._seconds = self.histogram(
            "disagg_handoff_seconds",
            "Acquire to release of one handoff, on the consumer.",
            buckets=SECONDS,
        )
        self._held = self.gauge("disagg_leases_held", "Leases that keep blocks of this engine now.")
        for values in self.per_engine_labelvalues.values():
            self._held.labels(*values).set(0)
            self._seconds.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, engine = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        for label, count in data.get("handoffs", {}).items():
            self._handoffs.labels(*engine, *label.split("|")).inc(count)
        for metric, family in (
            (self._bytes, "bytes"),
            (self._hidden, "hidden"),
            (self._failures, "failures"),
            (self._leases, "leases"),
        ):
            for label, count in data.get(family, {}).items():
                metric.labels(*engine, label).inc(count)
        for seconds in data.get("seconds", ()):
            self._seconds.labels(*engine).observe(seconds)
        if "leases_held" in data:
            self._held.labels(*engine).set(data["leases_held"])
