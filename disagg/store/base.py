"""The contract of a tier: chunks and their keys, who may call what, and when.

A **chunk** is the unit of all tiers: a fixed number of consecutive full KV cache blocks of a
prompt. Its **key** is vLLM's hash of its last block (which covers the whole prefix), followed by
whatever else distinguishes two chunks (such as the KV cache group). Model, dtype, layout and
parallel size are not part of the key: `fingerprint` separates caches that differ in them.

A tier has two halves:

- its **index** is in the scheduler process. Only the scheduler's thread calls it; it never blocks
  on a device. It decides what is stored, loaded and evicted;
- its **bytes** are in each worker rank's process. Any number of transfer threads call it; all
  ranks carry out what the index decided.

The life of a chunk, seen from an index:

1. `lookup` / `leading` -> MISS. Lookups have no side effect and may be repeated.
2. a store is prepared: lookups answer LATER. The worker's source blocks and the destination must
   stay unchanged until every rank has reported the result.
3. the store completes: HIT if every rank succeeded; otherwise MISS again.
4. a load begins: the chunk can't be evicted. Any number of loads may overlap.
5. the load ends. A chunk that could not be read is MISS again.
6. eviction: only of chunks that are not in use.

Every prepared store and every begun load must be completed exactly once, whatever its result: its
slot is in use until then.

A failed job is a result (`ok`, or an outcome with a `reason`), never an exception. Exceptions are
for callers' mistakes (`ValueError`, `IndexError`) and for settings (`ConfigError`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple, Protocol

Key = bytes
"""Names a chunk: 1 to 64 bytes."""

MAX_KEY_BYTES = 64

CPU = "CPU"
STORAGE = "STORAGE"
"""Media of block events, as vLLM names them."""


class Presence(Enum):
    """An index's answer about a key."""

    HIT = "hit"
    MISS = "miss"
    LATER = "later"
    """It is being written, loaded or looked up: ask again."""


class Leading(NamedTuple):
    """How many leading keys of a sequence are HIT.

    later: the next key is LATER, so that the run may soon be longer.
    """

    ready: int
    later: bool


class Slot(NamedTuple):
    """A place in the host pool, the same on all ranks, and its chunk."""

    key: Key
    number: int


class EventKind(StrEnum):
    STORED = "stored"
    REMOVED = "removed"


class BlockEvent(NamedTuple):
    """A chunk became available in a tier, or was removed from it."""

    kind: EventKind
    key: Key
    medium: str


class EventLog:
    """Collects a tier's block events until they are taken; nothing if it is off."""

    def __init__(self, medium: str, *, on: bool) -> None:
        self._medium, self._on = medium, on
        self._events: list[BlockEvent] = []

    def add(self, kind: EventKind, key: Key) -> None:
        """Record an event."""
        if self._on:
            self._events.append(BlockEvent(kind, key, self._medium))

    def take(self) -> list[BlockEvent]:
        """Events since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events


@dataclass(frozen=True)
class IndexStats:
    """An index's counts since the start, in chunks; the last three are current values.

    A hit is a chunk that a load began for, a miss one that a store was prepared for: a chunk looked
    up ten times and used once counts once.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    stores_failed: int = 0
    stores_refused: int = 0
    """Chunks that were not stored because all slots were in use."""
    loads_failed: int = 0
    evictions: int = 0
    slow: int = 0
    """Lookups that ended because the tier did not answer in time."""
    too_slow: int = 0
    """Requests that did not wait for the tier, since computing was faster."""
    stray: int = 0
    """Completions of jobs that were not begun: a caller's mistake, ignored."""
    used: int = 0
    in_use: int = 0
    """Used ones that a store or a load protects from eviction."""
    capacity: int = 0


class WriteOutcome(StrEnum):
    WRITTEN = "written"
    EXISTED = "existed"
    """The chunk existed; its bytes were not checked."""
    FAILED = "failed"


class WriteResult(NamedTuple):
    """reason: a metric label, empty unless it failed."""

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
    """The file or object is damaged, or another chunk's. It was removed."""
    FAILED = "failed"


class ReadResult(NamedTuple):
    """reason: a metric label, empty if it was loaded. Otherwise the buffers hold garbage that must
    not be used."""

    outcome: ReadOutcome
    num_bytes: int = 0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the buffers hold exactly the chunk of this key."""
        return self.outcome is ReadOutcome.LOADED


@dataclass(frozen=True)
class FileStats:
    """Counts of a worker's half of a shared tier since the start, in files or objects of its
    rank."""

    written: int = 0
    existed: int = 0
    writes_failed: int = 0
    loaded: int = 0
    missing: int = 0
    damaged: int = 0
    reads_failed: int = 0
    bytes_written: int = 0
    bytes_read: int = 0


class FileCounts:
    """Counts results, from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def wrote(self, result: WriteResult) -> WriteResult:
        """Count it; returns it."""
        name = "writes_failed" if not result.ok else str(result.outcome)
        with self._lock:
            self._counts[name] += 1
            self._counts["bytes_written"] += result.num_bytes
        return result

    def did_read(self, result: ReadResult) -> ReadResult:
        """Count it; returns it."""
        name = "reads_failed" if result.outcome is ReadOutcome.FAILED else str(result.outcome)
        with self._lock:
            self._counts[name] += 1
            self._counts["bytes_read"] += result.num_bytes
        return result

    @property
    def stats(self) -> FileStats:
        """Counts so far."""
        with self._lock:
            return FileStats(**self._counts)


class SharedTier(Protocol):
    """A worker's half of a tier that engines share: the chunks of one rank. All methods may be
    called from any thread. Buffers are C-contiguous."""

    place: str
    """Where the chunks are, for logs."""

    @property
    def chunk_bytes(self) -> int:
        """Total bytes of a chunk's buffers."""

    def write(self, key: Key, buffers: Sequence[memoryview]) -> WriteResult:
        """Write a chunk, unless it exists. The buffers must not change meanwhile; if they do, the
        checksum differs, and the chunk is lost, but never wrong.

        Raises `ValueError` for buffers of another size.
        """

    def read(self, key: Key, buffers: Sequence[memoryview]) -> ReadResult:
        """Read a chunk straight into the buffers, then check it. They hold the chunk only if the
        result is `ok`.

        Raises `ValueError` for buffers of another size.
        """

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark chunks as used that were not read from here. Missing ones are skipped."""

    @property
    def stats(self) -> FileStats:
        """Counts so far."""

    def close(self) -> None:
        """Stop its threads. Removes no chunk."""


def check_key(key: Key) -> None:
    """Raise `ValueError` for an invalid key."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def total_bytes(buffers: Sequence[memoryview]) -> int:
    """Bytes of all buffers."""
    return sum(buffer.nbytes for buffer in buffers)
