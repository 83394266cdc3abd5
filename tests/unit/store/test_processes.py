"""Real processes on one directory: several at once, and killed at any instruction."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from unit.store import engines
from unit.store.chunks import FINGERPRINT, content_of, cut, key_of, path_of

from disagg.store.base import ReadOutcome, WriteOutcome
from disagg.store.directory import Directory
from disagg.store.directory_files import TEMPORARY, TensorSpec
from disagg.store.directory_space import DirectorySpace

FILE = 1984
KILLS = 50


def start(root: Path, seed: int, cap_bytes: int, seconds: float) -> subprocess.Popen[str]:
    tests = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "unit.store.engines", str(root), str(seed), str(cap_bytes),
         str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"},
    )  # fmt: skip


def test_engines_store_and_evict_the_same_chunks_at_once(tmp_path: Path) -> None:
    """The directory holds half of what they want, so they evict all the time."""
    cap = engines.KEYS // 2 * FILE
    processes = [start(tmp_path, seed, cap, 1.5) for seed in range(3)]
    did = []
    for process in processes:
        out, problem = process.communicate(timeout=60)
        assert (process.returncode, problem) == (0, "")
        did.append([int(number) for number in out.split()[1:]])
    assert all(written and loaded for written, loaded, _ in did)
    assert sum(evicted for _, _, evicted in did) > 10
    space = DirectorySpace(tmp_path, cap)
    space.make_room()
    space.close()
    assert space.used == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) <= cap
    assert not list(tmp_path.rglob(f"*{TEMPORARY}"))


def write_for_ever(
    root: Path, directory: Directory, contents: dict[bytes, bytes], began: int
) -> None:
    """Each chunk again and again; what was there is removed first."""
    os.write(began, b"!")
    while True:
        for key, content in contents.items():
            path_of(root, key).unlink(missing_ok=True)
            directory.write(key, cut(content, 16))


def test_a_writer_killed_at_any_instruction_leaves_no_wrong_chunk(tmp_path: Path) -> None:
    """50 writers of half a megabyte a file, killed after a time of their own each: a file with
    its name is whole, and what is not has a name that nobody reads and that is swept."""
    size = 512 << 10
    spec = [TensorSpec("kv", "U8", (size,))]
    keys = [key_of(number) for number in range(4)]
    contents = {key: content_of(key, size=size) for key in keys}
    order = random.Random(4)
    halves = whole = 0
    for _ in range(KILLS):
        directory = Directory(tmp_path, FINGERPRINT, 0, spec)
        wait, began = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                write_for_ever(tmp_path, directory, contents, began)
            finally:
                os._exit(1)
        os.read(wait, 1)
        time.sleep(order.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        os.close(wait)
        os.close(began)
        for key in keys:
            memory = bytearray(size)
            result = directory.read(key, [memoryview(memory)])
            assert result.outcome in (ReadOutcome.LOADED, ReadOutcome.MISSING)
            if result.ok:
                whole += 1
                assert memory == contents[key]
        halves += len(list(tmp_path.rglob(f"*{TEMPORARY}")))
        space = DirectorySpace(tmp_path, 1 << 40)
        space.make_room()
        space.close()
        assert not list(tmp_path.rglob(f"*{TEMPORARY}")), "not swept"
    print(f"{halves} of {KILLS} left half a file, {whole} whole ones were read")
    assert halves >= KILLS // 5, "it was hardly ever killed while it wrote"
    assert whole
    for key in keys:
        assert directory.write(key, cut(contents[key])).outcome in WriteOutcome
        assert directory.read(key, [memoryview(bytearray(size))]).ok
