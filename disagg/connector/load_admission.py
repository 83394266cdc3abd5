"""When a request waits for loads of others, so that none waits for ever.

A load has to leave enough blocks to the loads started before it.

For models with sliding windows, vLLM reserves too few blocks for requests that are being loaded: it
counts blocks that a window has passed as held, although they were freed. Two loading requests can
exhaust the pool and deadlock. So a load waits while earlier loads may need the blocks that it would
take.

A request whose load fails gives back its blocks and starts over. Then blocks that the window has
passed are computed too, so it may need more than it gave back. Loaded requests behind it hold
theirs, and vLLM schedules them after it. So enough stays free for any one that starts over.

Some versions of vLLM stop at the first waiting request that gets no blocks, and may never reach one
behind it that holds them and whose load has ended. There, other requests step aside until it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from disagg.vllm_compat.manager import admission_cap

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
        self._loaded = set[str]()

    def has_room(self, request: Request, tokens: int) -> bool:
        """Whether a load may start that brings this request to `tokens` computed tokens."""
        others = [other for other in self._loading.values() if other is not request]
        others = [other for other in others if self._holds(other)]
        if not others:
            return True
        own = sum(
            -(-request.num_tokens // group.block_size)
            - group.get_num_skipped_tokens(tokens) // group.block_size
            for group in self._groups
        )
        lacking = sum(self._lacks(group, other) for other in others for group in self._groups)
        # One after the other: who has started over ends, and frees its blocks for the next.
        again = [self._whole(other) - self._holds(other) for other in others]
        more = max(lacking, self._whole(request) - own, *again)
        return own + more <= self._pool.get_num_free_blocks()

    def begins(self, request: Request) -> None:
        """This request's blocks are allocated, and will be loaded."""
        self._loading[request.request_id] = request
        self._loaded.discard(request.request_id)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests have ended, well or not; they do not run yet."""
        self._loaded.update(name for name in request_ids if name in self._loading)

    def steps_aside(self, request: Request) -> bool:
        """Whether another request whose load has ended holds blocks, and waits to run."""
        others = (self._loading[name] for name in self._loaded if name != request.request_id)
        return any(self._holds(other) for other in others)

    def end(self, request_ids: Iterable[str]) -> None:
        """These requests run, or have finished."""
        for request_id in request_ids:
            self._loading.pop(request_id, None)
            self._loaded.discard(request_id)

    def _holds(self, request: Request) -> int:
        """Blocks that it would give back; 0 once its load has failed."""
        return sum(
            not block.is_null
            for group in self._groups
            for block in group.req_to_blocks.get(request.request_id, ())
        )

    def _whole(self, request: Request) -> int:
        """Blocks that it needs if it computes its prompt from the first token."""
        return sum(
            self._most(group, -(-request.num_tokens // group.block_size)) for group in self._groups
        )

    def _lacks(self, group: SingleTypeKVCacheManager, request: Request) -> int:
        """Blocks that it lacks for its prompt."""
        held = len(group.req_to_blocks.get(request.request_id, ()))
        return self._most(group, max(0, -(-request.num_tokens // group.block_size) - held))

    @staticmethod
    def _most(group: SingleTypeKVCacheManager, blocks: int) -> int:
        most = admission_cap(group)
        return blocks if most is None else min(blocks, most)


_instances: WeakKeyDictionary[KVCacheManager, LoadAdmission] = WeakKeyDictionary()


def load_admission_of(manager: KVCacheManager) -> LoadAdmission:
    """The instance of this manager's engine."""
    if manager not in _instances:
        _instances[manager] = LoadAdmission(manager)
    return _instances[manager]
