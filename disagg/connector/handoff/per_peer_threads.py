"""A few background threads per peer, so that a peer that hangs delays no other peer's work."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

Work = Callable[[], None]
_IDLE_S = 10.0  # starting a thread costs its submitter 0.1 ms


@dataclass
class _PeerThreads:
    """One peer's queue. idle: how many of its `threads` wait for work."""

    changed: threading.Condition
    waiting: deque[Work] = field(default_factory=deque)
    threads: int = 0
    idle: int = 0


class PerPeerThreads:
    """Runs at most `limit` works of one key at once, in the order of submission. A key's threads
    end after 10 s without work, so there may be many keys."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._peers: dict[Hashable, _PeerThreads] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, key: Hashable, work: Work) -> None:
        """Queue work for a thread. Its errors are logged. After `close` no work is started."""
        with self._lock:
            if self._closed:
                return
            peer = self._peers.get(key)
            if peer is None:
                peer = self._peers[key] = _PeerThreads(threading.Condition(self._lock))
            peer.waiting.append(work)
            if peer.idle >= len(peer.waiting) or peer.threads >= self._limit:
                peer.changed.notify()
                return
            peer.threads += 1
        threading.Thread(target=self._run, args=(key, peer), name=self._name, daemon=True).start()

    def close(self) -> None:
        """Drop queued work; started work continues."""
        with self._lock:
            self._closed = True
            for peer in self._peers.values():
                peer.waiting.clear()
                peer.changed.notify_all()

    def _run(self, key: Hashable, peer: _PeerThreads) -> None:
        while (work := self._next(key, peer)) is not None:
            try:
                work()
            except Exception:
                logger.exception("%s: unexpected error", self._name)

    def _next(self, key: Hashable, peer: _PeerThreads) -> Work | None:
        """The next work; None when this thread has to end."""
        with self._lock:
            peer.idle += 1
            peer.changed.wait_for(lambda: peer.waiting or self._closed, _IDLE_S)
            peer.idle -= 1
            if peer.waiting:
                return peer.waiting.popleft()
            peer.threads -= 1
            if peer.threads == 0:
                del self._peers[key]
            return None
