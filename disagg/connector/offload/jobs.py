"""The scheduler half's record of jobs that not all ranks have reported yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.store.base import Key, Slot


@dataclass(eq=False)
class Job:
    """Work of all ranks. waiting: ranks that have not reported."""

    waiting: int
    slots: list[Slot] = field(default_factory=list)
    failed: set[Key] = field(default_factory=set)


@dataclass(eq=False)
class StoreJob(Job):
    block_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class LoadJob(Job):
    """slots: in host memory when the load began. read: read from the shared tier since. shared: how
    many are read from there. seconds: of the slowest rank. was_slow: `SLOW` on some rank."""

    request_id: str = ""
    read: list[Slot] = field(default_factory=list)
    shared: int = 0
    seconds: float = 0.0
    was_slow: bool = False


@dataclass(eq=False)
class WriteJob(Job):
    pass


@dataclass(eq=False)
class ReadJob(Job):
    """Fills one slot from the shared tier, for a load that may end earlier. begun: the tier's index
    expects `end_load`."""

    load: LoadJob | None = None
    begun: bool = False
