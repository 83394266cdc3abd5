"""`DisaggConnector`: passes vLLM's connector calls to the scheduler or the worker half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from disagg.connector.handoff.engine_facts import EngineFacts
from disagg.connector.handoff.messages import StepWork, WorkerAddress
from disagg.connector.handoff.metrics import ConnectorPromMetrics, ConnectorStats
from disagg.connector.handoff.rank import WorkerRank
from disagg.connector.handoff.scheduler import SchedulerHalf
from disagg.connector.handoff.settings import read_settings
from disagg.connector.handoff.stall import StallWatch, has_room
from disagg.connector.handoff.worker import WorkerHalf
from disagg.connector.kv_cache_layout import (
    HANDED_OFF,
    check_supported,
    hash_seed,
    kv_heads,
    required_layout,
)
from disagg.connector.load_connector import LoadConnector
from disagg.connector.recurrent_state import rest_is_full_attention
from disagg.connector.registration import register
from disagg.transport.control.secret import read_secret
from disagg.vllm_compat.transfers import KVConnectorTransferResults

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class DisaggConnector(LoadConnector[SchedulerHalf, WorkerHalf]):
    """Asynchronous pull of KV blocks from prefill to decode engines, under leases."""

    stats_class = ConnectorStats
    prom_metrics_class = ConnectorPromMetrics

    @classmethod
    def device_bytes(cls, extra_config: dict[str, Any]) -> int:
        return read_settings(extra_config).device_bytes

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return required_layout(vllm_config)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        hash_seed(vllm_config, HANDED_OFF)
        transfer = self._kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config)
        secret = read_secret()
        if role is KVConnectorRole.SCHEDULER:
            # vLLM's default fails the request; ours never loses one. vLLM reads it after this.
            transfer.kv_load_failure_policy = "fail" if settings.strict else "recompute"
            self._scheduler = SchedulerHalf(
                EngineFacts.of(vllm_config, kv_cache_config),
                settings,
                secret,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
            )
        else:
            rank = WorkerRank(
                name=settings.engine_name or str(transfer.engine_id),
                rank=get_tensor_model_parallel_rank(),
                world_size=vllm_config.parallel_config.tensor_parallel_size,
                stage=get_pp_group().rank_in_group,
                stages=vllm_config.parallel_config.pipeline_parallel_size,
                kv_heads=kv_heads(vllm_config),
                # vLLM sets `data_parallel_rank` to 0 for models that are not mixtures of experts.
                data_parallel_rank=vllm_config.parallel_config.data_parallel_index,
            )
            self._worker = WorkerHalf(vllm_config, kv_cache_config, settings, secret, rank)

    # ---- scheduler side --------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        room = has_room(kv_cache_manager, self._vllm_config, self._kv_cache_config)
        self.scheduler.watch(StallWatch(str(self._kv_transfer_config.engine_id), room))
        self.scheduler.set_blocks(kv_cache_manager.get_block_ids)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        workers = [(rank, metadata[rank]) for rank in sorted(metadata)]
        ours = [(rank, address) for rank, address in workers if isinstance(address, WorkerAddress)]
        self.scheduler.set_workers(
            [address.endpoint for _, address in ours if address.endpoint is not None],
            [address.regions for (_, tensor_rank), address in ours if tensor_rank == 0],
        )

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return rest_is_full_attention(self._kv_cache_config)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        # vLLM zeroes the new blocks of all other groups, while the load writes to them.
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._loads_end(scheduler_output.num_scheduled_tokens)
        return self.scheduler.step_work(scheduler_output.num_scheduled_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._loads_end([request.request_id])
        return self.scheduler.request_finished(request, block_ids)

    # ---- worker side -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.address()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Before the step runs. `start_load_kv` comes after it: too late to say that its blocks are
        # no longer another request's, and a step late to say that those before are final.
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepWork):
            self.worker.before_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        self.worker.start(work)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed, invalid = self.worker.finished()
        self.add_invalid_blocks(invalid)
        return KVConnectorTransferResults(sent, received, failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_report()

    # ---- both ------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()


register("DisaggConnector", "disagg.connector")
