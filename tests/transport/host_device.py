"""Host memory in the place of a GPU, where there is none.

Everything is real but the device: streams are threads that work through what they are given, in
order and later; the kernel is the project's own, compiled for the host. Memory is shared by file
descriptor where CUDA shares it by handle. What only CUDA can show (that its calls are the right
ones, and speed) is left to the same tests on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transport import caches

from disagg.errors import TransferError
from disagg.transport.blocks import BlockCache, Bytes, Region
from disagg.transport.deadline import Event
from disagg.transport.device import base
from disagg.transport.device.copy_plan import Chunk, Move

_SOURCE = Path(__file__).with_name("host_kernel.cpp")
KERNEL = Path(base.__file__).with_name("move.cu")
# Few threads: each of them costs a loop here.
GRID, THREADS = 3, 8

COMPILER = shutil.which("g++")


@functools.cache
def library() -> Any:
    """The kernel as a shared library, built once for all processes."""
    assert COMPILER is not None
    sources = [_SOURCE, KERNEL, Path(__file__)]
    digest = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"disagg-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"move-{digest}.so"
    if not built.exists():
        fresh = folder / f"{built.name}.{os.getpid()}"
        flags = [
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Werror",
            "-Wno-unknown-pragmas",
            # A GPU refuses a word that is not aligned to its size: so does this, by SIGILL.
            "-fsanitize=alignment",
            "-fsanitize-undefined-trap-on-error",
            "-shared",
            "-fPIC",
        ]
        command = [COMPILER, *flags, f'-DMOVE="{KERNEL}"', "-o", str(fresh), str(_SOURCE)]
        subprocess.run(command, check=True, timeout=120)
        fresh.rename(built)
    found = ctypes.CDLL(str(built))
    found.launch.argtypes = [
        *[ctypes.c_int, ctypes.c_uint, ctypes.c_uint],
        *[ctypes.c_void_p] * 3,
        *[ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int],
        *[ctypes.c_longlong] * 2,
    ]
    return found


def run_kernel(move: Move, chunk: Chunk, from_shift: int, to_shift: int, parts: int = 2) -> None:
    """One launch, at once."""
    if not chunk.rows:
        return
    tables = [move.table, move.from_units, move.to_units]
    at = [None if one is None else one.ctypes.data for one in tables]
    counts = (move.units, chunk.first, chunk.rows, parts)
    library().launch(move.word, GRID, THREADS, *at, *counts, from_shift, to_shift)


class OnDevice(BlockCache):
    """A cache that no transport may touch but through its device."""

    def __init__(self, regions: list[Region]) -> None:
        super().__init__(regions)
        self._host = [None] * len(regions)


class Shared:
    """Memory that another process can open by a name."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("disagg-test")
        os.ftruncate(self._file, max(1, size))
        self._map = mmap.mmap(self._file, max(1, size))
        self.array: Bytes = np.frombuffer(self._map, np.uint8)
        self.handle = f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def close(self) -> None:
        """No other process opens it from here on; whoever has it keeps it."""
        os.close(self._file)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


class HostDevice:
    """`allocations`: what `export` can name."""

    def __init__(self, allocations: list[Shared] | None = None) -> None:
        self.allocations = list(allocations or [])
        self.memory_in_use = 0
        self.opened = 0

    def use(self) -> None:
        pass

    def memory(self, size: int) -> _Memory:
        shared = Shared(size)
        self.allocations.append(shared)
        self.memory_in_use += size

        def free() -> None:
            self.memory_in_use -= size
            self.allocations.remove(shared)
            shared.close()

        return _Memory(shared.array, free)

    def pinned(self, size: int) -> _Memory:
        return _Memory(np.empty(size, np.uint8), lambda: None)

    def stream(self, launches: bool = True) -> HostStream:
        return HostStream()

    def export(self, address: int) -> base.Exported:
        for one in self.allocations:
            if one.address <= address < one.address + len(one.array):
                return base.Exported(one.handle, address - one.address, len(one.array))
        raise TransferError("this allocation cannot be shared", reason="device")

    def open(self, handle: bytes) -> _Memory:
        try:
            with open(handle, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise TransferError(f"cannot open: {error}", reason="device") from error
        self.opened += 1

        def close() -> None:
            self.opened -= 1

        return _Memory(np.frombuffer(mapped, np.uint8), close)

    def communicators(self) -> base.Communicators:
        from transport.host_communicator import HostCommunicators

        return HostCommunicators()

    def model_fence(self) -> _Event:
        done = _Event()
        done.happened.set()
        return done


class _Memory:
    def __init__(self, array: Bytes, free: Callable[[], None]) -> None:
        self.array, self.size, self._free = array, len(array), free

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def free(self) -> None:
        self._free()


class _Event:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.error: Exception | None = None

    def is_done(self) -> bool:
        if not self.happened.is_set():
            return False
        if self.error is not None:
            raise TransferError(f"work on the device: {self.error}", reason="device")
        return True


class HostStream:
    """Work is done by one thread, in order. After an error nothing is done any more."""

    handle = 0

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._move: Move | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def load(self, move: Move) -> None:
        self._move = move

    def launch(self, chunk: Chunk, from_shift: int = 0, to_shift: int = 0) -> None:
        move = self._move
        assert move is not None
        self.add(lambda: run_kernel(move, chunk, from_shift, to_shift))

    def copy(self, to: int, source: int, size: int) -> None:
        self.add(lambda: ctypes.memmove(to, source, size))

    def record(self) -> _Event:
        event = _Event()

        def happen() -> None:
            event.error = self._error
            event.happened.set()

        self._work.put(happen)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Event)
        inner = event
        self.add(lambda: inner.happened.wait())

    def add(self, work: Callable[[], object]) -> None:
        """Anything else that is to be done in order."""

        def guarded() -> None:
            if self._error is None:
                try:
                    work()
                except Exception as error:  # noqa: BLE001 - told by the next event
                    self._error = error

        self._work.put(guarded)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def make(shape: caches.Shape, seed: int | None) -> tuple[OnDevice, HostDevice]:
    """`caches.make`, in memory that only its device may be asked for."""
    size = caches.num_bytes(shape)
    shared = Shared(size)
    shared.array[:size] = caches.content(size, seed)
    cache = OnDevice(caches.regions(shape, torch.from_numpy(shared.array)[:size]))
    return cache, HostDevice([shared])
