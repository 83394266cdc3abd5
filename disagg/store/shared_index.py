"""The scheduler's half of a tier that engines share: which chunks exist, without waiting for it.

One class serves the directory and the object stores; a `Finder` knows where to look.

Only the scheduler's thread calls it. Its own threads ask the finder: the first lookup of a key
answers LATER, later ones the finding. Findings expire, because any engine may evict existing chunks
and write missing ones. So a HIT may be wrong: if a load does not find the chunk, the key becomes a
MISS.

A finding does not expire before a lookup has returned it: otherwise a scheduler that asks again
only seconds later would never get it. If the tier does not answer in time, the lookup answers MISS.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from disagg.safe_logging import LimitedLog
from disagg.store.base import (
    STORAGE,
    BlockEvent,
    EventKind,
    EventLog,
    IndexStats,
    Key,
    Leading,
    Presence,
    check_key,
)

logger = logging.getLogger(__name__)

_THREADS = 4


@dataclass(frozen=True)
class FindingsLimits:
    """How long findings are valid, in seconds since a lookup first returned them, and how many are
    kept.

    patience_s: how long the tier may take before lookups answer MISS.
    """

    present_s: float = 30.0
    absent_s: float = 2.0
    patience_s: float = 5.0
    capacity: int = 1 << 18


@dataclass(slots=True)
class _Finding:
    present: bool
    returned_at: float | None = None


class _Question(NamedTuple):
    number: int
    asked_at: float


class Finder(Protocol):
    """Where the chunks of one tier are found. Any number of threads may call it at once."""

    name: str
    """Of the tier, for logs."""

    def leading(self, keys: Sequence[Key]) -> int:
        """How many leading keys exist. What follows the first missing one need not be looked up.
        Raises `OSError` if the tier can't be asked."""

    def close(self) -> None:
        """Let go of what it holds open."""


class SharedIndex:
    """The chunks that a finder finds. clock: for tests."""

    def __init__(
        self,
        finder: Finder,
        memory: FindingsLimits | None = None,
        *,
        events: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._finder, self.name = finder, finder.name
        self._log = LimitedLog(logger, 1)
        self._memory = memory or FindingsLimits()
        self._clock = clock
        self._findings: OrderedDict[Key, _Finding] = OrderedDict()
        self._present = 0
        self._questions: dict[Key, _Question] = {}
        self._asked = 0
        self._storing: set[Key] = set()
        self._loading: set[Key] = set()
        self._events = EventLog(STORAGE, on=events)
        self._hits = self._misses = self._stored = self._evictions = self._stray = 0
        self._stores_failed = self._loads_failed = self._slow = 0
        self._ask: queue.SimpleQueue[list[tuple[Key, int]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[tuple[Key, int, bool | None]]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._look, name=f"kv-{finder.name}-index-{i}", daemon=True)
            for i in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    # ---- lookup ----------------------------------------------------------------------------

    def lookup(self, key: Key) -> Presence:
        """HIT, MISS, or LATER while it is being looked up, written or loaded."""
        leading = self.leading([key])
        if leading.ready:
            return Presence.HIT
        return Presence.LATER if leading.later else Presence.MISS

    def leading(self, keys: Sequence[Key]) -> Leading:
        """How many leading keys are HIT. Starts lookups of unknown keys."""
        self._take_answers()
        for count, key in enumerate(keys):
            presence = self._known(key)
            if presence is None:
                if key not in self._questions:
                    self._start_looking(keys[count:])
                presence = self._overdue(key)
            if presence is not Presence.HIT:
                return Leading(count, presence is Presence.LATER)
        return Leading(len(keys), False)

    # ---- storing and loading ---------------------------------------------------------------

    def prepare_store(self, keys: Sequence[Key]) -> list[Key]:
        """The keys that are neither known to exist nor in flight, in order. Each must be passed to
        `complete_store` once."""
        self._take_answers()
        chosen = []
        for key in dict.fromkeys(keys):
            check_key(key)
            if self._known(key) not in (Presence.HIT, Presence.LATER):
                self._storing.add(key)
                self._questions.pop(key, None)
                chosen.append(key)
        self._misses += len(chosen)
        return chosen

    def complete_store(self, keys: Sequence[Key], ok: bool) -> None:
        """ok: every rank has written these chunks; otherwise the keys become unknown."""
        for key in keys:
            if key not in self._storing:
                self._stray += 1
                continue
            self._storing.remove(key)
            if ok:
                self._stored += 1
                self._note(key, _Finding(True))
                self._events.add(EventKind.STORED, key)
            else:
                self._stores_failed += 1
                self._drop(key)

    def begin_load(self, keys: Sequence[Key]) -> list[Key]:
        """The leading keys that are HIT. They are LATER until `end_load`, to which each must be
        passed once."""
        self._take_answers()
        chosen: list[Key] = []
        for key in keys:
            if self._known(key) is not Presence.HIT:
                break
            self._loading.add(key)
            chosen.append(key)
        self._hits += len(chosen)
        return chosen

    def end_load(self, keys: Sequence[Key], ok: bool) -> None:
        """The loads of these keys ended on every rank. Without `ok` they become MISS."""
        for key in keys:
            if key not in self._loading:
                self._stray += 1
                continue
            self._loading.remove(key)
            if not ok:
                self._loads_failed += 1
                self._lost(key)

    def evicted(self, keys: Iterable[Key]) -> None:
        """A worker of this engine has evicted these chunks."""
        for key in keys:
            self._evictions += 1
            self._lost(key)

    def clear(self) -> None:
        """Drop all findings; stores and loads in flight stay until their completion."""
        self._findings.clear()
        self._questions.clear()
        self._present = 0

    # ---- events and counts ------------------------------------------------------------------

    def take_events(self) -> list[BlockEvent]:
        """Events since the last call, in order."""
        return self._events.take()

    @property
    def stats(self) -> IndexStats:
        """Counts so far. `used` counts chunks known to exist; there is no capacity."""
        return IndexStats(
            hits=self._hits,
            misses=self._misses,
            stored=self._stored,
            stores_failed=self._stores_failed,
            loads_failed=self._loads_failed,
            evictions=self._evictions,
            slow=self._slow,
            stray=self._stray,
            used=self._present,
            in_use=len(self._storing) + len(self._loading),
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests; checks everything."""
        assert not self._storing & self._loading, "stored and loaded at once"
        assert not self._storing & self._questions.keys(), "stored and looked for at once"
        assert len(self._findings) <= self._memory.capacity, "too many findings"
        assert self._present == sum(found.present for found in self._findings.values())

    def close(self) -> None:
        """Stop the threads; does not wait for one that hangs."""
        for _ in self._threads:
            self._ask.put(None)
        for thread in self._threads:
            thread.join(timeout=1)
        self._finder.close()

    # ---- findings --------------------------------------------------------------------------

    def _known(self, key: Key) -> Presence | None:
        """What is known now; None if the key has to be looked up."""
        if key in self._storing or key in self._loading:
            return Presence.LATER
        finding = self._findings.get(key)
        if finding is None:
            return None
        now = self._clock()
        if finding.returned_at is None:
            finding.returned_at = now
        kept = self._memory.present_s if finding.present else self._memory.absent_s
        if now - finding.returned_at > kept:
            self._drop(key)
            return None
        return Presence.HIT if finding.present else Presence.MISS

    def _note(self, key: Key, finding: _Finding) -> None:
        self._questions.pop(key, None)  # a pending answer is older
        self._drop(key)
        self._findings[key] = finding
        self._present += finding.present
        if len(self._findings) > self._memory.capacity:
            _, oldest = self._findings.popitem(last=False)
            self._present -= oldest.present

    def _drop(self, key: Key) -> None:
        finding = self._findings.pop(key, None)
        if finding is not None:
            self._present -= finding.present

    def _lost(self, key: Key) -> None:
        self._note(key, _Finding(False))
        self._events.add(EventKind.REMOVED, key)

    # ---- asking the tier --------------------------------------------------------------------

    def _start_looking(self, keys: Sequence[Key]) -> None:
        """Look up a run of keys at once, up to the first one that is known or being looked up."""
        now = self._clock()
        batch = []
        for key in keys:
            if key in self._questions or self._known(key) is not None:
                break
            self._asked += 1
            self._questions[key] = _Question(self._asked, now)
            batch.append((key, self._asked))
        if batch:
            self._ask.put(batch)

    def _overdue(self, key: Key) -> Presence:
        """LATER, or MISS if the tier has not answered within `patience_s`."""
        question = self._questions.get(key)
        if question is None or self._clock() - question.asked_at <= self._memory.patience_s:
            return Presence.LATER
        self._slow += 1
        return Presence.MISS

    def _take_answers(self) -> None:
        while True:
            try:
                answers = self._answers.get_nowait()
            except queue.Empty:
                return
            for key, number, present in answers:
                question = self._questions.get(key)
                if question is None or question.number != number:
                    continue  # there is newer information
                del self._questions[key]
                if present is not None:
                    self._note(key, _Finding(present))

    def _look(self) -> None:
        """One lookup thread: batches of keys in, answers out."""
        while (batch := self._ask.get()) is not None:
            # Chunks after a gap in a prompt are useless, so they are not looked up.
            present = self._leading([key for key, _ in batch])
            self._answers.put(
                [
                    (key, number, place < present if place <= present else None)
                    for place, (key, number) in enumerate(batch)
                ]
            )

    def _leading(self, keys: Sequence[Key]) -> int:
        try:
            return self._finder.leading(keys)
        except OSError as error:
            self._log.warning("no chunks are found in the %s: %s", self._finder.name, error)
        return 0
