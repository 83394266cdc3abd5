"""What a router process does before its event loop looks for more, when others want its core.

Several router processes, and what they talk to, often share cores. A process that looks again at
once finds one chunk, and wakes somebody for it who takes the core away; one that lets the others
go first finds what they have all sent meanwhile, and does with one wake-up what took many.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

# Of fewer connections than these the answers are few, and each is better read at once.
_BUSY = 3
# The scheduler may come back to us while others still wait, so once is not enough.
_TIMES = 16
_LIMIT_S = 0.004


class LoopYield:
    """Counts the connections that something came on in one turn of the loop.

    After a turn with several, the core is offered to others, for 4 ms and a time slice at most;
    where nobody wants it that takes a few microseconds. `give_way` returns when it is our turn;
    `clock` is in seconds.
    """

    def __init__(
        self,
        give_way: Callable[[], None] = os.sched_yield,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._give_way, self._clock = give_way, clock
        self._came = 0

    def came(self) -> None:
        """Something came on a connection."""
        self._came += 1
        if self._came == 1:
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        came, self._came = self._came, 0
        if came < _BUSY:
            return
        end = self._clock() + _LIMIT_S
        for _ in range(_TIMES):
            self._give_way()
            if self._clock() > end:
                return
