"""How many engines a pool needs, from its recent load.

Works on numbers alone: it must never import Ray. The number needed depends on the load, not on the
engines that serve. So an engine that starts slowly is not requested twice.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median_low
from typing import TypeVar

from disagg.config import AutoscaleSection

LOOK_S = 2.0
# Seconds of load that a decision looks at. A burst shorter than half of it is ignored: an engine
# takes a minute to start.
_WINDOW_S = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class PoolLoad:
    """Load of the engines that serve, summed. requests: running and waiting. kv_usage: used shares
    of the KV caches; 1.5 is one and a half caches."""

    engines: int
    requests: float
    kv_usage: float


@dataclass(frozen=True)
class Decision:
    """replicas: the new number of engines. why: the inputs of the decision, for the log."""

    replicas: int
    why: str


class Autoscaler:
    """Autoscaler of one pool.

    The pool grows at once to the number needed. It shrinks to the largest number needed within
    `cooldown_s`. The number needed comes from the median load of `_WINDOW_S`, because the load at
    one moment may be an empty moment or a burst.
    """

    def __init__(self, settings: AutoscaleSection) -> None:
        self.settings = settings
        self._seen: deque[tuple[float, PoolLoad]] = deque()
        self._needed: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._changed_at = float("-inf")

    def look(self, now: float, load: PoolLoad, replicas: int) -> Decision | None:
        """Record `load` at `now` (monotonic seconds). Returns a decision, or None for no change.

        `replicas`: the number decided so far, whether or not all of them serve.
        """
        settings = self.settings
        if self._began is None:
            self._began = now
        _note(self._seen, now, load, _WINDOW_S)
        usual = PoolLoad(
            load.engines,
            median_low(load.requests for _, load in self._seen),
            median_low(load.kv_usage for _, load in self._seen),
        )
        needed = self.needed(usual)
        _note(self._needed, now, needed, settings.cooldown_s)

        if needed > replicas and now - self._began >= _WINDOW_S:
            return self._decide(now, needed, usual, f"{needed} are needed")
        at_most = max(needed for _, needed in self._needed)
        quiet = now - max(self._began, self._changed_at) >= settings.cooldown_s
        if at_most < replicas and quiet:
            why = f"at most {at_most} were needed for {settings.cooldown_s:g} s"
            return self._decide(now, at_most, usual, why)
        return None

    def needed(self, load: PoolLoad) -> int:
        """Engines needed for this load, between `min_replicas` and `max_replicas`."""
        settings = self.settings
        by_queue = math.ceil(load.requests / settings.target_queue)
        by_cache = math.ceil(round(load.kv_usage / settings.target_kv_usage, 6))
        wanted = max(by_queue, by_cache)
        return min(max(wanted, settings.min_replicas), settings.max_replicas)

    def _decide(self, now: float, replicas: int, usual: PoolLoad, why: str) -> Decision:
        self._changed_at = now
        settings = self.settings
        return Decision(
            replicas,
            f"{usual.requests:g} requests (target_queue {settings.target_queue:g} an engine) and "
            f"{usual.kv_usage:.2f} KV caches (target_kv_usage {settings.target_kv_usage:g}) on "
            f"{usual.engines} engines, the median of {_WINDOW_S:g} s; {why}",
        )


def _note(seen: deque[tuple[float, _T]], now: float, what: _T, keep_s: float) -> None:
    seen.append((now, what))
    while seen[0][0] < now - keep_s:
        seen.popleft()
