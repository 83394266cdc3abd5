"""Counters of HiddenStatesConnector, from the worker that writes to vLLM's Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from disagg.connector.hidden_states.writer import Ended

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
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


class HiddenStatesPromMetrics(KVConnectorPromMetrics):
    """`disagg_hidden_states_*` families in the engine's `/metrics`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = self._counter_cls
        histogram: Any = self._histogram_cls
        self._files = counter(
            name="disagg_hidden_states_files",
            documentation="Files of hidden states: written, or why not.",
            labelnames=[*labelnames, "outcome"],
        )
        self._bytes = counter(
            name="disagg_hidden_states_bytes",
            documentation="Bytes of hidden states written.",
            labelnames=labelnames,
        )
        self._seconds = histogram(
            name="disagg_hidden_states_seconds",
            documentation="From a request's end to its file, or to its failure.",
            labelnames=labelnames,
            buckets=_SECONDS,
        )
        for values in per_engine_labelvalues.values():
            # Export zeros from the start: an absent series looks like a broken one.
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
