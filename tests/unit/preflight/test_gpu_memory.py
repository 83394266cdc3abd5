"""The memory of GPUs, where there are any."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from disagg.preflight import gpu_memory


def test_the_largest_gpu_counts() -> None:
    found = gpu_memory.gpu_bytes()
    if Path("/dev/nvidia0").exists():
        assert found is not None
        assert 1 << 30 < found < 1 << 42
    else:
        assert found is None


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_LIBRARY", "libdisagg-none.so.1")
    assert gpu_memory.gpu_bytes() is None


class FakeLibrary:
    """Two GPUs. A call returns 0 when it succeeds, and writes to what it is given by reference."""

    def __init__(self, _: str, *, fails: str = "") -> None:
        self.fails, self.ended = fails, False

    def nvmlInit_v2(self) -> int:
        return self.fails == "init"

    def nvmlShutdown(self) -> int:
        self.ended = True
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return self.fails == "count"

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 0x1000 + index.value
        return self.fails == "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = (24 << 30) if handle.value == 0x1000 else (80 << 30)
        return self.fails == "memory"


@pytest.mark.parametrize(
    ("fails", "expected"),
    [("", 80 << 30), ("init", None), ("count", None), ("handle", None), ("memory", None)],
)
def test_a_library_that_fails_says_nothing(
    monkeypatch: pytest.MonkeyPatch, fails: str, expected: int | None
) -> None:
    library = FakeLibrary("", fails=fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert gpu_memory.gpu_bytes() == expected
    assert library.ended == (fails != "init")
