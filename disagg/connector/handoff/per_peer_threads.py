"""Work in threads beside the model, a few for each peer: one that hangs holds up nobody else's."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

Work = Callable[[], None]
_LINGER_S = 10.0  # to start a thread takes the one that submits 0.1 ms


@dataclass
class _PeerThreads:
    """What is due for one peer. `idle`: threads that wait for more, of `threads`."""

    changed: threading.Condition
    waiting: deque[Work] = field(default_factory=deque)
    threads: int = 0
    idle: int = 0


class PerPeerThreads:
    """At most `limit` works at once of one key, begun in their order. Threads end when a key has
    had nothing for a while, so keys may be many."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._lanes: dict[Hashable, _PeerThreads] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, key: Hashable, work: Work) -> None:
        """Have it done; what it raises is logged. After `close` nothing is begun any more."""
        with self._lock:
            if self._closed:
                return
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = _PeerThreads(threading.Condition(self._lock))
            lane.waiting.append(work)
            if lane.idle >= len(lane.waiting) or lane.threads >= self._limit:
                lane.changed.notify()
                return
            lane.threads += 1
        threading.Thread(target=self._run, args=(key, lane), name=self._name, daemon=True).start()

    def close(self) -> None:
        """Drop what waits; what was begun goes on."""
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                lane.waiting.clear()
                lane.changed.notify_all()

    def _run(self, key: Hashable, lane: _PeerThreads) -> None:
        while (work := self._next(key, lane)) is not None:
            try:
                work()
            except Exception:
                logger.exception("%s: unexpected", self._name)

    def _next(self, key: Hashable, lane: _PeerThreads) -> Work | None:
        """None when this thread is to end."""
        with self._lock:
            lane.idle += 1
            lane.changed.wait_for(lambda: lane.waiting or self._closed, _LINGER_S)
            lane.idle -= 1
            if lane.waiting:
                return lane.waiting.popleft()
            lane.threads -= 1
            if lane.threads == 0:
                del self._lanes[key]
            return None
