"""Chunk files: what was written is read, and anything else is a miss."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
from unit.store.chunks import (
    FINGERPRINT,
    GARBAGE,
    NUM_BYTES,
    SHAPE,
    SPEC,
    content_of,
    cut,
    empty,
    key_of,
    open_directory,
    path_of,
)

from disagg.errors import ConfigError
from disagg.store.base import FileStats, ReadOutcome, ReadResult, WriteOutcome, WriteResult
from disagg.store.directory import Directory
from disagg.store.directory_files import FileFormat, TensorSpec
from disagg.store.fingerprint import Fingerprint

KEY = key_of(1)


def write(directory: Directory, key: bytes = KEY, rank: int = 0) -> WriteResult:
    return directory.write(key, cut(content_of(key, rank)))


def read(directory: Directory, key: bytes = KEY) -> tuple[ReadResult, bytes]:
    memory, buffers = empty()
    return directory.read(key, buffers), bytes(memory)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    directory = open_directory(tmp_path, fsync=True)
    result = write(directory)
    assert result.outcome is WriteOutcome.WRITTEN
    assert read(directory) == (ReadResult(ReadOutcome.LOADED, NUM_BYTES), content_of(KEY))
    assert path_of(tmp_path, KEY).stat().st_size == result.num_bytes
    expected = FileStats(written=1, loaded=1, bytes_written=result.num_bytes, bytes_read=NUM_BYTES)
    assert directory.stats == expected
    assert files(tmp_path) == [f"{KEY.hex()}.r0.safetensors", "fingerprint.json"]


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    write(open_directory(tmp_path))
    path = path_of(tmp_path, KEY)
    tensors = dict(safetensors.deserialize(path.read_bytes()))
    assert sorted(tensors) == ["k", "v"]
    assert tensors["k"]["shape"] == list(SHAPE)
    assert tensors["k"]["dtype"] == "BF16"
    assert bytes(tensors["k"]["data"] + tensors["v"]["data"]) == content_of(KEY)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["key"] == KEY.hex()
        assert file.metadata()["fingerprint"] == FINGERPRINT.digest


def test_many_small_buffers(tmp_path: Path) -> None:
    """More than one system call takes."""
    directory = Directory(tmp_path, FINGERPRINT, 0, [TensorSpec("kv", "U8", (5000, 3))])
    content = content_of(KEY, size=15000)
    assert directory.write(KEY, cut(content, 5000)).ok
    memory = bytearray(15000)
    view = memoryview(memory).cast("B", (15000,))
    assert directory.read(KEY, [view[at : at + 2] for at in range(0, 15000, 2)]).ok
    assert memory == content


def test_buffers_of_other_types_than_bytes(tmp_path: Path) -> None:
    directory = Directory(tmp_path, FINGERPRINT, 0, [TensorSpec("kv", "U8", (64,))])
    assert directory.write(KEY, [memoryview(bytes(range(64))).cast("I")]).ok
    memory = bytearray(64)
    assert directory.read(KEY, [memoryview(memory).cast("B", (8, 8))]).ok
    assert memory == bytes(range(64))


def test_a_restart_finds_yesterday_s(tmp_path: Path) -> None:
    write(open_directory(tmp_path))
    again = open_directory(tmp_path)
    assert read(again)[1] == content_of(KEY)
    assert write(again) == WriteResult(WriteOutcome.EXISTED)


def test_what_is_not_there(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    assert read(directory) == (
        ReadResult(ReadOutcome.MISSING, reason="missing"),
        GARBAGE * NUM_BYTES,
    )
    assert directory.stats == FileStats(missing=1)


def test_ranks_and_fingerprints_are_apart(tmp_path: Path) -> None:
    write(open_directory(tmp_path))
    assert read(open_directory(tmp_path, rank=1))[0].outcome is ReadOutcome.MISSING
    other = Fingerprint({**FINGERPRINT.fields, "dtype": "float16"}, FINGERPRINT.hashing)
    assert read(Directory(tmp_path, other, 0, SPEC))[0].outcome is ReadOutcome.MISSING
    seed = Fingerprint(FINGERPRINT.fields, {"hash_algorithm": "sha256", "hash_seed": "b2"})
    with pytest.raises(ConfigError, match="hash_seed"):
        Directory(tmp_path, seed, 0, SPEC)


def assert_damaged(root: Path, what: str, key: bytes = KEY) -> None:
    """It is a miss, is counted, is removed, and can be written anew."""
    directory = open_directory(root)
    result, _ = read(directory, key)
    assert result.outcome is ReadOutcome.DAMAGED, what
    assert result.reason in ("size", "content")
    assert directory.stats.damaged == 1, what
    assert not path_of(root, key).exists(), what
    assert write(directory, key).outcome is WriteOutcome.WRITTEN
    assert read(directory, key) == (ReadResult(ReadOutcome.LOADED, NUM_BYTES), content_of(key))


def test_every_truncation_is_a_miss(tmp_path: Path) -> None:
    write(open_directory(tmp_path))
    path = path_of(tmp_path, KEY)
    size = path.stat().st_size
    lengths = {0, 1, 7, 8, 9, 64, size - NUM_BYTES - 1, size - NUM_BYTES, size - 1, size + 1}
    for length in sorted(lengths | set(random.Random(1).sample(range(size), 60))):
        os.truncate(path, length)
        assert_damaged(tmp_path, f"{length} of {size} bytes")


def test_every_flipped_bit_is_a_miss(tmp_path: Path) -> None:
    write(open_directory(tmp_path))
    path = path_of(tmp_path, KEY)
    good = path.read_bytes()
    head = len(good) - NUM_BYTES
    picked = random.Random(2)
    for at in [*range(0, head, 5), *picked.sample(range(head, len(good)), 60), len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= 1 << picked.randrange(8)
        path.write_bytes(bad)
        assert_damaged(tmp_path, f"byte {at}")


def test_zeros_where_the_bytes_should_be_are_a_miss(tmp_path: Path) -> None:
    """What a file system may leave after a loss of power."""
    write(open_directory(tmp_path))
    path = path_of(tmp_path, KEY)
    path.write_bytes(bytes(path.stat().st_size))
    assert_damaged(tmp_path, "zeros")


def test_another_chunk_under_this_name_is_a_miss(tmp_path: Path) -> None:
    """Whole and with the right checksum, but of another key, rank, format or hash seed."""
    path = path_of(tmp_path, KEY)
    write(open_directory(tmp_path))
    write(open_directory(tmp_path), key_of(2))
    write(open_directory(tmp_path, rank=1))
    imposters = [path_of(tmp_path, key_of(2)), path_of(tmp_path, KEY, 1)]
    seed = Fingerprint(FINGERPRINT.fields, {"hash_algorithm": "sha256", "hash_seed": "b2"})
    for root, fingerprint, spec in (
        (tmp_path / "seed", seed, SPEC),
        (tmp_path / "shape", FINGERPRINT, [TensorSpec("kv", "BF16", (2, *SHAPE))]),
    ):
        elsewhere = Directory(root, fingerprint, 0, spec)
        write(elsewhere)
        imposters += root.rglob("*.safetensors")
    assert len(imposters) == 4
    for imposter in imposters:
        path.write_bytes(imposter.read_bytes())
        assert_damaged(tmp_path, str(imposter))


def test_a_name_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    write(open_directory(tmp_path))
    path = path_of(tmp_path, KEY)
    path.rename(tmp_path / "secret")
    path.symlink_to(tmp_path / "secret")
    assert read(open_directory(tmp_path))[0].outcome is ReadOutcome.FAILED
    assert (tmp_path / "secret").exists()


def test_what_is_there_is_not_written_again_unless_its_size_is_wrong(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    write(directory)
    path = path_of(tmp_path, KEY)
    before = path.stat()
    assert write(directory).outcome is WriteOutcome.EXISTED
    assert os.path.samestat(path.stat(), before)
    os.truncate(path, 100)
    assert write(directory).outcome is WriteOutcome.WRITTEN
    assert read(directory)[0].ok


def test_a_reader_keeps_what_it_has_opened(tmp_path: Path) -> None:
    """A damaged file that another engine replaced meanwhile is not the one that is removed."""
    directory = open_directory(tmp_path)
    write(directory)
    path = path_of(tmp_path, KEY)
    opened = os.open(path, os.O_RDONLY)
    path.unlink()
    write(directory)
    directory._remove(str(path), opened)
    assert path.exists()
    os.close(opened)


def test_use_is_noted_but_not_every_time(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    write(directory)
    path = path_of(tmp_path, KEY)
    recent = time.time() - 30
    for use in (
        lambda: read(directory),
        lambda: write(directory),
        lambda: directory.touch([KEY, key_of(3)]),
    ):
        os.utime(path, (recent, recent))
        use()
        assert path.stat().st_mtime == pytest.approx(recent)
        os.utime(path, (recent - 3600, recent - 3600))
        use()
        assert time.time() - path.stat().st_mtime < 20


def test_callers_mistakes_are_errors(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for key, buffers in ((KEY, [memoryview(b"short")]), (b"", cut(content_of(KEY)))):
        with pytest.raises(ValueError, match="bytes"):
            directory.write(key, buffers)
        with pytest.raises(ValueError, match="bytes"):
            directory.read(key, buffers)
    with pytest.raises(ValueError, match="at least one"):
        FileFormat("", 0, [])
    with pytest.raises(ValueError, match="one name"):
        FileFormat("", 0, [*SPEC, SPEC[0]])


@pytest.mark.parametrize("length", [1, 16, 31, 32, 36, 64])
def test_keys_of_any_length(tmp_path: Path, length: int) -> None:
    directory, key = open_directory(tmp_path), b"\x9a" * length
    result = write(directory, key)
    assert result.num_bytes == path_of(tmp_path, key).stat().st_size
    assert read(directory, key) == (ReadResult(ReadOutcome.LOADED, NUM_BYTES), content_of(key))
    assert safetensors.deserialize(path_of(tmp_path, key).read_bytes())


def test_a_name_full_of_quotes(tmp_path: Path) -> None:
    name = '"KEY" \\"CHECKSUM" {}ü\n'
    directory = Directory(tmp_path, FINGERPRINT, 0, [TensorSpec(name, "U8", (NUM_BYTES,))])
    write(directory)
    assert read(directory)[0].ok
    ((found, _),) = safetensors.deserialize(path_of(tmp_path, KEY).read_bytes())
    assert found == name


# ---- failures of the disk ------------------------------------------------------------------


def test_a_file_that_may_not_grow_so_large(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        result = write(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result == WriteResult(WriteOutcome.FAILED, reason="too_big")
    assert files(tmp_path) == ["fingerprint.json"], "it left something behind"
    assert directory.stats == FileStats(writes_failed=1)
    assert write(directory).ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    directory = open_directory(small_disk)
    keys = [key_of(number) for number in range(40)]
    results = [write(directory, key) for key in keys]
    failed = [result for result in results if not result.ok]
    assert 0 < len(failed) < len(keys)
    assert {result.reason for result in failed} == {"no_space"}
    assert not list(small_disk.rglob("*.tmp")), "it left something behind"
    for key, result in zip(keys, results, strict=True):
        assert read(directory, key)[0].ok == result.ok


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    path_of(tmp_path, KEY).parent.touch()
    assert write(directory) == WriteResult(WriteOutcome.FAILED, reason="io")
    assert read(directory)[0] == ReadResult(ReadOutcome.FAILED, reason="io")
    assert directory.stats == FileStats(writes_failed=1, reads_failed=1)


DENIED = """
import os, sys
from pathlib import Path
from unit.store.chunks import content_of, cut, empty, key_of, open_directory
directory = open_directory(Path(sys.argv[1]))
os.setuid(65534)
memory, buffers = empty()
print(directory.write(key_of(2), cut(content_of(key_of(2)))).reason)
print(directory.read(key_of(1), buffers).reason)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    write(open_directory(tmp_path))
    tests = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", DENIED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"},
    )
    assert ran.stdout.split() == ["denied", "denied"]
    assert path_of(tmp_path, KEY).exists()
