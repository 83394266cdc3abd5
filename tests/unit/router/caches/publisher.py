"""A publisher of KV events for tests: vLLM's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disagg.router.caches.events import Source
from disagg.testing.ports import free_port

kv_events = pytest.importorskip("vllm.distributed.kv_events")

SIZE = 4
IDS = list(range(50, 50 + 100 * SIZE + 1))


class Publisher:
    """vLLM's, at ports that stay when it starts again. `replays`: it has a replay endpoint."""

    def __init__(self, *, replays: bool = True, kept: int = 10_000) -> None:
        self._ports, self._replays, self._kept = [free_port(), free_port()], replays, kept
        self.start()

    @property
    def source(self) -> Source:
        first, second = (f"tcp://127.0.0.1:{port}" for port in self._ports)
        return Source(first, second if self._replays else None)

    def start(self) -> None:
        self.real = kv_events.ZmqEventPublisher(
            0,
            f"tcp://*:{self._ports[0]}",
            self.source.replay,
            buffer_steps=self._kept,
        )

    def stop(self) -> None:
        self.real.shutdown()

    def store(self, *numbers: int) -> None:
        """Publish a batch for each of these blocks of `IDS`."""
        for number in numbers:
            ids = IDS[number * SIZE : (number + 1) * SIZE]
            parent = 999 + number if number else None
            more = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
            self.tell(
                kv_events.BlockStored([1000 + number], parent, ids, SIZE, None, "GPU", None, **more)
            )

    def remove(self, number: int) -> None:
        self.tell(kv_events.BlockRemoved([1000 + number], "GPU", 0))

    def tell(self, *events: Any) -> None:
        self.real.publish(kv_events.KVEventBatch(ts=time.time(), events=list(events)))

    def lose(self, count: int = 1) -> None:
        """These batches get numbers, and are lost for good."""
        self.settle()
        for _ in range(count):
            next(self.real._seq_gen)

    def settle(self) -> None:
        deadline = time.monotonic() + 10
        while self.real._event_queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def raw(self, payload: bytes) -> None:
        """A batch of any bytes."""
        self.settle()

        class Encoded:
            def encode(self, event: object) -> bytes:
                return payload

        real, self.real._pack = self.real._pack, Encoded()
        self.tell()
        self.settle()
        self.real._pack = real


@contextmanager
def publishing(**more: Any) -> Iterator[Publisher]:
    publisher = Publisher(**more)
    try:
        yield publisher
    finally:
        publisher.stop()
