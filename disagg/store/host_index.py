"""The scheduler's half of the host memory tier: which chunk is in which slot, and eviction.

Only the scheduler's thread calls it. It moves no bytes: the workers copy between their blocks and
the given slots, and the caller reports the result of every slot. No call takes longer with more
chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disagg.store import policies
from disagg.store.base import (
    CPU,
    BlockEvent,
    EventKind,
    EventLog,
    IndexStats,
    Key,
    Leading,
    Presence,
    Slot,
    check_key,
)


@dataclass(slots=True)
class _Chunk:
    """A chunk in a slot. ready: written. pins: uses that protect it from eviction, `loads` of them
    loads."""

    slot: Slot
    ready: bool = False
    pins: int = 0
    loads: int = 0
    gone: bool = False  # cleared while in use: lookups miss it, its slot is not free yet

    @property
    def idle(self) -> bool:
        return self.ready and not self.pins


class HostIndex:
    """Key -> slot, of `capacity` slots. policy: a name in `policies.POLICIES`.

    With `events` off, no events are collected, and `take_events` need not be called.
    """

    def __init__(self, capacity: int, policy: str = "turns", *, events: bool = True) -> None:
        if capacity < 1:
            raise ValueError(f"a host tier needs at least one slot, not {capacity}")
        self._capacity = capacity
        self._policy_name = policy
        self._policy = policies.make(policy, capacity)
        self._chunks: dict[Key, _Chunk] = {}
        self._gone: dict[int, _Chunk] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._events = EventLog(CPU, on=events)
        self._in_use = 0
        self._hits = self._misses = self._stored = self._evictions = self._stray = 0
        self._stores_failed = self._stores_refused = self._loads_failed = 0

    # ---- lookup ----------------------------------------------------------------------------

    def lookup(self, key: Key) -> Presence:
        """HIT if the chunk can be loaded, LATER if it is being written. No side effect."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return Presence.MISS
        return Presence.HIT if chunk.ready else Presence.LATER

    def leading(self, keys: Iterable[Key]) -> Leading:
        """How many leading keys are HIT. No side effect."""
        count = 0
        for key in keys:
            presence = self.lookup(key)
            if presence is not Presence.HIT:
                return Leading(count, presence is Presence.LATER)
            count += 1
        return Leading(count, False)

    def loading(self, keys: Iterable[Key]) -> bool:
        """Whether one of these is being loaded: its blocks will soon be where a second request
        with the same prefix finds them, so that this one had better wait."""
        return any(chunk.loads for key in keys if (chunk := self._chunks.get(key)))

    # ---- storing ---------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[Key]) -> list[Slot]:
        """Slots for the keys that are neither stored nor being written, in order.

        Evicts unused chunks to make room, but none of `keys`. The last keys get no slot if all
        slots are in use. Every returned slot must be passed to `complete_store` once.
        """
        chunks = [self._chunks[key] for key in dict.fromkeys(keys) if key in self._chunks]
        for chunk in chunks:
            self._pin(chunk)
        slots = []
        for key in dict.fromkeys(keys):
            if key in self._chunks:
                continue
            slot = self._admit(key)
            if slot is None:
                self._stores_refused += 1
                continue
            self._misses += 1
            slots.append(slot)
        for chunk in reversed(chunks):
            self._unpin(chunk)
        return slots

    def complete_store(self, slots: Sequence[Slot], ok: bool, *, pin: bool = False) -> list[Slot]:
        """ok: every rank has written these slots; otherwise their chunks are dropped.

        Pass slots in prefix order, so that a prompt's end is evicted before its beginning. pin:
        written slots stay in use until `unpin`, even if they were cleared meanwhile; returns them.
        """
        stored, pinned = list[Key](), list[Slot]()
        for slot in reversed(slots):
            chunk = self._find(slot)
            if chunk is None or chunk.ready:
                self._stray += 1
                continue
            self._in_use -= 1
            self._stored += ok
            self._stores_failed += not ok
            if ok:
                chunk.ready = True
            if chunk.gone:
                if ok and pin:
                    chunk.pins, self._in_use = 1, self._in_use + 1
                    pinned.append(slot)
                else:
                    self._drop_gone(chunk)
            elif ok:
                self._policy.release(slot.key)
                stored.append(slot.key)
                if pin:
                    self._pin(chunk)
                    pinned.append(slot)
            else:
                self._policy.remove(slot.key)
                del self._chunks[slot.key]
                self._free.append(slot.number)
        for key in reversed(stored):
            self._events.add(EventKind.STORED, key)
        return pinned[::-1]

    # ---- loading and other use -------------------------------------------------------------

    def begin_load(self, keys: Sequence[Key]) -> list[Slot]:
        """The slots of the leading keys that are HIT; they are not evicted until `end_load`.

        Counts as use. If chunks were evicted since their lookup, fewer slots are returned.
        """
        slots = self.pin(keys)
        self._hits += len(slots)
        for slot in reversed(slots):
            self._chunks[slot.key].loads += 1
            self._policy.touch(slot.key)
        return slots

    def end_load(self, slots: Sequence[Slot], ok: bool) -> None:
        """The loads of these slots ended on every rank. A failure is counted; the chunk stays, as
        it need not be the cause."""
        for slot in reversed(slots):
            chunk = self._find(slot)
            if chunk is None or not chunk.loads:
                self._stray += 1
                continue
            chunk.loads -= 1
            self._unpin(chunk)
            if not ok:
                self._loads_failed += 1

    def pin(self, keys: Sequence[Key]) -> list[Slot]:
        """As `begin_load`, for a use that is not a load, such as a copy into the next tier: it does
        not count as a hit or as use. Ends with `unpin`."""
        slots = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or not chunk.ready:
                break
            self._pin(chunk)
            slots.append(chunk.slot)
        return slots

    def unpin(self, slots: Sequence[Slot]) -> None:
        """End the use of these slots that `pin` began."""
        for slot in reversed(slots):
            chunk = self._find(slot)
            if chunk is None or chunk.pins <= chunk.loads:
                self._stray += 1
                continue
            self._unpin(chunk)

    def touch(self, keys: Sequence[Key]) -> None:
        """A request with this prefix arrived, but loads nothing from here (its blocks are in the
        accelerator's cache). Unknown keys are skipped."""
        for key in reversed(keys):
            if key in self._chunks:
                self._policy.touch(key)

    def refresh(self, keys: Sequence[Key]) -> None:
        """Reorder a prompt's keys when its request ends, so that its end is evicted before its
        beginning. Chunks that were stored as they were computed are in the opposite order."""
        for key in reversed(keys):
            if key in self._chunks:
                self._policy.refresh(key)

    def clear(self) -> None:
        """Drop all chunks. Slots in use stay so until their completion, but lookups miss them."""
        for key, chunk in self._chunks.items():
            if chunk.ready:
                self._events.add(EventKind.REMOVED, key)
            if chunk.idle:
                self._free.append(chunk.slot.number)
            else:
                chunk.gone = True
                self._gone[chunk.slot.number] = chunk
        self._chunks.clear()
        self._policy = policies.make(self._policy_name, self._capacity)

    # ---- events and counts ------------------------------------------------------------------

    def take_events(self) -> list[BlockEvent]:
        """Events since the last call, in order."""
        return self._events.take()

    @property
    def stats(self) -> IndexStats:
        """Counts so far."""
        return IndexStats(
            hits=self._hits,
            misses=self._misses,
            stored=self._stored,
            stores_failed=self._stores_failed,
            stores_refused=self._stores_refused,
            loads_failed=self._loads_failed,
            evictions=self._evictions,
            stray=self._stray,
            used=self._capacity - len(self._free),
            in_use=self._in_use,
            capacity=self._capacity,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests; checks everything."""
        self._policy.check_integrity()
        taken = [chunk.slot.number for chunk in (*self._chunks.values(), *self._gone.values())]
        every = sorted([*self._free, *taken])
        assert every == list(range(self._capacity)), "a slot is both free and in use, or neither"
        assert set(self._gone) <= set(taken)
        assert len(self._policy) == len(self._chunks), "the policy knows other chunks"
        for key, chunk in self._chunks.items():
            assert chunk.slot.key == key
            assert key in self._policy
            assert not chunk.gone
        for chunk in self._gone.values():
            assert not chunk.idle, "an unused slot is not free"
        every_chunk = [*self._chunks.values(), *self._gone.values()]
        assert all(0 <= chunk.loads <= chunk.pins for chunk in every_chunk)
        assert all(chunk.ready or not chunk.pins for chunk in every_chunk)
        assert self._in_use == sum(not chunk.idle for chunk in every_chunk)

    # ---- inside ----------------------------------------------------------------------------

    def _admit(self, key: Key) -> Slot | None:
        check_key(key)
        admission = self._policy.admit(key, full=not self._free)
        if not admission.admitted:
            return None
        if admission.evicted is not None:
            self._free.append(self._chunks.pop(admission.evicted).slot.number)
            self._evictions += 1
            self._events.add(EventKind.REMOVED, admission.evicted)
        slot = Slot(key, self._free.pop())
        self._chunks[key] = _Chunk(slot)
        self._in_use += 1
        return slot

    def _find(self, slot: Slot) -> _Chunk | None:
        """The chunk that holds this slot, cleared or not."""
        for chunk in (self._chunks.get(slot.key), self._gone.get(slot.number)):
            if chunk is not None and chunk.slot == slot:
                return chunk
        return None

    def _pin(self, chunk: _Chunk) -> None:
        """Chunks that are being written are held anyway, and have no pins."""
        if not chunk.ready:
            return
        if not chunk.pins:
            self._policy.hold(chunk.slot.key)
            self._in_use += 1
        chunk.pins += 1

    def _unpin(self, chunk: _Chunk) -> None:
        if not chunk.ready:
            return
        chunk.pins -= 1
        if chunk.pins:
            return
        self._in_use -= 1
        if chunk.gone:
            self._drop_gone(chunk)
        else:
            self._policy.release(chunk.slot.key)

    def _drop_gone(self, chunk: _Chunk) -> None:
        del self._gone[chunk.slot.number]
        self._free.append(chunk.slot.number)
