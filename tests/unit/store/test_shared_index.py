"""The index of the directory and of object stores: it asks, never waits, and forgets in time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from unit.store.chunks import FINGERPRINT, content_of, cut, key_of, open_directory, path_of

from disagg.errors import ConfigError
from disagg.store.base import STORAGE, BlockEvent, EventKind, Leading, Presence
from disagg.store.directory import DirectoryFinder
from disagg.store.fingerprint import Fingerprint
from disagg.store.shared_index import FindingsLimits, SharedIndex

A, B, C, D = (key_of(number) for number in range(4))
MakeIndex = Callable[..., SharedIndex]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[MakeIndex]:
    made: list[SharedIndex] = []

    def make(ranks: int = 1, **memory: float) -> SharedIndex:
        kept = FindingsLimits(**memory)  # type: ignore[arg-type]
        finder = DirectoryFinder(tmp_path, FINGERPRINT, ranks)
        made.append(SharedIndex(finder, kept, clock=clock))
        return made[-1]

    yield make
    for index in made:
        index.check_integrity()
        index.close()


def write(root: Path, *keys: bytes, rank: int = 0) -> None:
    directory = open_directory(root, rank)
    for key in keys:
        assert directory.write(key, cut(content_of(key, rank))).ok


def ask(index: SharedIndex, *keys: bytes) -> Leading:
    """Ask until the answer is known."""
    deadline = time.monotonic() + 10
    while (leading := index.leading(keys)).later:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return leading


def test_the_first_answer_is_later(tmp_path: Path, make: MakeIndex) -> None:
    write(tmp_path, A, B, D)
    index = make()
    assert index.leading([A, B, C, D]) == Leading(0, True)
    assert ask(index, A, B, C, D) == Leading(2, False)
    assert index.lookup(C) is Presence.MISS
    assert index.lookup(D) is Presence.LATER, "nobody looked beyond the gap"
    assert ask(index, D) == Leading(1, False)
    assert index.stats.used == 3


def test_a_chunk_is_there_when_all_ranks_are(tmp_path: Path, make: MakeIndex) -> None:
    write(tmp_path, A, B)
    write(tmp_path, A, rank=1)
    assert ask(make(2), A, B) == Leading(1, False)


def test_findings_age_from_when_they_were_told(
    tmp_path: Path, make: MakeIndex, clock: Clock
) -> None:
    write(tmp_path, A)
    index = make(present_s=30, absent_s=2)
    index.leading([A, B])
    time.sleep(0.1)
    clock.now += 1000  # a scheduler that was busy for long
    assert index.leading([A, B]) == Leading(1, False)
    clock.now += 3
    assert index.lookup(A) is Presence.HIT
    assert index.lookup(B) is Presence.LATER
    write(tmp_path, B)
    assert ask(index, A, B).ready in (1, 2), "the question was on its way"
    clock.now += 31
    path_of(tmp_path, A).unlink()
    assert index.lookup(A) is Presence.LATER
    assert ask(index, A) == Leading(0, False)


def test_what_is_being_stored_is_later(make: MakeIndex) -> None:
    index = make()
    assert index.prepare_store([A, B, A]) == [A, B]
    assert index.prepare_store([A, B]) == [], "stored twice at once"
    assert index.lookup(A) is Presence.LATER
    index.complete_store([A], True)
    index.complete_store([B], False)
    assert index.lookup(A) is Presence.HIT, "written by this engine: nobody has to look"
    assert index.prepare_store([A]) == []
    assert ask(index, B) == Leading(0, False)
    assert index.prepare_store([B]) == [B]
    stats = index.stats
    assert (stats.stored, stats.stores_failed, stats.misses, stats.in_use) == (1, 1, 3, 1)
    index.complete_store([C], True)
    assert index.stats.stray == 1


def test_what_is_being_loaded_is_later_to_others(tmp_path: Path, make: MakeIndex) -> None:
    write(tmp_path, A, B)
    index = make()
    ask(index, A, B)
    assert index.begin_load([A, B, C]) == [A, B]
    assert index.leading([A, B]) == Leading(0, True)
    assert index.begin_load([A]) == [], "loaded twice at once"
    index.end_load([A], True)
    index.end_load([B], False)
    assert index.leading([A, B]) == Leading(1, False)
    assert index.stats.hits == 2
    assert index.stats.loads_failed == 1
    index.end_load([B], True)
    assert index.stats.stray == 1


def test_an_older_answer_does_not_count(tmp_path: Path, make: MakeIndex) -> None:
    write(tmp_path, B)
    index = make()
    for key in (A, B):
        index.lookup(key)
    time.sleep(0.1)  # the answers wait to be taken
    assert index._answers.qsize() == 2
    answers = [index._answers.get() for _ in range(2)]
    index.complete_store(index.prepare_store([A]), True)
    index.evicted([B])
    for answer in answers:
        index._answers.put(answer)
    assert index.lookup(A) is Presence.HIT
    assert index.lookup(B) is Presence.MISS


def test_events(tmp_path: Path, make: MakeIndex) -> None:
    index = make()
    index.complete_store(index.prepare_store([A, B]), True)
    index.evicted([A])
    index.end_load(index.begin_load([B]), False)
    assert index.take_events() == [
        BlockEvent(EventKind.STORED, A, STORAGE),
        BlockEvent(EventKind.STORED, B, STORAGE),
        BlockEvent(EventKind.REMOVED, A, STORAGE),
        BlockEvent(EventKind.REMOVED, B, STORAGE),
    ]
    assert index.take_events() == []
    assert index.stats.evictions == 1


def test_no_more_findings_than_agreed(make: MakeIndex) -> None:
    index = make(capacity=10)
    for number in range(30):
        index.complete_store(index.prepare_store([key_of(number)]), True)
        index.check_integrity()
    assert index.lookup(key_of(29)) is Presence.HIT
    assert index.stats.used == 10


def test_clearing_keeps_what_is_in_flight(make: MakeIndex) -> None:
    index = make()
    index.complete_store(index.prepare_store([A]), True)
    index.prepare_store([B])
    index.begin_load([A])
    index.clear()
    assert index.leading([A]) == Leading(0, True)
    index.complete_store([B], True)
    index.end_load([A], True)
    assert index.lookup(B) is Presence.HIT
    assert index.stats.stray == 0


def test_a_disk_that_does_not_answer_is_a_miss(
    tmp_path: Path, make: MakeIndex, clock: Clock
) -> None:
    """A lookup blocks in the file system for as long as nobody opens the pipe's other end."""
    index = make(patience_s=5)
    stuck = path_of(tmp_path, A).parent
    os.mkfifo(tmp_path / "pipe")
    blocked = [key_of(number) for number in range(100, 104)]
    real = index._finder.leading

    def leading(keys: Sequence[bytes]) -> int:
        (tmp_path / "pipe").read_bytes()
        return real(keys)

    index._finder.leading = leading  # type: ignore[method-assign]
    for key in blocked:
        assert index.lookup(key) is Presence.LATER
    assert not stuck.exists()
    clock.now += 4
    assert index.lookup(blocked[0]) is Presence.LATER
    clock.now += 2
    assert index.lookup(blocked[0]) is Presence.MISS
    assert index.stats.slow == 1
    write(tmp_path, *blocked)

    def answer() -> None:
        with contextlib.suppress(OSError):  # no lookup blocks any more
            os.close(os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK))
        time.sleep(0.01)

    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and index.lookup(blocked[3]) is not Presence.HIT:
        answer()
    assert index.lookup(blocked[3]) is Presence.HIT, "once it answers it counts"
    while time.monotonic() < deadline and index._questions:
        answer()
        index.leading(blocked)
    assert not index._questions


def test_another_hash_seed_is_refused(tmp_path: Path, make: MakeIndex) -> None:
    make()
    with pytest.raises(ConfigError, match="hash_seed"):
        DirectoryFinder(tmp_path, Fingerprint(FINGERPRINT.fields, {"hash_seed": "x"}), 1)
