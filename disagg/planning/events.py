"""The clock of a simulation: runs events in the order of their times.

Events of the same time run in the order in which they were scheduled, so every run has the same
result. This module must never know about engines.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeAlias

# Called with the time and the argument that were given to `at`.
EventCallback: TypeAlias = Callable[[float, int], None]


class Clock:
    """A heap of future events."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, EventCallback, int]] = []
        self._scheduled = 0

    def at(self, time: float, call: EventCallback, argument: int) -> None:
        """Schedule `call(time, argument)` at this time."""
        self._scheduled += 1
        heapq.heappush(self._heap, (time, self._scheduled, call, argument))

    def run(self, until: float) -> None:
        """Run all events that are due before `until`."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] < until:
            time, _, call, argument = pop(heap)
            call(time, argument)
