"""A worker's readers are woken by one message, however many threads wake them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from disagg.engine.vllm_patches import patching, worker_shutdown

THREADS = 4


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SpinCondition]:
    monkeypatch.setattr(SpinCondition, "cancel", SpinCondition.cancel)
    patching.install([worker_shutdown.PATCH])
    patching.install([worker_shutdown.PATCH])
    context = zmq.Context()
    yield SpinCondition(True, context, f"ipc://{tmp_path}/notify")
    context.destroy(linger=0)


def test_once(reader: SpinCondition) -> None:
    together = threading.Barrier(THREADS)

    def cancel() -> None:
        together.wait(10)
        reader.cancel()

    threads = [threading.Thread(target=cancel, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert reader.read_cancel_socket.poll(5_000)
    reader.read_cancel_socket.recv()
    assert not reader.read_cancel_socket.poll(200), "a second message"


def test_each(reader: SpinCondition, tmp_path: Path) -> None:
    """To wake one reader does not wake another."""
    context = zmq.Context()
    other = SpinCondition(True, context, f"ipc://{tmp_path}/other")
    reader.cancel()
    assert not other.read_cancel_socket.poll(100)
    other.cancel()
    assert other.read_cancel_socket.poll(5_000)
    context.destroy(linger=0)
