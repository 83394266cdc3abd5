"""The KV cache manager of an engine's scheduler, block tables, and failed loads of requests, for
versions that give connectors less than the newest one does.

`install` changes vLLM's classes in this process, once, and before a scheduler is made: connectors
are made by the scheduler, before its manager. Later versions are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from disagg.vllm_compat.differences import (
    ADMISSION_CAP_IS_PRIVATE,
    BLOCK_TABLES_IN_A_DICT,
    LOADED_REQUESTS_WAIT_IN_LINE,
    ONE_GROUP_OF_INVALID_BLOCKS,
    ONLY_THE_BLOCK_POOL,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

_manager_of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_Affected = tuple[set[str], int, set[int]]


def install() -> None:
    """Let managers be found by their block pool, and failed loads in caches of several groups."""
    if ONLY_THE_BLOCK_POOL.here:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        KVCacheManager.__init__ = _remembered(  # type: ignore[method-assign]
            KVCacheManager.__init__
        )
    if ONE_GROUP_OF_INVALID_BLOCKS.here:
        from vllm.v1.core.sched.scheduler import Scheduler

        Scheduler._update_requests_with_invalid_blocks = _in_any_group(  # type: ignore[method-assign]
            Scheduler._update_requests_with_invalid_blocks
        )


def admission_cap(group: SingleTypeKVCacheManager) -> int | None:
    """The most blocks that a request needs of a group at once; None if there is no limit."""
    if ADMISSION_CAP_IS_PRIVATE.here:
        cap: int | None = group._max_admission_blocks_per_request  # type: ignore[attr-defined]
        return cap
    return group.max_admission_blocks_per_request


def loaded_requests_wait_in_line() -> bool:
    """Whether a request that holds blocks may wait behind one that gets none, for ever."""
    return LOADED_REQUESTS_WAIT_IN_LINE.here


def block_table(blocks: KVConnectorBlockState, request_id: str) -> Sequence[Sequence[int]] | None:
    """A request's block ids of a step, by KV cache group; None if it isn't part of the step."""
    if BLOCK_TABLES_IN_A_DICT.here:
        tables: dict[str, tuple[list[int], ...]] = blocks.block_ids  # type: ignore[attr-defined]
        return tables.get(request_id)
    return blocks.get_block_ids(request_id)


def complete(scheduled: SchedulerOutput, manager: KVCacheManager) -> None:
    """Where a step has only the block tables of requests that got a block in it, add the others: a
    request may fill a block that it got before."""
    blocks = scheduled.kv_connector_block_state
    if BLOCK_TABLES_IN_A_DICT.here:
        tables: dict[str, Any] = blocks.block_ids if blocks else {}  # type: ignore[attr-defined]
        for request_id in scheduled.num_scheduled_tokens:
            if request_id not in tables:
                tables[request_id] = manager.get_block_ids(request_id)


def manager_of(block_pool: Any) -> KVCacheManager:
    """The manager that made this pool. Raises `KeyError` if it was made before `install`."""
    manager: KVCacheManager = _manager_of[block_pool]()
    return manager


def _remembered(init: Callable[..., None]) -> Callable[..., None]:
    if hasattr(init, "is_remembered"):
        return init

    @functools.wraps(init)
    def is_remembered(manager: Any, *args: Any, **kwargs: Any) -> None:
        init(manager, *args, **kwargs)
        _manager_of[manager.block_pool] = ref(manager)

    is_remembered.is_remembered = True  # type: ignore[attr-defined]
    return is_remembered


def _in_any_group(update: Callable[..., _Affected]) -> Callable[..., _Affected]:
    """vLLM's own for caches of one group. With several groups, the request of an invalid block
    starts over, as `_handle_failed_recving` of later versions has it."""
    if hasattr(update, "is_in_any_group"):
        return update

    @functools.wraps(update)
    def is_in_any_group(
        scheduler: Any,
        requests: Iterable[Any],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> _Affected:
        if len(scheduler.kv_cache_config.kv_cache_groups) == 1:
            return update(
                scheduler, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks
            )
        affected, tokens = set[str](), 0
        if not evict_blocks:  # requests that wait for their load; running ones have none of ours
            for request in requests:
                groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
                if any(not invalid_block_ids.isdisjoint(ids) for ids in groups):
                    tokens += request.num_computed_tokens
                    request.num_computed_tokens = 0
                    affected.add(request.request_id)
        return affected, tokens, set()

    is_in_any_group.is_in_any_group = True  # type: ignore[attr-defined]
    return is_in_any_group
