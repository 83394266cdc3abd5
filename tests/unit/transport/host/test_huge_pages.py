"""Advice about pages changes neither content nor addresses, and the kernel follows it."""

from __future__ import annotations

import mmap
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.bench.transfer.memory import BenchMemory
from disagg.transport.host.huge_pages import collapse, prefer_huge_pages

MIB = 1 << 20
LINUX = tuple(int(part) for part in platform.release().split(".")[:2])
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_of(memory: np.ndarray[Any, Any]) -> dict[str, str]:
    """What the kernel says of the mapping that holds the middle of this memory."""
    address, found, inside = memory.ctypes.data + memory.nbytes // 2, {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value
    return found


def is_advised(memory: np.ndarray[Any, Any]) -> bool:
    """Whether the kernel gives it huge pages while it has some. How many those are is the
    machine's affair."""
    return "hg" in mapping_of(memory)["VmFlags"].split()


def has_huge_pages(memory: np.ndarray[Any, Any]) -> bool:
    return int(mapping_of(memory)["AnonHugePages"].split()[0]) > 0


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no huge pages here"
)
def test_fresh_memory_gets_huge_pages() -> None:
    # Not from the heap, where it may have been used before.
    mapping = mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    assert prefer_huge_pages([memory])
    memory[:] = 7
    assert is_advised(memory)


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no huge pages here"
)
def test_the_caches_of_benchmarks_have_them_too() -> None:
    assert is_advised(BenchMemory(64 * MIB, "cpu").flat.numpy())


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
    assert has_huge_pages(memory)
    assert np.array_equal(memory, before)


def test_content_stays_and_small_pieces_are_let_be() -> None:
    memory = np.arange(4 * MIB, dtype=np.uint32).view(np.uint8)
    before = memory.copy()
    prefer_huge_pages([memory, memory[5:100], memory[:0]])
    assert np.array_equal(memory, before)
