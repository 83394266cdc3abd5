"""Counters of HiddenStatesConnector, from the worker that writes to vLLM's Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from disagg.connector.hidden_states.writer import Ended
from disagg.connector.prom_metrics import SECONDS, PromMetrics

_WRITTEN = "written"


class HiddenStatesStats(KVConnectorStats):
    """Counts since the last step. `data` is plain and serializable; empty if nothing happened.

    files: outcome ("written", or why not) -> count; bytes: int; seconds: list.
    """

    def reset(self) -> None:
        self.data = {}

    def count(self, ended: Ended) -> None:
        """Add one save."""
        files = self.data.setdefault("files", {})
        outcome = ended.reason or _WRITTEN
        files[outcome] = files.get(outcome, 0) + 1
        self.data["bytes"] = self.data.get("bytes", 0) + ended.num_bytes
        self.data.setdefault("seconds", []).append(ended.seconds)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        files = self.data.setdefault("files", {})
        for outcome, count in other.data.get("files", {}).items():
            files[outcome] = files.get(outcome, 0) + count
        self.data["bytes"] = self.data.get("bytes", 0) + other.data.get("bytes", 0)
        self.data["seconds"] = self.data.get("seconds", []) + other.data.get("seconds", [])
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's periodic log."""
        shown: dict[str, int | float] = {
            f"hidden states {outcome}": count for outcome, count in self.data["files"].items()
        }
        shown["bytes"] = self.data["bytes"]
        if self.data["seconds"]:
            shown["slowest write s"] = round(max(self.data["seconds"]), 4)
        return shown

    def is_empty(self) -> bool:
        return not self.data.get("files")


class HiddenStatesPromMetrics(PromMetrics):
    """`disagg_hidden_states_*` families in the engine's `/metrics`."""

    def declare(self) -> None:
        self._files = self.counter(
            "disagg_hidden_states_files", "Files of hidden states: written, or why not.", "outcome"
        )
        self._bytes = self.counter("disagg_hidden_states_bytes", "Bytes of hidden states written.")
        self._seconds = self.histogram(
            "disagg_hidden_states_seconds",
            "From a request's end to its file, or to its failure.",
            buckets=SECONDS,
        )
        for values in self.per_engine_labelvalues.values():
            self._files.labels(*values, _WRITTEN)
            self._bytes.labels(*values)
            self._seconds.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, engine = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        for outcome, count in data.get("files", {}).items():
            self._files.labels(*engine, outcome).inc(count)
        self._bytes.labels(*engine).inc(data.get("bytes", 0))
        for seconds in data.get("seconds", ()):
            self._seconds.labels(*engine).observe(seconds)
