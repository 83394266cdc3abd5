"""The base of our connectors: it passes vLLM's calls to two halves, and decides nothing itself.

A process has exactly one half: the scheduler's or a worker's. None of our connectors works layer by
layer.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from disagg.connector.vllm_logging import log_as_vllm_does
from disagg.engine.vllm_patches import patching
from disagg.errors import ConfigError
from disagg.vllm_compat import versions
from disagg.vllm_compat.transfers import CompatConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig

SchedulerT = TypeVar("SchedulerT")
WorkerT = TypeVar("WorkerT")


class ConnectorBase(CompatConnector, SupportsHMA, Generic[SchedulerT, WorkerT]):
    """A connector without its halves: the subclass makes one of them, by its role."""

    stats_class: ClassVar[type[KVConnectorStats]]
    prom_metrics_class: ClassVar[type[KVConnectorPromMetrics]]

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if problem := versions.problem():
            raise ConfigError([problem])
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm_does()
        patching.require(vllm_config)
        self._scheduler: SchedulerT | None = None
        self._worker: WorkerT | None = None

    @classmethod
    def device_bytes(cls, extra_config: dict[str, Any]) -> int:
        """Bytes per GPU that the connector uses in addition to the cache.

        `engine/vllm_patches/kv_memory_headroom.py` reserves them. Raises `ConfigError`.
        """
        return 0

    @property
    def scheduler(self) -> SchedulerT:
        """The scheduler half; only in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerT:
        """The worker half; only in a worker's process."""
        assert self._worker is not None
        return self._worker

    @abstractmethod
    def take_stats(self) -> KVConnectorStats | None:
        """Counts since the last call; None if this process's half has none."""

    # ---- vLLM's ----------------------------------------------------------------------------

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before vLLM schedules their request."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Blocks are read where they are, after the step that filled them."""

    def wait_for_save(self) -> None:
        """Nothing is saved during the forward pass."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = self.take_stats()
        return None if stats is None or stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return cls.stats_class(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        made = cls.prom_metrics_class
        return made(vllm_config, metric_types, labelnames, per_engine_labelvalues)  # type: ignore[arg-type]
