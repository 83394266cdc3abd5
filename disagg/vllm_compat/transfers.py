"""vLLM's connector interface, as its newest version has it: the base of our connectors.

A connector of ours implements `get_transfer_results` and `bind_kv_cache_manager`, whatever the
version. `CompatConnector` answers what older versions ask instead, and what newer ones ask besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from disagg.vllm_compat import manager
from disagg.vllm_compat.differences import (
    IDLE_STEPS_SAVE_NOTHING,
    NO_FINISH_FORWARD,
    ONLY_THE_BLOCK_POOL,
    RESULTS_AS_SETS,
    RESULTS_BEFORE_DRAFTS,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

if TYPE_CHECKING or not RESULTS_AS_SETS.here:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults as KVConnectorTransferResults,
    )
else:

    @dataclass
    class KVConnectorTransferResults:
        """As vLLM's own of later versions: request ids. Failed loads are among the received."""

        finished_sending: set[str] = field(default_factory=set)
        finished_recving: set[str] = field(default_factory=set)
        failed_recving: set[str] = field(default_factory=set)


class CompatConnector(KVConnectorBase_V1):
    """vLLM's base class, with the newest version's calls in all versions of the range.

    A worker's metadata may have `loads`: each with a `request_id`, and `block_ids` or `fillings`
    that have some. Versions that learn of a failed load by its blocks need them.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._blocks_of_loads: dict[str, set[int]] = {}
        self._invalid_blocks: set[int] = set()
        self._manager: KVCacheManager | None = None
        self.failed_last: set[str] = set()
        """Request ids of the loads that failed by the last `get_finished` (RESULTS_AS_SETS)."""
        if role is KVConnectorRole.SCHEDULER:
            manager.install()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Ours do not follow when the KV cache moves. Asked from 0.33 on (SLEEP_IS_CLAIMED)."""
        return False

    # ---- scheduler side --------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if ONLY_THE_BLOCK_POOL.here:
            self.bind_kv_cache_manager(manager.manager_of(gpu_block_pool))

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        if not ONLY_THE_BLOCK_POOL.here:
            super().bind_kv_cache_manager(kv_cache_manager)

    def complete_block_tables(self, scheduled: SchedulerOutput) -> None:
        """Let `block_table` find the tables of all requests of a step, as later versions do."""
        if self._manager is not None:
            manager.complete(scheduled, self._manager)

    # ---- worker side -----------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if RESULTS_AS_SETS.here:
            for load in getattr(connector_metadata, "loads", ()):
                self._blocks_of_loads[load.request_id] = set(_blocks(load))

    if RESULTS_AS_SETS.here:

        def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
            return KVConnectorTransferResults()

        def get_finished(
            self, finished_req_ids: set[str]
        ) -> tuple[set[str] | None, set[str] | None]:
            results = self.get_transfer_results(finished_req_ids)
            self.failed_last = results.failed_recving
            for request_id in results.finished_recving:
                blocks = self._blocks_of_loads.pop(request_id, set())
                if request_id in results.failed_recving:
                    self._invalid_blocks |= blocks
            return results.finished_sending or None, results.finished_recving or None

    def add_invalid_blocks(self, block_ids: Iterable[int]) -> None:
        """Blocks of a load that came in part; those before them are right. Only with one KV cache
        group."""
        self._invalid_blocks.update(block_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid


def saves_in_idle_steps() -> bool:
    """Whether vLLM calls `wait_for_save` in steps without tokens."""
    return not IDLE_STEPS_SAVE_NOTHING.here


def takes_results_before_drafts() -> bool:
    """Whether the second model runner takes results before a draft model runs."""
    return RESULTS_BEFORE_DRAFTS.here


def results_of(
    connector: KVConnectorBase_V1, finished_req_ids: set[str]
) -> KVConnectorTransferResults:
    """What a worker's connector reports of a step. Where vLLM learns of failed loads by their
    blocks (RESULTS_AS_SETS), `failed_recving` has those of our connectors alone."""
    if RESULTS_AS_SETS.here:
        sent, received = connector.get_finished(finished_req_ids)
        failed = connector.failed_last if isinstance(connector, CompatConnector) else set()
        return KVConnectorTransferResults(sent or set(), received or set(), set(failed))
    return connector.get_transfer_results(finished_req_ids)


def reported(request_ids: set[str]) -> set[str] | None:
    """As the second model runner reports them: None for none, but before 0.30 as they are."""
    return request_ids if RESULTS_AS_SETS.here else request_ids or None


def finish_forward(connector: KVConnectorBase_V1) -> None:
    """Tell a connector that the forward pass was launched, if this vLLM does."""
    if not NO_FINISH_FORWARD.here:
        connector.finish_forward()


def _blocks(load: Any) -> Iterator[int]:
    """The blocks that a load fills; not vLLM's null block, which is nobody's."""
    parts: Iterable[Any] = getattr(load, "fillings", (load,))
    for part in parts:
        yield from (block for block in part.block_ids if block)
