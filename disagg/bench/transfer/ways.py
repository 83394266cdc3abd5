"""The ways that `bench transfer` measures between disagg's two processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from disagg.bench.transfer.plan import Ids
from disagg.bench.transfer.report import (
    BLOCK_COPIES,
    BLOCK_NCCL,
    DEVICE_COPY,
    FLAT,
    IN_PIECES,
    NCCL_BARE,
    PCIE,
    SOCKETS_BARE,
)
from disagg.testing.child_process import Child, ChildError

READY_S = 120.0
FETCH_S = 45.0

Move = Callable[[Ids, Ids], float]


def _as_they_are(ids: Ids) -> Ids:
    return ids


@dataclass
class Way:
    """How to measure one way: prepare for a block size, move, wipe and check.

    `check`: where the bytes must be: in the named blocks, flat from the beginning of the memory, or
    nowhere. `spread`: converts block ids to those of this way.
    """

    name: str
    move: Move
    reader: Child
    prepare: Callable[[int], None] = field(default=lambda _: None)
    check: Literal["blocks", "flat", "none"] = "blocks"
    spread: Callable[[Ids], Ids] = _as_they_are
    smallest_only: bool = False
    is_peer: bool = False
    is_tcp: bool = False
    problem: str | None = None
    processes: tuple[Child, ...] = ()  # stopped while another way is measured

    def pause(self) -> None:
        """Stop its processes (SIGSTOP)."""
        for child in self.processes:
            child.pause()

    def resume(self) -> None:
        """Continue them."""
        for child in self.processes:
            child.resume()

    def guarded(self, step: Callable[[], Any]) -> Any:
        """Run a step. After an error the way is left out, and the error is shown at the end."""
        self.resume()
        try:
            return step()
        except ChildError as error:
            self.problem = str(error)
            return None
        finally:
            self.pause()


class Pair(NamedTuple):
    """Two processes between which bytes move."""

    producer: Child
    consumer: Child

    def both(self, theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> Any:
        """Call both at once; returns the consumer's answer."""
        self.producer.start_call(*theirs)
        try:
            found = self.consumer.call(*ours, timeout_s=FETCH_S)
        except ChildError:
            # Otherwise the producer's next call would get this answer.
            with contextlib.suppress(ChildError):
                self.producer.result(FETCH_S)
            raise
        self.producer.result(FETCH_S)
        return found


def transports(pair: Pair, names: Sequence[str]) -> list[Way]:
    """disagg's transports: a lease is granted, then fetched."""
    leases = 0

    def fetch(name: str, here: Ids, there: Ids) -> float:
        nonlocal leases
        first, leases = leases, leases + len(there)
        pair.producer.call("grant", first, there)
        return float(pair.consumer.call("fetch", name, first, here, timeout_s=FETCH_S))

    return [Way(name, partial(fetch, name), pair.consumer) for name in names]


def on_host(pair: Pair) -> list[Way]:
    """One thread's copies in the consumer."""

    def memcpy(kind: str, here: Ids, there: Ids) -> float:
        return float(pair.consumer.call("memcpy", kind, here, there))

    return [
        Way(FLAT, partial(memcpy, "flat"), pair.consumer, check="flat"),
        Way(IN_PIECES, partial(memcpy, "pieces"), pair.consumer),
    ]


def on_device(pair: Pair, *, shared: bool) -> list[Way]:
    """The ceilings, then copies and messages block by block."""
    producer, consumer = pair

    def copy(kind: str, here: Ids, there: Ids) -> float:
        return float(consumer.call("copy", kind, here, there))

    def by_host(here: Ids, there: Ids) -> float:
        return float(consumer.call("copy_by_host", here))

    def sockets(here: Ids, there: Ids) -> float:
        return float(pair.both(("send_bare", there), ("receive_bare", here)))

    def nccl(kind: str, here: Ids, there: Ids) -> float:
        return float(pair.both(("send_nccl", kind, there), ("receive_nccl", kind, here)))

    def source() -> None:
        theirs = None if shared else producer.call("exported")
        consumer.call("use_source", theirs, timeout_s=READY_S)

    def line() -> None:
        consumer.call("dial", producer.call("listen"))
        producer.call("accept")

    def join() -> None:
        identity = producer.call("nccl_id")
        pair.both(("join", identity, 0), ("join", identity, 1))

    return [
        Way(DEVICE_COPY, partial(copy, "flat"), consumer, _first_time(source), "flat"),
        Way(PCIE, by_host, consumer, check="none"),
        Way(SOCKETS_BARE, sockets, consumer, _first_time(line), "none"),
        # After the line, which carries the start signal of NCCL's ends.
        Way(NCCL_BARE, partial(nccl, "flat"), consumer, _first_time(join), "flat"),
        Way(BLOCK_COPIES, partial(copy, "blocks"), consumer),
        Way(BLOCK_NCCL, partial(nccl, "blocks"), consumer, smallest_only=True),
    ]


def _first_time(step: Callable[[], None]) -> Callable[[int], None]:
    """Run the step for the first block size only."""
    left = [step]

    def prepare(_: int) -> None:
        if left:
            left.pop()()

    return prepare
