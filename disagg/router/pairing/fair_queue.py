"""Requests that wait, in the order that is fair to their clients.

A client's share is its weight. Whoever was served the fewest tokens for its weight is next, as in
the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., 2024). A
client that comes back after a while gets no credit for it. Among clients of different priority, the
lower number is first. Requests of one client keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from disagg.config import OTHERS, ShareSection

T = TypeVar("T")
_PLAIN = ShareSection()


class Served:
    """How many tokens each client was served for each unit of its weight, in all queues of a router
    process. Whoever comes anew begins where the last one was that got a seat."""

    def __init__(self, shares: Mapping[str, ShareSection]) -> None:
        self._shares = shares
        self._others = shares.get(OTHERS, _PLAIN)
        self._levels: dict[str | None, float] = {}
        self._latest = 0.0

    def share(self, client: str | None) -> ShareSection:
        """What this client is entitled to. `client`: the name of its key; None: it has none."""
        return self._shares.get(client, self._others) if client is not None else self._others

    def level(self, client: str | None) -> float:
        """Tokens for each unit of weight, and what it began with."""
        return self._levels.get(client, 0.0)

    def comes(self, client: str | None) -> None:
        """The client had nothing waiting. It gets no credit for that."""
        if self._levels.get(client, -1.0) < self._latest:
            self._levels[client] = self._latest

    def seats(self, client: str | None, tokens: int) -> None:
        """A request of this client has a seat. `tokens`: what it costs so far."""
        level = self._levels.get(client, 0.0)
        if level > self._latest:
            self._latest = level
        self.charge(client, tokens)

    def charge(self, client: str | None, tokens: int) -> None:
        """The client was served so many tokens more."""
        level = self._levels.get(client, 0.0)
        self._levels[client] = level + tokens / self.share(client).weight


class FairQueue(Generic[T]):
    """A queue for one role. Requests that `push_first` gave come before all others."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._first: deque[T] = deque()
        self._waiting: dict[str | None, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count + len(self._first)

    def __iter__(self) -> Iterator[T]:
        yield from self._first
        for waiting in self._waiting.values():
            yield from waiting

    def push_first(self, item: T) -> None:
        """Put it before all others."""
        self._first.appendleft(item)

    def push(self, client: str | None, item: T) -> None:
        """Put it behind those of its client."""
        if client not in self._waiting:
            self._served.comes(client)
            self._waiting[client] = deque()
        self._waiting[client].append(item)
        self._count += 1

    def next(self) -> tuple[str | None, T] | None:
        """Whose turn it is, apart from those in front; it stays in the queue."""
        if not self._waiting:
            return None
        client = min(self._waiting, key=self._rank)
        return client, self._waiting[client][0]

    def first(self) -> list[T]:
        """Those in front."""
        return list(self._first)

    def to_give_way(self, client: str | None) -> T | None:
        """The last request of whoever has the most waiting for its weight, if that is more than
        this client would have with another one."""

        def load(other: str | None, more: int = 0) -> float:
            count = len(self._waiting.get(other, ())) + more
            return count / self._served.share(other).weight

        most = max(self._waiting, key=load, default=None)
        if most not in self._waiting or most == client or load(most) <= load(client, 1):
            return None
        return self._waiting[most][-1]

    def remove(self, item: T) -> bool:
        """Take it out; whether it was there."""
        if item in self._first:
            self._first.remove(item)
            return True
        for client, waiting in self._waiting.items():
            if item in waiting:
                waiting.remove(item)
                self._count -= 1
                if not waiting:
                    del self._waiting[client]
                return True
        return False

    def _rank(self, client: str | None) -> tuple[int, float]:
        return self._served.share(client).priority, self._served.level(client)
