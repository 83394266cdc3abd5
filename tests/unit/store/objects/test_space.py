"""Sweeps of a real bucket: the limit, the lifetime, and several engines at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from unit.store.chunks import FINGERPRINT, content_of, cut, key_of
from unit.store.objects.conftest import Stores, name_of, replace

from disagg.store.base import Key
from disagg.store.objects.base import Entry, ObjectStore, StoreError
from disagg.store.objects.s3 import S3Store
from disagg.store.objects.space import ObjectSpace, OnRemoved

Make = Callable[..., ObjectSpace]
SIZE = 1280
"""Of one object in these tests."""


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ObjectSpace] = []

    def make(
        store: ObjectStore,
        max_bytes: int | None,
        ttl_s: float | None = None,
        on_removed: OnRemoved | None = None,
    ) -> ObjectSpace:
        made.append(ObjectSpace(store, max_bytes, ttl_s, on_removed, interval_s=1e9))
        return made[-1]

    yield make
    for space in made:
        space.close()


class Aged:
    """A bucket of which each object is as old as its test says: S3 gives them the time of now."""

    def __init__(self, store: ObjectStore, ages: dict[str, float]) -> None:
        self._store, self._ages = store, ages
        self.place, self.batch = store.place, store.batch
        for name in ("put", "get", "fetch", "sizes", "touch", "remove", "close"):
            setattr(self, name, getattr(store, name))

    def entries(self) -> Iterator[Entry]:
        for entry in self._store.entries():
            yield entry._replace(changed_at=time.time() - self._ages.get(entry.name, 0.0))


def filled(s3: Stores, count: int) -> tuple[ObjectStore, list[Key]]:
    """So many chunks of two ranks, the first one the oldest; none of the numbers is in order."""
    store, keys = s3.open(), [key_of(number) for number in range(count)]
    ages = {}
    for number, key in enumerate(keys):
        for rank in range(2):
            replace(store, name_of(key, rank), bytes(SIZE))
            ages[name_of(key, rank)] = 1000.0 - number
    return Aged(store, ages), keys  # type: ignore[return-value]


def left(store: ObjectStore, keys: list[Key]) -> list[Key]:
    sizes = store.sizes([name_of(key, rank) for key in keys for rank in range(2)])
    pairs = zip(keys, zip(sizes[::2], sizes[1::2], strict=True), strict=True)
    return [key for key, found in pairs if found != (None, None)]


def test_what_is_too_much_goes_oldest_first_with_all_ranks(s3: Stores, make: Make) -> None:
    store, keys = filled(s3, 20)
    gone: list[tuple[str, list[Key]]] = []
    space = make(store, 20 * SIZE, None, lambda *removed: gone.append(removed))
    swept = space.sweep()
    assert left(store, keys) == keys[11:]
    assert swept == (11, 22 * SIZE, 18 * SIZE)
    assert gone == [(FINGERPRINT.namespace, keys[:11])]
    assert space.sweep() == (0, 0, 18 * SIZE)


def test_what_is_too_old_goes(s3: Stores, make: Make) -> None:
    store, keys = filled(s3, 10)
    assert make(store, None, 995.5).sweep().chunks == 5
    assert left(store, keys) == keys[5:]


def test_what_is_not_ours_stays(s3: Stores, make: Make) -> None:
    store, keys = filled(s3, 3)
    others = [
        "README",
        f"{FINGERPRINT.namespace}/fingerprint.json",
        f"{FINGERPRINT.namespace}/ab/{keys[0].hex()}.r0.safetensors",
        name_of(keys[0]).replace(FINGERPRINT.namespace, "photos"),
        f"{name_of(keys[0])}.bak",
    ]
    for name in others:
        replace(store, name, bytes(SIZE))
    assert make(store, 1).sweep().left == 0
    assert left(store, keys) == []
    assert store.sizes(others) == [SIZE] * len(others)


def test_several_sweep_at_once_and_not_too_much_goes(s3: Stores, make: Make) -> None:
    store, keys = filled(s3, 40)
    spaces = [make(store, 40 * SIZE) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda space: space.sweep(), spaces))
    assert left(store, keys) == keys[22:]


def test_a_thread_sweeps_after_enough_was_written(s3: Stores, make: Make) -> None:
    store, keys = filled(s3, 20)
    space = make(store, 20 * SIZE)
    assert space.reserve(SIZE)
    deadline = time.monotonic() + 30
    while left(store, keys) != keys[11:]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_sweeps_writing_ends(s3: Stores, make: Make) -> None:
    class Unlisted(S3Store):
        def entries(self) -> Iterator[Entry]:
            raise StoreError("denied")

    store = s3.open()
    store.__class__ = Unlisted
    space = make(store, 100 * SIZE)
    assert [space.reserve(SIZE) for _ in range(12)] == [True] * 10 + [False] * 2
    with pytest.raises(StoreError):
        space.sweep()
    tier = s3.tier(space=space)
    assert tier.write(key_of(0), cut(content_of(key_of(0)))).reason == "full"


def test_a_sweep_lets_writing_go_on(s3: Stores, make: Make) -> None:
    space = make(s3.open(), 100 * SIZE)
    assert [space.reserve(SIZE) for _ in range(11)][-2:] == [True, False]
    deadline = time.monotonic() + 30
    while not space.reserve(SIZE):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_there_must_be_something_to_do(s3: Stores) -> None:
    with pytest.raises(ValueError, match="neither"):
        ObjectSpace(s3.open(), None, None)
