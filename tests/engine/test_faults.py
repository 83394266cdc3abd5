"""Storage and peers fail at real boundaries: the answer stays right, the failure is counted."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.testing.vllm_server import token_ids
from disagg.testing.waiting import eventually
from engine.conftest import Fleet

ENGINES = ("producer", "files", "single")
Prompt = Callable[[int], list[int]]


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def other_blocks(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(40)
        file.write(b"9")


class Saboteur(threading.Thread):
    """Holds the consumer's worker while a handoff file is written, and damages the file.

    It sleeps in inotify: on a busy machine whoever slept is woken before whoever polled.
    """

    def __init__(self, folder: Path, consumer_pid: int, damage: Callable[[Path], None]) -> None:
        super().__init__(daemon=True)
        self._folder, self._pid, self._damage = folder, consumer_pid, damage
        self.done = threading.Event()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_CLOEXEC)
        created = 0x100
        assert self._libc.inotify_add_watch(self._inotify, os.fsencode(folder), created) > 0

    def run(self) -> None:
        deadline = time.monotonic() + 20
        try:
            while (left := deadline - time.monotonic()) > 0 and not self.done.is_set():
                if not select.select([self._inotify], [], [], min(left, 0.5))[0]:
                    continue
                os.kill(self._pid, signal.SIGSTOP)
                os.read(self._inotify, 65536)
                if self._sabotage():
                    return
        finally:
            os.close(self._inotify)

    def _sabotage(self) -> bool:
        """Damage the file that is being written; whether there was one."""
        try:
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                for path in self._folder.glob("*.safetensors"):
                    self._damage(path)
                    self.done.set()
                    return True
                if not list(self._folder.glob("*.tmp")) and not list(
                    self._folder.glob("*.safetensors")
                ):
                    return False
            return False
        finally:
            os.kill(self._pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "storage_checksum"),
        (truncate, "storage_size"),
        (other_blocks, "storage_header"),
        (lambda path: path.unlink(), "storage_read"),
    ],
    ids=["flipped", "truncated", "other-blocks", "removed"],
)
def test_damaged_file(
    fleet: Fleet, prompt: Prompt, damage: Callable[[Path], None], reason: str
) -> None:
    worker = fleet.files.worker().pid
    for _ in range(8):  # the saboteur may come too late, then nothing was damaged
        ids = prompt(6000)
        before = fleet.files.metric("disagg_kv_load_failures_total", reason=reason)
        params = fleet.producer.prefill(ids)
        saboteur = Saboteur(fleet.storage, worker, damage)
        saboteur.start()
        answer = fleet.files.complete(ids, kv_transfer_params=params)
        assert token_ids(answer) == token_ids(fleet.single.complete(ids))
        if saboteur.done.is_set():
            after = fleet.files.metric("disagg_kv_load_failures_total", reason=reason)
            if after == before + 1:
                break
        saboteur.done.set()
        saboteur.join()
    else:
        pytest.fail("no file was damaged in time in eight attempts")
    assert eventually(lambda: fleet.producer.metric("disagg_leases_held") == 0)
    assert not list(fleet.storage.glob("*.safetensors*"))


def test_storage_folder_removed(fleet: Fleet, prompt: Prompt) -> None:
    ids = prompt(900)
    fleet.files.complete(ids, kv_transfer_params=fleet.producer.prefill(ids))  # they have met
    ids = prompt(900)
    params = fleet.producer.prefill(ids)
    before = fleet.files.metric("disagg_kv_load_failures_total", reason="storage_write")
    away = fleet.storage.with_name("away")
    shutil.move(fleet.storage, away)
    try:
        answer = fleet.files.complete(ids, kv_transfer_params=params)
    finally:
        shutil.move(away, fleet.storage)
    assert token_ids(answer) == token_ids(fleet.single.complete(ids))
    after = fleet.files.metric("disagg_kv_load_failures_total", reason="storage_write")
    assert after == before + 1
    ids = prompt(900)
    healed = fleet.files.complete(ids, kv_transfer_params=fleet.producer.prefill(ids))
    assert token_ids(healed) == token_ids(fleet.single.complete(ids))
