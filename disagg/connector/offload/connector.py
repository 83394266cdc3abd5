"""`DisaggOffloadConnector`: passes vLLM's connector calls to the scheduler or worker half."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from disagg.connector import kv_cache_layout
from disagg.connector.load_connector import LoadConnector
from disagg.connector.offload import setup
from disagg.connector.offload.messages import OffloadWork
from disagg.connector.offload.metrics import OffloadPromMetrics, OffloadStats
from disagg.connector.offload.scheduler import OffloadScheduler
from disagg.connector.offload.settings import read_settings
from disagg.connector.offload.worker import OffloadWorker, OnEvicted
from disagg.store.base import EventKind, SharedTier
from disagg.transport.blocks import BlockCache
from disagg.vllm_compat.transfers import KVConnectorTransferResults, saves_in_idle_steps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class DisaggOffloadConnector(LoadConnector[OffloadScheduler, OffloadWorker]):
    """Blocks kept in host memory and in a tier that engines share, found again by their hashes."""

    stats_class = OffloadStats
    prom_metrics_class = OffloadPromMetrics

    @classmethod
    def device_bytes(cls, extra_config: dict[str, Any]) -> int:
        return read_settings(extra_config).staging_bytes

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        is_worker = role is KVConnectorRole.WORKER
        stage = get_pp_group().rank_in_group if is_worker else 0  # whose layers the cache has
        setup.check_supported(vllm_config, kv_cache_config, stage)
        transfer = self._kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config)
        settings = setup.chunk_settings(settings, kv_cache_config)
        self._chunks = setup.chunks(settings, vllm_config, kv_cache_config)
        layout = setup.layout(settings, vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            # vLLM's default fails the request; ours never loses one. vLLM reads it after this.
            transfer.kv_load_failure_policy = "recompute"
            self._scheduler = OffloadScheduler(
                settings,
                setup.host_index(settings, vllm_config, layout.slots),
                setup.shared_index(settings, vllm_config, kv_cache_config),
                self._chunks,
                world_size=setup.ranks(vllm_config),
                layout=str(layout),
                second_runner=vllm_config.use_v2_model_runner,
            )
        else:
            rank = stage * vllm_config.parallel_config.tensor_parallel_size
            rank += get_tensor_model_parallel_rank()

            def open_shared(cache: BlockCache, on_evicted: OnEvicted) -> SharedTier | None:
                return setup.shared_tier(
                    settings, vllm_config, kv_cache_config, cache, rank, on_evicted
                )

            self._worker = OffloadWorker(
                settings,
                layout.slots,
                open_shared,
                layout=str(layout),
                blocks_written_first=setup.writes_blocks_first(vllm_config, kv_cache_config),
            )

    # ---- scheduler side --------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Metadata of another connector's workers; ours have none."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._loads_end(scheduler_output.num_scheduled_tokens)
        self.complete_block_tables(scheduler_output)
        return self.scheduler.step_work(scheduler_output)

    def has_pending_push_work(self) -> bool:
        return self.scheduler.is_busy

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._loads_end([request.request_id])
        self.scheduler.request_finished(request, block_ids)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        for event in self.scheduler.take_events():
            hash_, group = self._chunks.split_key(event.key)
            if event.kind is EventKind.REMOVED:
                yield BlockRemoved(block_hashes=[hash_], medium=event.medium, group_idx=group)
                continue
            # As in vLLM's own offloading: the hash refers to the engine's earlier event.
            yield BlockStored(
                block_hashes=[hash_],
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                medium=event.medium,
                lora_name=None,
                group_idx=group,
            )

    # ---- worker side -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        blocks = kv_cache_layout.registered_blocks
        self.worker.register(blocks(self._vllm_config, self._kv_cache_config, kv_caches))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, OffloadWork)
        self.worker.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, OffloadWork)
        self.worker.start(work)

    def wait_for_save(self) -> None:
        self.worker.after_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if not saves_in_idle_steps():
            self.worker.after_step()
        received, failed = self.worker.finished()
        return KVConnectorTransferResults(set(), received, failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_report()

    # ---- both ------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()
