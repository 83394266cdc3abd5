"""Which requests are among the slowest tenth of late: p99 is made of them, and they are few."""

from __future__ import annotations

from collections import deque

_KEPT = 128  # requests
_MOST = 0.9


class TailLatency:
    """Of the requests of one router process."""

    def __init__(self) -> None:
        self._lately: deque[float] = deque(maxlen=_KEPT)

    def has(self, seconds: float) -> bool:
        """Whether one that takes so long takes longer than nine of ten before it did."""
        before = sorted(self._lately)
        self._lately.append(seconds)
        return bool(before) and seconds > before[int(_MOST * len(before))]
