"""Finds the requests in the slowest 10 % of the last ones: only these determine p99."""

from __future__ import annotations

from collections import deque

_KEPT = 128  # requests
_QUANTILE = 0.9


class TailLatency:
    """The last latencies of one router process."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def is_tail(self, seconds: float) -> bool:
        """Whether this latency exceeds 90 % of those before it. Records it, too."""
        before = sorted(self._seconds)
        self._seconds.append(seconds)
        return bool(before) and seconds > before[int(_QUANTILE * len(before))]
