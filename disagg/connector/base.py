"""What our connectors have in common: they hand vLLM's calls on to two halves, and decide nothing.

Exactly one half exists in a process: the scheduler's or a worker's. Nothing of ours happens layer
by layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from disagg.connector import kv_cache_layout
from disagg.connector.load_admission import LoadAdmission, load_admission_of
from disagg.connector.vllm_logging import log_as_vllm_does
from disagg.engine.vllm_patches import patching

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

SchedulerT = TypeVar("SchedulerT")
WorkerT = TypeVar("WorkerT")


class ConnectorBase(KVConnectorBase_V1, SupportsHMA, Generic[SchedulerT, WorkerT]):
    """A connector without its halves: who derives from it makes one of them, by its role."""

    stats_class: ClassVar[type[KVConnectorStats]]
    prom_metrics_class: ClassVar[type[KVConnectorPromMetrics]]

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm_does()
        patching.require(vllm_config)
        self._scheduler: SchedulerT | None = None
        self._worker: WorkerT | None = None
        self._room: LoadAdmission | None = None

    @classmethod
    def device_bytes(cls, extra_config: dict[str, Any]) -> int:
        """Bytes that it takes of each GPU beside the cache.

        `engine/vllm_patches/kv_memory_headroom.py` leaves them free.

        Raises `ConfigError` for settings that are wrong.
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
        """What the half of this process has counted since the last call, if it counts."""

    # ---- loads of models with windows ------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if kv_cache_layout.has_windows(self._kv_cache_config):
            self._room = load_admission_of(kv_cache_manager)

    def _where_room_is(
        self, request: Request, computed: int, found: tuple[int | None, bool]
    ) -> tuple[int | None, bool]:
        """What `get_num_new_matched_tokens` found, or "ask again" while others need the blocks."""
        if self._room and found[0] and not self._room.is_left(request, computed + found[0]):
            return None, False
        return found

    def _load_begins(self, request: Request, external: int) -> None:
        if self._room and external:
            self._room.begins(request)

    def _loads_end(self, request_ids: Iterable[str]) -> None:
        """Requests that run now, or are finished."""
        if self._room:
            self._room.end(request_ids)

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
