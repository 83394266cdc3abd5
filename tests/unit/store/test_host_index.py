"""The host tier's index: examples, and any order of calls against a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disagg.store.base import CPU, BlockEvent, EventKind, Leading, Presence, Slot
from disagg.store.host_index import HostIndex

A, B, C, D = (bytes([number]) * 32 for number in range(4))


def stored(index: HostIndex, *keys: bytes) -> list[Slot]:
    slots = index.prepare_store(keys)
    index.complete_store(slots, True)
    return slots


def test_a_chunk_is_later_until_it_is_stored() -> None:
    index = HostIndex(4)
    slots = index.prepare_store([A, B])
    assert [slot.key for slot in slots] == [A, B]
    assert index.lookup(A) is Presence.LATER
    assert index.prepare_store([A, B]) == [], "stored twice at once"
    index.complete_store(slots[:1], True)
    assert index.leading([A, B, C]) == Leading(1, True)
    index.complete_store(slots[1:], True)
    assert index.leading([A, B, C]) == Leading(2, False)
    assert index.prepare_store([A, B, C])[0].key == C


def test_a_failed_store_is_forgotten_and_counted() -> None:
    index = HostIndex(1)
    index.complete_store(index.prepare_store([A]), False)
    assert index.lookup(A) is Presence.MISS
    assert index.stats.stores_failed == 1
    assert index.stats.used == 0
    assert len(index.prepare_store([B])) == 1
    assert index.take_events() == []


def test_what_is_in_use_stays_and_the_rest_is_refused() -> None:
    index = HostIndex(2)
    stored(index, A, B)
    (slot,) = index.begin_load([A])
    again = index.begin_load([A, B])
    assert again[0] == slot
    assert index.loading([A])
    assert index.prepare_store([C, D]) == []
    assert index.stats.stores_refused == 2
    index.end_load(again, True)
    assert [s.key for s in index.prepare_store([C, D])] == [C], "only B could go"
    assert index.leading([A]) == Leading(1, False)
    index.end_load([slot], False)
    assert not index.loading([A])
    assert index.stats.loads_failed == 1
    assert index.stats.evictions == 1


def test_a_store_does_not_evict_its_own_prefix() -> None:
    index = HostIndex(2)
    stored(index, A, B)
    assert [slot.key for slot in index.prepare_store([A, B, C])] == []
    assert [slot.key for slot in index.prepare_store([B, C])] == [C]
    assert index.lookup(B) is Presence.HIT


def test_of_a_prompt_the_end_goes_first() -> None:
    index = HostIndex(3)
    stored(index, A, B, C)
    stored(index, D)
    assert index.leading([A, B, C]) == Leading(2, False)
    for one in (A, B):
        index.end_load(index.begin_load([one]), True)
    index.refresh([A, B])
    stored(index, C, b"x")
    assert index.leading([A, B]) == Leading(1, False)


def test_touched_chunks_stay() -> None:
    index = HostIndex(2)
    stored(index, A)
    stored(index, B)
    index.touch([A, D])
    stored(index, C)
    assert index.lookup(A) is Presence.HIT


def test_a_load_begins_with_what_is_there() -> None:
    index = HostIndex(4)
    stored(index, A, C)
    assert [slot.key for slot in index.begin_load([A, B, C])] == [A]
    assert index.stats.hits == 1
    assert index.stats.misses == 2


def test_a_pin_is_not_a_load() -> None:
    index = HostIndex(1)
    stored(index, A)
    slots = index.pin([A, B])
    assert not index.loading([A])
    assert index.prepare_store([B]) == []
    index.end_load(slots, True)
    assert index.stats.stray == 1, "ended as a load what was none"
    index.unpin(slots)
    index.unpin(slots)
    assert index.stats.stray == 2
    assert index.stats.hits == 0
    assert len(index.prepare_store([B])) == 1


def test_events_tell_what_can_be_loaded() -> None:
    index = HostIndex(2)
    stored(index, A, B)
    stored(index, C)
    assert index.take_events() == [
        BlockEvent(EventKind.STORED, A, CPU),
        BlockEvent(EventKind.STORED, B, CPU),
        BlockEvent(EventKind.REMOVED, B, CPU),
        BlockEvent(EventKind.STORED, C, CPU),
    ]
    assert index.take_events() == []
    silent = HostIndex(2, events=False)
    stored(silent, A)
    assert silent.take_events() == []


def test_slots_in_use_outlive_clearing() -> None:
    """A worker still writes to one and reads from the other: neither may be given away."""
    index = HostIndex(3)
    reading = index.begin_load([slot.key for slot in stored(index, A)])
    stored(index, B)
    writing = index.prepare_store([C])
    index.clear()
    index.check_integrity()
    assert [index.lookup(key) for key in (A, B, C)] == [Presence.MISS] * 3
    new = index.prepare_store([C, A, B])
    assert [slot.key for slot in new] == [C]
    index.complete_store(writing, True)
    assert index.lookup(C) is Presence.LATER, "the completion of the old one"
    index.end_load(reading, True)
    index.complete_store(new, True)
    index.check_integrity()
    assert index.stats.used == 1
    assert len(index.prepare_store([A, B])) == 2


def test_what_was_read_from_a_file_is_held_for_its_load_though_cleared() -> None:
    """The worker copies from the slot after it was filled: nobody else may write to it."""
    index = HostIndex(2)
    reading = index.prepare_store([A, B])
    index.clear()
    held = index.complete_store(reading, True, pin=True)
    assert held == reading
    assert index.prepare_store([A, C]) == []
    index.unpin(held)
    index.check_integrity()
    assert index.stats.stray == 0
    assert len(index.prepare_store([A, C])) == 2


def test_impossible_settings_and_keys() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        HostIndex(0)
    for key in (b"", b"x" * 65):
        with pytest.raises(ValueError, match="1 to 64 bytes"):
            HostIndex(1).prepare_store([key])


NUMBERS = st.integers(0, 11)


class AnyOrder(RuleBasedStateMachine):
    """Stores, loads, pins, failures, strays and clearing in any order.

    The model knows for every key whether it is written or readable, and who uses which slot. It
    leaves to the index whom it evicts, but not whom it may.
    """

    @initialize(capacity=st.integers(1, 6), policy=st.sampled_from(["lru", "arc", "turns"]))
    def begin(self, capacity: int, policy: str) -> None:
        self.index, self.capacity = HostIndex(capacity, policy), capacity
        self.writing: list[Slot] = []
        self.uses: list[tuple[bool, list[Slot]]] = []
        self.ready: dict[bytes, Slot] = {}
        self.cleared: set[Slot] = set()
        self.prepared = self.completed = 0

    def busy(self) -> Counter[Slot]:
        return Counter([*self.writing, *(slot for _, slots in self.uses for slot in slots)])

    @rule(numbers=st.lists(NUMBERS, max_size=5))
    def store(self, numbers: list[int]) -> None:
        keys = [bytes([number]) for number in numbers]
        live = {slot.key for slot in self.writing if slot not in self.cleared}
        absent = [key for key in dict.fromkeys(keys) if key not in live and key not in self.ready]
        busy = {slot.number for slot in self.busy()}
        slots = self.index.prepare_store(keys)
        assert [slot.key for slot in slots] == absent[: len(slots)], "not the prefix"
        assert not busy & {slot.number for slot in slots}, "a slot in use was given away"
        taken = {slot.number for slot in slots}
        gone = [key for key, slot in self.ready.items() if slot.number in taken]
        assert not set(gone) & set(keys), "it evicted what was to be kept"
        for key in gone:
            del self.ready[key]
        for event in self.index.take_events():
            assert event.kind is EventKind.REMOVED
            assert event.key in gone
        if len(slots) < len(absent):
            kept = set(keys)
            free = self.capacity - len(busy | taken | {s.number for s in self.ready.values()})
            idle = [s for k, s in self.ready.items() if s.number not in busy and k not in kept]
            assert not free, "refused, with room"
            assert not idle, "refused, with something to evict"
        self.writing += slots
        self.prepared += len(slots)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ok=st.booleans(), pin=st.booleans())
    def finish_store(self, data: st.DataObject, ok: bool, pin: bool) -> None:
        slot = data.draw(st.sampled_from(self.writing))
        pinned = self.index.complete_store([slot], ok, pin=pin)
        assert pinned == ([slot] if ok and pin else [])
        self.writing.remove(slot)
        if pinned:
            self.uses.append((False, pinned))
        self.completed += 1
        events = self.index.take_events()
        if ok and slot not in self.cleared:
            self.ready[slot.key] = slot
            assert events == [BlockEvent(EventKind.STORED, slot.key, CPU)]
        else:
            assert events == []
        self.cleared &= self.busy().keys()

    @rule(numbers=st.lists(NUMBERS, max_size=4, unique=True), load=st.booleans())
    def use(self, numbers: list[int], load: bool) -> None:
        keys = [bytes([number]) for number in numbers]
        expected = []
        for key in keys:
            if key not in self.ready:
                break
            expected.append(self.ready[key])
        slots = self.index.begin_load(keys) if load else self.index.pin(keys)
        assert slots == expected
        if slots:
            self.uses.append((load, slots))

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), ok=st.booleans())
    def finish_use(self, data: st.DataObject, ok: bool) -> None:
        use = data.draw(st.sampled_from(self.uses))
        self.uses.remove(use)
        if use[0]:
            self.index.end_load(use[1], ok)
        else:
            self.index.unpin(use[1])
        self.cleared &= self.busy().keys()

    @rule(numbers=st.lists(NUMBERS, max_size=5))
    def touch(self, numbers: list[int]) -> None:
        keys = [bytes([number]) for number in numbers]
        self.index.touch(keys)
        self.index.refresh(keys[:3])

    @rule(number=NUMBERS, place=st.integers(0, 5))
    def stray(self, number: int, place: int) -> None:
        """A completion of what is not being written, nor read."""
        slot = Slot(bytes([number]), place)
        if slot in self.busy() or slot.number >= self.capacity:
            return
        before = self.index.stats.stray
        self.index.complete_store([slot], True)
        self.index.end_load([slot], True)
        self.index.unpin([slot])
        assert self.index.stats.stray == before + 3

    @rule()
    def clear(self) -> None:
        self.cleared |= self.busy().keys()
        self.index.clear()
        assert {event.key for event in self.index.take_events()} == self.ready.keys()
        self.ready.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        live = {slot.key for slot in self.writing if slot not in self.cleared}
        for number in range(12):
            key = bytes([number])
            expected = Presence.HIT if key in self.ready else Presence.MISS
            assert self.index.lookup(key) is (Presence.LATER if key in live else expected)
        stats = self.index.stats
        slots = {*self.busy(), *self.ready.values()}
        assert stats.used == len(slots) <= self.capacity
        assert stats.in_use == len(self.busy())
        assert stats.stored + stats.stores_failed == self.completed
        assert self.prepared == self.completed + len(self.writing), "a completion was lost"

    def teardown(self) -> None:
        """When all has ended, nothing is in use."""
        if hasattr(self, "index"):
            self.index.complete_store(self.writing, False)
            for load, slots in self.uses:
                (self.index.end_load if load else self.index.unpin)(slots, *([True] * load))
            self.index.check_integrity()
            assert self.index.stats.in_use == 0
            assert self.index.stats.used == len(self.ready)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
