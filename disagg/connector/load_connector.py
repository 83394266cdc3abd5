"""The base of connectors that load blocks into vLLM's cache: the handoff and the tiers.

It passes the scheduler's calls on. A load waits while earlier ones may need its blocks. With some
versions of vLLM, all requests wait until one that has loaded its blocks runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from disagg.connector.base import ConnectorBase, WorkerT
from disagg.connector.kv_cache_layout import has_windows
from disagg.connector.load_admission import LoadAdmission, load_admission_of
from disagg.vllm_compat.manager import loaded_requests_wait_in_line

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class LoadScheduler(Protocol):
    """The scheduler half of such a connector."""

    def on_new_request(self, request: Request) -> None: ...

    def num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """As vLLM's `get_num_new_matched_tokens`."""

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """As vLLM's `update_state_after_alloc`."""

    def update(self, output: KVConnectorOutput) -> None:
        """As vLLM's `update_connector_output`."""

    def reset(self) -> bool: ...

    def take_stats(self) -> KVConnectorStats: ...


LoadSchedulerT = TypeVar("LoadSchedulerT", bound=LoadScheduler)


class LoadConnector(ConnectorBase[LoadSchedulerT, WorkerT]):
    """A connector whose scheduler half is a `LoadScheduler`."""

    _admission: LoadAdmission | None = None
    _loads_wait = _all_wait = False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._loads_wait = has_windows(self._kv_cache_config)
        self._all_wait = loaded_requests_wait_in_line()
        if self._loads_wait or self._all_wait:
            self._admission = load_admission_of(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._admission and self._all_wait and self._admission.steps_aside(request):
            return None, False
        tokens, is_async = self.scheduler.num_new_matched_tokens(request, num_computed_tokens)
        if self._admission and self._loads_wait and tokens:
            if not self._admission.has_room(request, num_computed_tokens + tokens):
                return None, False  # ask again: earlier loads may need the blocks
        return tokens, is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.after_alloc(request, blocks, num_external_tokens)
        if self._admission and num_external_tokens:
            self._admission.begins(request)

    def _loads_end(self, request_ids: Iterable[str]) -> None:
        """These requests run now, or have finished."""
        if self._admission:
            self._admission.end(request_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.update(connector_output)
        if self._admission:
            self._admission.loaded(connector_output.finished_recving or ())

    def reset_cache(self) -> bool | None:
        return self.scheduler.reset()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def take_stats(self) -> KVConnectorStats | None:
        return None if self._scheduler is None else self._scheduler.take_stats()
