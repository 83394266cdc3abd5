"""Processes that store and load chunks as fast as they can. Run as a program, see `main`."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from unit.store.chunks import content_of, cut, empty, key_of, open_directory

from disagg.store.base import ReadOutcome
from disagg.store.directory import Directory
from disagg.store.directory_space import DirectorySpace

KEYS = 24


def work(directory: Directory, order: random.Random) -> str:
    """Store one chunk, load another; what is wrong with it, if anything."""
    stored, loaded = key_of(order.randrange(KEYS)), key_of(order.randrange(KEYS))
    result = directory.write(stored, cut(content_of(stored)))
    if not result.ok and result.reason != "full":
        return f"write {result}"
    memory, buffers = empty()
    outcome = directory.read(loaded, buffers).outcome
    if outcome is ReadOutcome.LOADED and memory != content_of(loaded):
        return "wrong bytes"
    if outcome in (ReadOutcome.DAMAGED, ReadOutcome.FAILED):
        return f"read {outcome}"
    return ""


def main(root: str, seed: str, cap_bytes: str, seconds: str) -> None:
    """Says `ready`, works, and says what was wrong, or what it did."""
    space = DirectorySpace(Path(root), int(cap_bytes))
    directory = open_directory(Path(root), space=space)
    order, end = random.Random(seed), time.monotonic() + float(seconds)
    print("ready", flush=True)
    while time.monotonic() < end:
        if problem := work(directory, order):
            sys.exit(problem)
    space.close()
    print(directory.stats.written, directory.stats.loaded, space.chunks_evicted, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
