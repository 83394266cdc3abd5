"""How many engines a pool should have, from what they have had to do of late.

Decides by numbers alone: knows neither Ray nor engines. What is needed is judged by the load
itself and not by the engines that are there, so that a slow start is not answered by another one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median_low
from typing import TypeVar

from disagg.config import AutoscaleSection

LOOK_S = 2.0
_SURE_S = 10.0  # half of it is a burst, which needs no engine that takes a minute to start

_T = TypeVar("_T")


@dataclass(frozen=True)
class PoolLoad:
    """Of the engines that serve. requests: running and waiting, of all together. kv_usage: the
    sum of the engines' shares, so 1.5 is one and a half caches."""

    engines: int
    requests: float
    kv_usage: float


@dataclass(frozen=True)
class Decision:
    """replicas: from now on. why: its inputs, for the log."""

    replicas: int
    why: str


class Autoscaler:
    """Of one pool. Grows to what is needed now, and shrinks to the most that was needed throughout
    `cooldown_s`. What is needed is judged by the median of some seconds: requests come and go
    between two looks, and neither an empty moment nor a burst says much."""

    def __init__(self, settings: AutoscaleSection) -> None:
        self.settings = settings
        self._seen: deque[tuple[float, PoolLoad]] = deque()
        self._needed: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._changed_at = float("-inf")

    def look(self, now: float, load: PoolLoad, replicas: int) -> Decision | None:
        """Take note of `load` at `now` (monotonic seconds); what to do about it, if anything.

        `replicas`: what was decided so far, whether they serve already or not.
        """
        settings = self.settings
        if self._began is None:
            self._began = now
        _note(self._seen, now, load, _SURE_S)
        usual = PoolLoad(
            load.engines,
            median_low(load.requests for _, load in self._seen),
            median_low(load.kv_usage for _, load in self._seen),
        )
        needed = self.needed(usual)
        _note(self._needed, now, needed, settings.cooldown_s)

        if needed > replicas and now - self._began >= _SURE_S:
            return self._decide(now, needed, usual, f"{needed} are needed")
        at_most = max(needed for _, needed in self._needed)
        quiet = now - max(self._began, self._changed_at) >= settings.cooldown_s
        if at_most < replicas and quiet:
            why = f"at most {at_most} were needed for {settings.cooldown_s:g} s"
            return self._decide(now, at_most, usual, why)
        return None

    def needed(self, load: PoolLoad) -> int:
        """Engines for this load, within the bounds."""
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
            f"{usual.engines} engines, the median of {_SURE_S:g} s; {why}",
        )


def _note(seen: deque[tuple[float, _T]], now: float, what: _T, keep_s: float) -> None:
    seen.append((now, what))
    while seen[0][0] < now - keep_s:
        seen.popleft()
