"""How many engines a pool should have, from what they have had to do of late.

Decides by numbers alone: knows neither Ray nor engines. What is needed is judged by the load
itself and not by the engines that are there, so that a slow start is not answered by another one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from disagg.config import AutoscaleSection

LOOK_S = 2.0
_SURE_S = 5.0  # a burst that is over sooner needs no engine that takes a minute to start


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
    """Of one pool. Grows to what was needed throughout some seconds, and shrinks to the most that
    was needed throughout `cooldown_s`."""

    def __init__(self, settings: AutoscaleSection) -> None:
        self.settings = settings
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
        needed = self.needed(load)
        self._needed.append((now, needed))
        keep_s = max(settings.cooldown_s, _SURE_S)
        while self._needed[0][0] < now - keep_s:
            self._needed.popleft()

        at_least = min(self._since(now - _SURE_S))
        if at_least > replicas and now - self._began >= _SURE_S:
            return self._decide(now, at_least, load, replicas)
        quiet = now - max(self._began, self._changed_at) >= settings.cooldown_s
        at_most = max(self._since(now - settings.cooldown_s))
        if at_most < replicas and quiet:
            return self._decide(now, at_most, load, replicas)
        return None

    def needed(self, load: PoolLoad) -> int:
        """Engines for this load, within the bounds."""
        settings = self.settings
        by_queue = math.ceil(load.requests / settings.target_queue)
        by_cache = math.ceil(round(load.kv_usage / settings.target_kv_usage, 6))
        wanted = max(by_queue, by_cache)
        return min(max(wanted, settings.min_replicas), settings.max_replicas)

    def _since(self, when: float) -> list[int]:
        return [needed for at, needed in self._needed if at >= when]

    def _decide(self, now: float, replicas: int, load: PoolLoad, before: int) -> Decision:
        self._changed_at = now
        settings = self.settings
        way = "at least" if replicas > before else "at most"
        over_s = _SURE_S if replicas > before else settings.cooldown_s
        return Decision(
            replicas,
            f"{load.requests:g} requests (target_queue {settings.target_queue:g} an engine) and "
            f"{load.kv_usage:.2f} KV caches (target_kv_usage {settings.target_kv_usage:g}) on "
            f"{load.engines} engines; {replicas} were needed, {way}, for {over_s:g} s",
        )
