"""Whether a load leaves enough blocks to those that were begun before it.

To vLLM a request holds also the blocks that its layers' windows have passed, and that were given
back. So of models with windows it keeps too few blocks free for requests that are being loaded: two
of them can hold all there are and wait for each other, where nobody runs and will ever end. Here a
load waits for as long as those before it may need what it would take.
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
    """Of one engine; its connectors share it. Used by the scheduler's thread alone."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self._groups = manager.coordinator.single_type_managers
        self._loading: dict[str, Request] = {}

    def is_left(self, request: Request, tokens: int) -> bool:
        """Whether a load may begin after which `tokens` of this request are computed."""
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
        """Its blocks are allocated, and will be loaded."""
        self._loading[request.request_id] = request

    def end(self, request_ids: Iterable[str]) -> None:
        """They run, or are finished."""
        for request_id in request_ids:
            self._loading.pop(request_id, None)

    def _needs(self, request: Request) -> int:
        """Blocks that it lacks for its prompt; of one that holds none, which starts anew, nothing
        is kept."""
        return sum(self._lacks(group, request) for group in self._groups)

    @staticmethod
    def _lacks(group: SingleTypeKVCacheManager, request: Request) -> int:
        held = len(group.req_to_blocks.get(request.request_id, ()))
        if not held:
            return 0
        lacking = max(0, -(-request.num_tokens // group.block_size) - held)
        most = group.max_admission_blocks_per_request
        return lacking if most is None else min(lacking, most)


_rooms: WeakKeyDictionary[KVCacheManager, LoadAdmission] = WeakKeyDictionary()


def load_admission_of(manager: KVCacheManager) -> LoadAdmission:
    """The one of this manager's engine."""
    if manager not in _rooms:
        _rooms[manager] = LoadAdmission(manager)
    return _rooms[manager]
