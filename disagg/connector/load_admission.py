"""Whether a load may start: it has to leave enough blocks to the loads started before it.

For models with sliding windows, vLLM reserves too few blocks for requests that are being loaded: it
counts blocks that a window has passed as held, although they were freed. Two loading requests can
exhaust the pool and deadlock. So a load waits while earlier loads may need the blocks that it would
take.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request


class LoadAdmission:
    """One per engine, shared by its connectors. Only the scheduler's thread uses it."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._groups = manager.coordinator.single_type_managers
        self._loading: dict[str, Request] = {}

    def has_room(self, request: Request, tokens: int) -> bool:
        """Whether a load may start that brings this request to `tokens` computed tokens."""
        others = sum(self._needs(other) for other in self._loading.values() if other is not request)
        if not others:
            return True
        own = sum(
            -(-request.num_tokens // group.block_size)
            - group.get_num_skipped_tokens(tokens) // group.block_size
            for group in self._groups
        )
        return own + others <= self._pool.get_num_free_blocks()

    def begins(self, request: Request) -> None:
        """This request's blocks are allocated, and will be loaded."""
        self._loading[request.request_id] = request

    def end(self, request_ids: Iterable[str]) -> None:
        """These requests run, or have finished."""
        for request_id in request_ids:
            self._loading.pop(request_id, None)

    def _needs(self, request: Request) -> int:
        """Blocks that it lacks for its prompt; 0 if it holds none, as it then starts over."""
        return sum(self._lacks(group, request) for group in self._groups)

    @staticmethod
    def _lacks(group: SingleTypeKVCacheManager, request: Request) -> int:
        held = len(group.req_to_blocks.get(request.request_id, ()))
        if not held:
            return 0
        lacking = max(0, -(-request.num_tokens // group.block_size) - held)
        most = group.max_admission_blocks_per_request
        return lacking if most is None else min(lacking, most)


_instances: WeakKeyDictionary[KVCacheManager, LoadAdmission] = WeakKeyDictionary()


def load_admission_of(manager: KVCacheManager) -> LoadAdmission:
    """The instance of this manager's engine."""
    if manager not in _instances:
        _instances[manager] = LoadAdmission(manager)
    return _instances[manager]
