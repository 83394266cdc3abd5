"""Readers are named where, and only where, that makes the difference; and unnamed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transport import caches, host_device
from transport.caches import PLAIN
from transport.host_device import COMPILER

from disagg.transport.base import Sender
from disagg.transport.device.staging import Staging
from disagg.transport.host import ptrace_scope
from disagg.transport.one_sided.cuda_ipc import CudaIpcSender
from disagg.transport.one_sided.process_memory import ProcessMemorySender


def sender(transport: str, *, on_device: bool) -> Sender:
    if not on_device:
        cache = caches.make(PLAIN, 1)
        return CudaIpcSender(cache, None) if transport == "cuda_ipc" else ProcessMemorySender(cache)
    cache, device = host_device.make(PLAIN, 1)
    if transport == "cuda_ipc":
        return CudaIpcSender(cache, Staging(device, cache, 4 << 20))
    return ProcessMemorySender(cache)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("transport", ["process_memory", "cuda_ipc"])
@pytest.mark.parametrize("scope", ["0", "1", "2", "nonsense", None])
def test_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    scope: str | None,
    transport: str,
    on_device: bool,
) -> None:
    if on_device and COMPILER is None:
        pytest.skip("needs g++ to run the kernel on the host")
    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(scope + "\n")
    asked: list[tuple[int, int]] = []

    def prctl(option: int, value: Any) -> int:
        asked.append((option, value.value))
        return 0

    monkeypatch.setattr(ptrace_scope, "_SCOPE", file)
    monkeypatch.setattr(ptrace_scope, "_prctl", prctl)
    one = sender(transport, on_device=on_device)
    one.close()
    one.close()
    of_use = scope == "1" and on_device == (transport == "cuda_ipc")
    everyone = (1 << 64) - 1
    assert asked == ([(0x59616D61, everyone), (0x59616D61, 0)] if of_use else [])


def test_a_kernel_without_yama_refuses_and_that_is_fine() -> None:
    if ptrace_scope._SCOPE.exists():
        pytest.skip("this kernel has Yama")
    assert ptrace_scope._permit() is False
