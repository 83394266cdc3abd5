"""`HiddenStatesConnector`: passes vLLM's connector calls to the scheduler or the worker half.

It loads and sends nothing; it keeps a finished request's blocks until its states were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from disagg.connector.base import ConnectorBase
from disagg.connector.hidden_states.checks import find_group
from disagg.connector.hidden_states.messages import StepWork, WriterAddress
from disagg.connector.hidden_states.metrics import HiddenStatesPromMetrics, HiddenStatesStats
from disagg.connector.hidden_states.scheduler import SchedulerHalf
from disagg.connector.hidden_states.settings import read_settings
from disagg.connector.hidden_states.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class HiddenStatesConnector(ConnectorBase[SchedulerHalf, WorkerHalf]):
    """Each request's hidden states and token ids, in a file of their own."""

    stats_class = HiddenStatesStats
    prom_metrics_class = HiddenStatesPromMetrics

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        place = find_group(vllm_config, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(place.group, place.block_size)
        else:
            self._worker = WorkerHalf(
                settings,
                rank=get_tensor_model_parallel_rank(),
                block_size=place.block_size,
                layer_ids=place.layer_ids,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A request must not finish while preempted: its states would be lost."""
        return True

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Never merge the states' cache with the model's own."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Prefer a layout with a token's states together; any layout works."""
        return None if vllm_config.device_config.device_type == "cpu" else "LBNHC"

    def get_finished_count(self) -> int | None:
        """Only rank 0 writes and reports."""
        return 1

    # ---- scheduler side --------------------------------------------------------------------

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        for address in metadata.values():
            if isinstance(address, WriterAddress):
                self.scheduler.set_writer(address)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Nothing is loaded."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.step_work(scheduler_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished(request, [block_ids])

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished(request, block_ids)

    # ---- worker side -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)
        )
        (name,) = layers
        self.worker.register_cache(name, kv_caches[name])

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.address()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before the step's forward pass, so that files are written during it."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepWork)
        self.worker.start(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker.read() or None, None

    def take_stats(self) -> KVConnectorStats | None:
        return None if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
