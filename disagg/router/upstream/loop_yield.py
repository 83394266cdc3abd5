"""Yields the CPU core between turns of a router process's event loop.

Several router processes, their engines and clients often share cores. A process that polls its
sockets again at once finds a single chunk. Relaying it wakes another process, which takes the core
away. A process that yields first finds all chunks that the others sent meanwhile, and handles them
with one wake-up instead of many.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

# With chunks on fewer connections than this, each is better read at once.
_BUSY = 3
# The scheduler may resume this process while others still wait, so one yield is not enough.
_TIMES = 16
_LIMIT_S = 0.004


class LoopYield:
    """Counts the chunks that arrive in one turn of the event loop.

    After a turn with several, it yields the core for at most 4 ms and one time slice. If no other
    process wants the core, that takes a few microseconds. `sched_yield` returns when this process
    runs again; `clock` is in seconds.
    """

    def __init__(
        self,
        sched_yield: Callable[[], None] = os.sched_yield,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sched_yield, self._clock = sched_yield, clock
        self._chunks = 0

    def data_arrived(self) -> None:
        """A chunk arrived on a connection."""
        self._chunks += 1
        if self._chunks == 1:
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        chunks, self._chunks = self._chunks, 0
        if chunks < _BUSY:
            return
        end = self._clock() + _LIMIT_S
        for _ in range(_TIMES):
            self._sched_yield()
            if self._clock() > end:
                return
