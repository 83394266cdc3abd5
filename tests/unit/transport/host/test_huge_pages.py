"""Advice about pages changes neither content nor addresses, and the kernel follows it."""

from __future__ import annotations

import mmap
import platform
import re
from pathlib import Path

import numpy as np
import pytest

from disagg.bench.transfer.memory import BenchMemory
from disagg.transport.host.huge_pages import collapse, prefer_huge_pages

MIB = 1 << 20
LINUX = tuple(int(part) for part in platform.release().split(".")[:2])
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kib(address: int) -> int:
    """KiB in huge pages of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return 0


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no huge pages here"
)
def test_fresh_memory_gets_huge_pages() -> None:
    # Not from the heap, where it may have been used before.
    mapping = mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    assert prefer_huge_pages([memory])
    memory[:] = 7
    assert huge_kib(memory.ctypes.data + memory.nbytes // 2) > 0


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no huge pages here"
)
def test_the_caches_of_benchmarks_have_them_too() -> None:
    memory = BenchMemory(64 * MIB, "cpu").flat
    assert huge_kib(memory.data_ptr() + memory.numel() // 2) > 32 * 1024


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no huge pages here"
)
@pytest.mark.skipif(LINUX < (6, 1), reason="this kernel cannot")
def test_memory_that_was_written_to_is_moved() -> None:
    mapping = mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    memory[:] = np.arange(memory.nbytes, dtype=np.uint32).astype(np.uint8)
    before = memory.copy()
    collapse([memory, memory[5:100], memory[:0]]).join(20)
    assert huge_kib(memory.ctypes.data + memory.nbytes // 2) > 0
    assert np.array_equal(memory, before)


def test_content_stays_and_small_pieces_are_let_be() -> None:
    memory = np.arange(4 * MIB, dtype=np.uint32).view(np.uint8)
    before = memory.copy()
    prefer_huge_pages([memory, memory[5:100], memory[:0]])
    assert np.array_equal(memory, before)
