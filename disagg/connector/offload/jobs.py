"""What the workers were told to do and have not all reported: the scheduler half's own books."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.store.base import Key, Slot


@dataclass(eq=False)
class Job:
    """Something that the workers do. `waiting`: ranks that have not reported."""

    waiting: int
    slots: list[Slot] = field(default_factory=list)
    failed: set[Key] = field(default_factory=set)


@dataclass(eq=False)
class StoreJob(Job):
    block_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class LoadJob(Job):
    """`slots` were in host memory when it began, `read` came there from files since."""

    request_id: str = ""
    read: list[Slot] = field(default_factory=list)


@dataclass(eq=False)
class WriteJob(Job):
    pass


@dataclass(eq=False)
class ReadJob(Job):
    """One slot that is filled from its file, for a load that may have ended by then. `begun`:
    the directory's index waits to hear of it."""

    load: LoadJob | None = None
    begun: bool = False
