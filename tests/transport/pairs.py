"""A producer and a consumer, and what must be true of them after a fetch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transport import caches
from transport.caches import Shape
from transport.worker import ASKED, Order, Remote, Worker, wait_until

from disagg.transport import fetch as handoff
from disagg.transport import protocol as p
from disagg.transport.base import RemoteCache
from disagg.transport.blocks import BlockCache
from disagg.transport.deadline import Deadline


@dataclass
class Pair:
    """A producer in a process of its own, a consumer here."""

    producer: Remote
    consumer: Worker
    shape: Shape

    @property
    def reads_directly(self) -> bool:
        """Whether the consumer reads without asking the producer."""
        setup = self.producer.setup
        boards = setup.transport in ("process_memory", "cuda_ipc", "nixl")
        return boards and not setup.device.endswith(ASKED)

    def is_over(self, when: str) -> bool:
        """Whether the producer did all of its part by then, so that nothing hangs on it."""
        if self.producer.setup.transport == "shared_storage":
            return True  # the file is there before the consumer looks
        one_sided = self.producer.setup.transport in ("process_memory", "cuda_ipc", "nixl")
        return when == "after" and not one_sided

    def opened(self) -> RemoteCache:
        """The producer's cache, opened from its offer."""
        deadline = Deadline.after(10)
        with self.consumer.peers.connection(self.producer.endpoint, deadline) as connection:
            offer = connection.welcome.offers[self.consumer.receiver.name]
        found = self.consumer.receiver.open(offer)
        assert found is not None
        return found

    def order(self, lease: int, targets: Sequence[int], **more: object) -> Order:
        """Whole blocks from the lease's first on, into these blocks here."""
        unit = self.shape.tokens
        part = p.Part(unit, ((0, len(targets)),))
        mine = self.consumer.cache.whole(targets)
        return Order(self.producer.endpoint, lease, part, mine, **more)  # type: ignore[arg-type]

    def fetch(self, lease: int, targets: Sequence[int], **more: object) -> handoff.Moved:
        return self.consumer.fetch(self.order(lease, targets, **more))

    def fetched(
        self, lease: int, targets: Sequence[int], **more: object
    ) -> contextlib.AbstractContextManager[handoff.Moved]:
        """As who uses the blocks before all is said."""
        return self.consumer.fetched(self.order(lease, targets, **more))

    def original(self) -> BlockCache:
        """A cache with what the producer's held when it started."""
        return caches.make(self.shape, self.producer.setup.seed)

    def is_right(self, sources: Sequence[int], targets: Sequence[int]) -> bool:
        """Whether the consumer's blocks hold what the producer's held when it started."""
        return caches.agree(self.original(), sources, self.consumer.cache, targets)

    def nothing_held(self, seconds: float = 30.0) -> bool:
        """Whether the producer gets all its blocks back in time."""
        return wait_until(lambda: self.producer.call("held") == 0, seconds)


MakePair = Callable[..., Pair]
Start = Callable[..., Any]
