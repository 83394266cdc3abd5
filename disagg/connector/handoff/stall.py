"""Notices an engine that can do nothing because its own leases hold its blocks.

Two engines that both prefill and decode can wait for each other: each keeps blocks for requests in
the other's queue, and none has room to load. So an engine that stands still takes back its oldest
lease, and one more each time that it stood still again. The consumer computes that prompt itself.

No such wait is without an end. In a cycle of engines that wait for each other's blocks, each one
stands still: an engine that runs a step, or loads, will free the blocks of what it runs or loads.
`spec/` checks this over all interleavings.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

PATIENCE_S = 1.0


class StallWatch:
    """Watches one engine's steps. Only the scheduler's thread uses it.

    has_room: whether any request would find enough free blocks.
    """

    def __init__(
        self,
        name: str,
        has_room: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Engines of a cycle differ in their patience, so that one of them yields, and not all.
        self._patience_s = PATIENCE_S * (1 + zlib.crc32(name.encode()) / (1 << 32))
        self._has_room, self._clock = has_room, clock
        self._requests: set[str] = set()
        self._since: float | None = None

    def arrived(self, request_id: str) -> None:
        """A request is in the engine from now on."""
        self._requests.add(request_id)

    def finished(self, request_id: str) -> None:
        """A request has left the engine."""
        self._requests.discard(request_id)

    def stands_still(self, *, works: bool) -> bool:
        """To be asked each step: True once for each patience's time that the engine stood still.

        works: a request runs in this step, or is being loaded.
        """
        if works or not self._requests or self._has_room():
            self._since = None
            return False
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since < self._patience_s:
            return False
        self._since = now
        return True


def has_room(
    manager: KVCacheManager, config: VllmConfig, kv_cache: KVCacheConfig
) -> Callable[[], bool]:
    """Whether the longest request would find enough free blocks in this engine's pool."""
    length = config.model_config.max_model_len
    sizes = [group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups]
    most = sum(-(-length // size) for size in sizes)
    if config.speculative_config is not None:
        most += len(sizes)  # vLLM wants room for a step of guesses besides
    pool = manager.block_pool
    return lambda: pool.get_num_free_blocks() > most
