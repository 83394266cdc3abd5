"""The clock of a simulation: what happens when, in order.

Knows nothing of engines. Things of the same time happen in the order in which they were asked
for, so that a run is the same every time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

# Called with the time and what was given to `at`.
Happening: TypeAlias = Callable[[float, int], None]


class Clock:
    """A heap of what is to happen."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Happening, int]] = []
        self._asked = 0

    def at(self, time: float, call: Happening, argument: int) -> None:
        """Have `call(time, argument)` happen at this time."""
        self._asked += 1
        heapq.heappush(self._heap, (time, self._asked, call, argument))

    def run(self, until: float) -> None:
        """Let happen what is due before this time."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] < until:
            time, _, call, argument = pop(heap)
            call(time, argument)
