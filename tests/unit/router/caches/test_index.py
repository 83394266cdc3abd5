"""Which engines hold how much of a prompt, against a model that keeps plain sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.router.caches.index import CacheIndex, Steps, slots_of

SLOTS, KEYS = 4, 12
MEDIA = ("GPU", "CPU", "FILES")
Change = tuple[str, int, int, str]

changes: st.SearchStrategy[list[Change]] = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "discard", "drop", "sweep"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, KEYS - 1),
        st.sampled_from(MEDIA),
    ),
    max_size=120,
)
chains = st.permutations(range(KEYS)).flatmap(
    lambda order: st.integers(0, KEYS).map(lambda count: list(order[:count]))
)


class Naive:
    """What every engine holds, as a set of (key, medium)."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.slots = [self.index.take_slot() for _ in range(SLOTS)]
        self.held: list[set[tuple[int, str]]] = [set() for _ in range(SLOTS)]

    def apply(self, change: Change) -> None:
        what, engine, key, medium = change
        holders = self.index.of_medium(medium)
        if what == "add":
            self.index.add(holders, key, self.slots[engine])
            self.held[engine].add((key, medium))
        elif what == "discard":
            self.index.discard(holders, key, self.slots[engine])
            self.held[engine].discard((key, medium))
        elif what == "drop":
            keys = {key for key, _ in self.held[engine]}
            self.index.give_back(self.slots[engine], sorted(keys))
            self.slots[engine], self.held[engine] = self.index.take_slot(), set()
        else:
            self.index.sweep(key)

    def depth(self, engine: int, chain: Sequence[int], media: Sequence[str]) -> int:
        for number, key in enumerate(chain):
            if not any((key, medium) in self.held[engine] for medium in media):
                return number
        return len(chain)


def by_slot(steps: Steps) -> dict[int, int]:
    assert [blocks for blocks, _ in steps] == sorted({blocks for blocks, _ in steps})
    found = [(slot, blocks) for blocks, slots in steps for slot in slots_of(slots)]
    assert len(found) == len(dict(found)), "each engine once"
    return dict(found)


@given(changes, chains, st.integers(1, KEYS))
@settings(max_examples=300, deadline=None)
def test_depths_are_those_of_plain_sets(
    all_changes: list[Change], chain: list[int], part: int
) -> None:
    naive = Naive()
    among = 0
    for change in all_changes:
        naive.apply(change)
    for slot in naive.slots:
        among |= naive.index.bit(slot)
    parts = [chain[at : at + part] for at in range(0, len(chain), part)]
    on_gpu, anywhere = map(by_slot, naive.index.depths(parts, among))
    for engine, slot in enumerate(naive.slots):
        assert on_gpu[slot] == naive.depth(engine, chain, ["GPU"])
        assert anywhere[slot] == naive.depth(engine, chain, MEDIA)
        for key in range(KEYS):
            is_held = any(one == key for one, _ in naive.held[engine])
            assert naive.index.holds(key, slot) == is_held
    assert set(on_gpu) == set(anywhere) == set(naive.slots)


lengths = st.lists(st.integers(0, KEYS), min_size=SLOTS, max_size=SLOTS)


@given(lengths, st.integers(1, KEYS), st.integers(0, SLOTS))
@settings(max_examples=300, deadline=None)
def test_leaps_find_what_a_walk_finds(held: list[int], part: int, dead: int) -> None:
    """Of engines that hold prefixes."""
    index, among = CacheIndex(), 0
    for number, count in enumerate(held):
        slot = index.take_slot()
        among |= index.bit(slot)
        for key in range(count):
            index.add(index.gpu, key, slot)
        if number == dead:
            index.give_back(slot, range(count))
    parts = [range(at, min(at + part, KEYS)) for at in range(0, KEYS, part)]
    leapt = index.depths(parts, among, leaps=True)
    assert leapt == index.depths(parts, among)
    expected = {slot: 0 if slot == dead else count for slot, count in enumerate(held)}
    assert by_slot(leapt[0]) == expected


@given(changes, chains)
@settings(max_examples=100, deadline=None)
def test_leaps_over_holes_still_tell_of_every_engine_once(
    all_changes: list[Change], chain: list[int]
) -> None:
    naive = Naive()
    for change in all_changes:
        naive.apply((*change[:3], "GPU"))
    among = sum(naive.index.bit(slot) for slot in naive.slots)
    exact = by_slot(naive.index.depths([chain] if chain else [], among)[0])
    leapt = by_slot(naive.index.depths([chain] if chain else [], among, leaps=True)[0])
    assert set(leapt) == set(naive.slots)
    assert all(leapt[slot] >= depth for slot, depth in exact.items())


@given(changes)
@settings(max_examples=100, deadline=None)
def test_what_is_dropped_leaves_nothing(all_changes: list[Change]) -> None:
    naive = Naive()
    for change in all_changes:
        naive.apply(change)
    for engine in range(SLOTS):
        naive.apply(("drop", engine, 0, "GPU"))
    while naive.index.sweep(3):
        pass
    assert len(naive.index) == 0
    taken = [naive.index.take_slot() for _ in range(SLOTS)]
    assert max(taken) < 3 * SLOTS + len(all_changes), "slots are used again"


def test_a_dead_slot_holds_nothing_before_it_is_swept() -> None:
    index = CacheIndex()
    slot = index.take_slot()
    index.add(index.gpu, 1, slot)
    among = index.bit(slot)
    assert index.depths([[1]], among)[0] == [(1, among)]
    index.give_back(slot, [1])
    assert index.depths([[1]], among)[0] == [(0, among)]
    assert index.take_slot() != slot, "its bits are not cleared yet"
    assert not index.sweep(10)
    assert index.take_slot() == slot


def test_media_of_many_names_are_bounded() -> None:
    index = CacheIndex()
    holders: list[dict[int, int]] = [index.of_medium(f"m{number}") for number in range(100)]
    assert len({id(one) for one in holders}) <= 9
    assert index.of_medium("m0") is holders[0]
    assert index.of_medium("m99") is holders[99]


def test_equal_sets_are_one_object() -> None:
    index = CacheIndex()
    slots = [index.take_slot() for _ in range(300)]
    for key in (1, 2):
        for slot in slots:
            index.add(index.gpu, key, slot)
    assert index.gpu[1] is index.gpu[2]
    values: list[Any] = list(index.gpu.values())
    assert values[0].bit_count() == 300
