"""The contract of a tier: what rests in it under which name, who may call what, and when.

A **chunk** is a run of consecutive full KV cache blocks of a prompt, as many in every chunk; the
unit of all tiers. Its **key** is vLLM's hash of its last block (which covers the whole prefix),
followed by whatever else tells two chunks apart (the KV cache group, say). Model, dtype, layout
and parallel size are not part of the key: `fingerprint` keeps caches that differ in them apart.

A tier has two halves:

- its **index** lives in the scheduler process, is called by the scheduler's thread only, never
  blocks on a device, and decides: what is here, what is stored next, what goes;
- its **bytes** live in each worker rank's process, are called by any number of transfer threads,
  and do what the index decided, all ranks alike.

The life of a chunk, seen from an index:

1. `lookup` / `leading` -> MISS. Looking has no side effect and may be repeated at will.
2. a store is prepared: the chunk is LATER to whoever asks. The worker's source blocks and the
   destination must stay unchanged until every rank has said how it went.
3. the store completes: HIT if every rank succeeded; otherwise it is forgotten, MISS again.
4. a load begins: the chunk can't be evicted. Any number of loads may overlap.
5. the load ends. A chunk that could not be read is MISS again.
6. eviction: only of chunks that nothing uses.

Every prepared store and every begun load must be completed exactly once, whatever happened to it:
its slot is in use until then.

Failures of a job are results (`ok`, or an outcome with a `reason`), never exceptions. Exceptions
are for callers' mistakes (`ValueError`, `IndexError`) and for settings (`ConfigError`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

Key = bytes
"""Names a chunk: 1 to 64 bytes."""

MAX_KEY_BYTES = 64

CPU = "CPU"
STORAGE = "STORAGE"
"""Media of block events, in vLLM's words."""


class Presence(Enum):
    """What an index says about a key."""

    HIT = "hit"
    MISS = "miss"
    LATER = "later"
    """Being written, loaded or looked for: ask again."""


class Leading(NamedTuple):
    """How many of some keys, from the first on, are there.

    `later`: the one after them is not known yet, so that the run may soon be longer.
    """

    ready: int
    later: bool


class Slot(NamedTuple):
    """A place in the host pool, the same on all ranks, and the chunk it is for."""

    key: Key
    number: int


class EventKind(StrEnum):
    STORED = "stored"
    REMOVED = "removed"


class BlockEvent(NamedTuple):
    """A chunk that can be loaded from a tier from now on, or no more."""

    kind: EventKind
    key: Key
    medium: str


@dataclass(frozen=True)
class IndexStats:
    """What an index has counted since it began, in chunks; the last three are of now.

    A hit is a chunk that a load was begun for, a miss one that a store was prepared for: what
    was looked up ten times and used once counts once.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    stores_failed: int = 0
    stores_refused: int = 0
    """Chunks that were not stored because everything was in use."""
    loads_failed: int = 0
    evictions: int = 0
    slow: int = 0
    """Lookups given up because the disk did not answer in time."""
    stray: int = 0
    """Completions of nothing that was begun: a caller's mistake, ignored."""
    used: int = 0
    in_use: int = 0
    """Of those used, the ones that a store or a load keeps from eviction."""
    capacity: int = 0


class WriteOutcome(StrEnum):
    WRITTEN = "written"
    EXISTED = "existed"
    """The chunk was there already; its bytes were not looked at."""
    FAILED = "failed"


class WriteResult(NamedTuple):
    """`reason` is a metric label, empty unless it failed."""

    outcome: WriteOutcome
    num_bytes: int = 0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the chunk can be read now."""
        return self.outcome is not WriteOutcome.FAILED


class ReadOutcome(StrEnum):
    LOADED = "loaded"
    MISSING = "missing"
    DAMAGED = "damaged"
    """Not what was written, or not what was asked for. It was removed."""
    FAILED = "failed"


class ReadResult(NamedTuple):
    """`reason` is a metric label, empty if it was loaded. Unless it was, the buffers hold garbage
    that must not be used."""

    outcome: ReadOutcome
    num_bytes: int = 0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the buffers hold exactly what was written under the key."""
        return self.outcome is ReadOutcome.LOADED


@dataclass(frozen=True)
class FileStats:
    """What a worker's end of the directory has counted since it began, in files of its rank."""

    written: int = 0
    existed: int = 0
    writes_failed: int = 0
    loaded: int = 0
    missing: int = 0
    damaged: int = 0
    reads_failed: int = 0
    bytes_written: int = 0
    bytes_read: int = 0


def check_key(key: Key) -> None:
    """Raise `ValueError` for what cannot be a key."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def total_bytes(buffers: Sequence[memoryview]) -> int:
    """Bytes of all buffers."""
    return sum(buffer.nbytes for buffer in buffers)
