"""The directory's cap: who goes, who stays, and what dead writers leave."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unit.identity.processes import dead_owner
from unit.store.chunks import (
    FINGERPRINT,
    content_of,
    cut,
    empty,
    key_of,
    open_directory,
    path_of,
)

from disagg.identity import process
from disagg.store.base import WriteOutcome
from disagg.store.directory import Directory
from disagg.store.directory_space import LOCK, DirectorySpace, OnRemoved

MakeSpace = Callable[..., DirectorySpace]
FILE = 1984


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeSpace]:
    made: list[DirectorySpace] = []

    def make(max_files: float, on_removed: OnRemoved | None = None) -> DirectorySpace:
        made.append(DirectorySpace(tmp_path, int(max_files * FILE), on_removed))
        return made[-1]

    yield make
    for space in made:
        space.close()


def write(directory: Directory, *numbers: int, rank: int = 0) -> list[str]:
    results = [directory.write(key_of(n), cut(content_of(key_of(n), rank))) for n in numbers]
    return [result.reason or str(result.outcome) for result in results]


def age(root: Path, number: int, seconds: float, rank: int = 0) -> None:
    then = time.time() - seconds
    os.utime(path_of(root, key_of(number), rank), (then, then))


def present(root: Path, numbers: range, rank: int = 0) -> list[int]:
    return [n for n in numbers if path_of(root, key_of(n), rank).exists()]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_the_size_of_a_file_here(tmp_path: Path) -> None:
    write(open_directory(tmp_path), 1)
    assert path_of(tmp_path, key_of(1)).stat().st_size == FILE


def test_what_was_used_longest_ago_goes_with_all_its_ranks(tmp_path: Path, make: MakeSpace) -> None:
    for rank in (0, 1):
        directory = open_directory(tmp_path, rank)
        write(directory, *range(10), rank=rank)
        for number in range(10):
            age(tmp_path, number, 10_000 - number, rank)
    # Rank 1 of number 0 was used just now, and so the chunk was.
    age(tmp_path, 0, 0, rank=1)
    removed: list[tuple[str, list[bytes]]] = []
    space = make(20, lambda *which: removed.append(which))
    wait_until(lambda: space.used == 18 * FILE)
    for rank in (0, 1):
        assert present(tmp_path, range(10), rank) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert removed == [(FINGERPRINT.namespace, [key_of(1)])]
    assert space.chunks_evicted == 1


def test_one_process_never_passes_the_cap(tmp_path: Path, make: MakeSpace) -> None:
    space = make(10)
    directory = open_directory(tmp_path, space=space)
    for number in range(60):
        assert write(directory, number) == ["written"]
        # Counted, not asked for their sizes: one may be evicted just now.
        assert len(list(tmp_path.rglob("*.safetensors"))) <= 10
        wait_until(lambda: space.used <= 9 * FILE)
    left = present(tmp_path, range(60))
    assert left == list(range(60 - len(left), 60))
    assert len(left) + space.chunks_evicted == 60


def test_without_room_a_store_fails_and_room_is_made(tmp_path: Path, make: MakeSpace) -> None:
    """Files larger than what is kept free: only the refusal tells how much is wanted."""
    write(open_directory(tmp_path), *range(3))
    space = make(3.1)
    wait_until(lambda: space.used == 3 * FILE or space.chunks_evicted > 0)
    directory = open_directory(tmp_path, space=space)
    wait_until(lambda: write(directory, 7) == ["written"] or write(directory, 7) == ["existed"])


def test_for_what_can_never_fit_nothing_goes(tmp_path: Path, make: MakeSpace) -> None:
    write(open_directory(tmp_path), 1)
    space = make(2)
    wait_until(lambda: space.used == FILE)
    assert not space.reserve(3 * FILE)
    space.make_room()
    assert present(tmp_path, range(3)) == [1]


def test_a_disk_smaller_than_the_cap(tmp_path: Path, make: MakeSpace) -> None:
    write(open_directory(tmp_path), *range(10))
    space = make(1000)
    wait_until(lambda: space.used == 10 * FILE)
    assert space.reserve(FILE)
    space.give_back(FILE, disk_full=True)
    wait_until(lambda: space.used == 9 * FILE)
    assert len(present(tmp_path, range(10))) == 9


def test_what_was_reserved_and_not_written_is_free_again(tmp_path: Path, make: MakeSpace) -> None:
    """Else each failed write would make the tier smaller."""
    space = make(3)
    space.make_room()
    for _ in range(10):
        assert space.reserve(FILE)
        assert space.used == FILE
        space.give_back(FILE)
        assert space.used == 0
    space.make_room()
    assert space.used == 0


def test_what_is_being_written_counts(tmp_path: Path, make: MakeSpace) -> None:
    """A scan cannot see it yet."""
    space = make(100)
    space.make_room()
    for _ in range(3):
        assert space.reserve(FILE)
    space.make_room()
    assert space.used == 3 * FILE
    write(open_directory(tmp_path), 1)
    space.written(FILE)
    space.make_room()
    assert space.used == 3 * FILE
    space.give_back(2 * FILE)
    space.make_room()
    assert space.used == FILE


def test_a_file_fits_to_the_last_byte(tmp_path: Path, make: MakeSpace) -> None:
    space = make(2)
    space.make_room()
    assert space.reserve(2 * FILE)
    assert not space.reserve(1)
    space.give_back(2 * FILE)
    assert not space.reserve(2 * FILE + 1)
    assert space.reserve(2 * FILE)


def test_a_write_that_fails_gives_its_bytes_back(tmp_path: Path, make: MakeSpace) -> None:
    space = make(3)
    space.make_room()
    directory = open_directory(tmp_path, space=space)
    assert write(directory, 1) == ["written"]
    wait_until(lambda: space.used == FILE)
    path = path_of(tmp_path, key_of(2))
    path.mkdir(parents=True)  # no file can take its name
    for _ in range(5):
        assert write(directory, 2) not in (["written"], ["full"])
    assert space.used == FILE
    assert write(directory, 1) == ["existed"]
    assert space.used == FILE
    assert write(directory, 3) == ["written"]


def test_the_last_look_is_known_after_a_restart(tmp_path: Path, make: MakeSpace) -> None:
    write(open_directory(tmp_path), *range(4))
    make(100).make_room()
    (space,) = [make(100)]
    assert space.used == 4 * FILE


def test_whoever_comes_finds_the_last_look_whole(tmp_path: Path, make: MakeSpace) -> None:
    """Also while another one looks: an empty record would count as an empty directory."""
    write(open_directory(tmp_path), *range(4))
    space = make(100)
    space.make_room()
    seen: list[int] = []

    def read() -> None:
        while len(seen) < 3000:
            content = (tmp_path / LOCK).read_text()
            seen.append(json.loads(content)[0] if content else 0)

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        space.make_room()
    assert set(seen) == {4 * FILE}


@pytest.mark.parametrize("content", ["", "x", "[1]", "{}", "[null, 1]", '["1e5", 0]'])
def test_a_lock_file_with_anything_in_it(tmp_path: Path, make: MakeSpace, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    write(open_directory(tmp_path), 1)
    space = make(100)
    wait_until(lambda: space.used == FILE)


def test_what_is_not_ours_stays(tmp_path: Path, make: MakeSpace) -> None:
    write(open_directory(tmp_path), 1)
    folder = path_of(tmp_path, key_of(1)).parent
    strange = [tmp_path / "notes", folder / "x.safetensors", folder / f"{'A' * 64}.r0.safetensors"]
    for path in strange:
        path.write_bytes(bytes(3 * FILE))
    (folder / "ab.r0.safetensors").mkdir()
    space = make(1)
    wait_until(lambda: space.chunks_evicted == 1)
    assert space.used == 0
    assert all(path.exists() for path in strange)
    assert present(tmp_path, range(3)) == []


def test_temporary_files_of_the_dead_are_swept(tmp_path: Path, make: MakeSpace) -> None:
    write(open_directory(tmp_path), 1)
    folder = path_of(tmp_path, key_of(1)).parent
    elsewhere = "0123456789abcdef-17-4711"

    def leave(name: str, seconds: float = 0) -> Path:
        path = folder / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - seconds,) * 2)
        return path

    swept = [
        leave(f"aa.r0.safetensors.{dead_owner()}.3.tmp"),
        leave(f"aa.r0.safetensors.{elsewhere}.3.tmp", 7200),
        leave("../fingerprint.json.00ff00ff00ff00ff.tmp", 7200),
    ]
    kept = [
        leave(f"aa.r0.safetensors.{process.name()}.4.tmp", 7200),
        leave(f"aa.r0.safetensors.{elsewhere}.4.tmp"),
        leave("another.tmp", 7200),
        leave("model.safetensors.tmp", 7200),
        leave("../fingerprint.json.00ff.tmp", 7200),
        leave("../../fingerprint.json.00ff00ff00ff00ff.tmp", 7200),
        leave(f"../../aa.r0.safetensors.{dead_owner()}.3.tmp", 7200),
    ]
    assert make(100).make_room().temporaries in (0, 3), "the thread may have been first"
    assert [path.exists() for path in swept] == [False] * 3
    assert [path.exists() for path in kept] == [True] * 7


def test_several_evict_and_write_at_once(tmp_path: Path, make: MakeSpace) -> None:
    """Threads with a space each, as so many processes would have; every read is right or none."""
    spaces = [make(12) for _ in range(3)]
    wrong: list[object] = []
    outcomes: set[str] = set()

    def engine(number: int) -> None:
        directory = open_directory(tmp_path, space=spaces[number])
        for step in range(150):
            key = key_of((step * 7 + number) % 40)
            outcomes.add(directory.write(key, cut(content_of(key))).outcome)
            if step % 10 == 0:
                spaces[number].make_room()
            memory, buffers = empty()
            result = directory.read(key, buffers)
            if result.ok and memory != content_of(key):
                wrong.append(key)
            if directory.stats.damaged:
                wrong.append(result)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert {WriteOutcome.WRITTEN, WriteOutcome.EXISTED} <= outcomes
    spaces[0].make_room()
    assert len(present(tmp_path, range(40))) <= 12
    assert sum(space.chunks_evicted for space in spaces) > 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_cap_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cap of 0"):
        DirectorySpace(tmp_path, 0)
