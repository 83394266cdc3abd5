"""The base of our connectors' Prometheus metrics: families with vLLM's engine labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    PromMetric,
    PromMetricT,
)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class PromMetrics(KVConnectorPromMetrics):
    """Declares its families once, in `declare`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.declare()

    @abstractmethod
    def declare(self) -> None:
        """Make the families.

        Where possible also `.labels(...)` of each engine: this exports zeros from the start, as an
        absent series looks like a broken one.
        """

    def counter(self, name: str, documentation: str, *labels: str) -> Any:
        family: Any = self._counter_cls  # prometheus_client's, or vLLM's for Ray
        return family(
            name=name, documentation=documentation, labelnames=[*self._labelnames, *labels]
        )

    def gauge(self, name: str, documentation: str, *labels: str) -> Any:
        family: Any = self._gauge_cls
        return family(
            name=name, documentation=documentation, labelnames=[*self._labelnames, *labels]
        )

    def histogram(
        self, name: str, documentation: str, *labels: str, buckets: Sequence[float]
    ) -> Any:
        family: Any = self._histogram_cls
        return family(
            name=name,
            documentation=documentation,
            labelnames=[*self._labelnames, *labels],
            buckets=buckets,
        )
