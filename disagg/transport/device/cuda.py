"""The device through CUDA, by cupy: memory outside of pools, our own streams, our one kernel.

cupy's errors become `TransferError`, so that a broken GPU ends a fetch and not the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache as once
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import TransferError
from disagg.transport.blocks import BlockCache, Bytes
from disagg.transport.deadline import Event
from disagg.transport.device.base import (
    Communicators,
    DeviceMemory,
    DeviceStream,
    Exported,
    Pinned,
)
from disagg.transport.device.copy_plan import WORDS, Chunk, Move

_KERNEL = Path(__file__).with_name("move.cu")
_THREADS = 512
# The part of a row that one thread block copies: four words per thread.
_PART_BYTES = _THREADS * 16 * 4
# Enough for 15,000 blocks and 100 layers; larger fetches are rare.
_TABLE_BYTES = 256 << 10
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1
_ANY_DIRECTION = 4
_SUCCESS, _NOT_READY = 0, 600


@contextlib.contextmanager
def _checked(what: str) -> Iterator[None]:
    """Raise CUDA's errors as `TransferError`."""
    compiling = _cupy().cuda.compiler.CompileException
    try:
        yield
    except (RuntimeError, MemoryError, OSError, compiling) as error:  # cupy's are RuntimeErrors
        raise TransferError(f"{what}: {error}", reason="device") from error


class CudaDevice:
    """GPU `index` of those visible to this process."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.use()
        with _checked(f"GPU {index}"):
            properties = _cupy().cuda.runtime.getDeviceProperties(index)
        self.processors = int(properties["multiProcessorCount"])

    @classmethod
    def of(cls, cache: BlockCache) -> CudaDevice:
        """The GPU that holds this cache."""
        try:
            _cupy()
        except ImportError as error:
            raise TransferError(f"needs cupy: {error}", reason="device") from error
        return cls(cache.regions[0].memory.device.index or 0)

    def use(self) -> None:
        with _checked(f"GPU {self._index}"):
            _cupy().cuda.Device(self._index).use()

    def memory(self, size: int) -> DeviceMemory:
        with _checked(f"{size} bytes of device memory"):
            address = _cupy().cuda.runtime.malloc(size)
        return _Memory(address, size, _cupy().cuda.runtime.free)

    def pinned(self, size: int) -> Pinned:
        with _checked(f"{size} bytes of pinned memory"):
            address = _cupy().cuda.runtime.hostAlloc(size, _PORTABLE)
        return _Pinned(address, size)

    def stream(self, launches: bool = True) -> DeviceStream:
        with _checked("a stream"):
            return _Stream(self.processors, _TABLE_BYTES if launches else 0)

    def export(self, address: int) -> Exported:
        with _checked("this allocation cannot be shared (expandable segments, a pool?)"):
            handle = _cupy().cuda.runtime.ipcGetMemHandle(address)
        base, size = _allocation(address)
        return Exported(bytes(handle), address - base, size)

    def open(self, handle: bytes) -> DeviceMemory:
        runtime = _cupy().cuda.runtime
        with _checked("opening another process's memory"):
            address = runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
        return _Memory(address, 0, runtime.ipcCloseMemHandle)

    def communicators(self) -> Communicators:
        from disagg.transport.device.nccl_library import NcclCommunicators

        return NcclCommunicators(self)

    def model_fence(self) -> Event:
        import torch

        with _checked("an event on the model's stream"):
            event = _cupy().cuda.Event(disable_timing=True)
            model = torch.cuda.current_stream(self._index).cuda_stream
            _cupy().cuda.runtime.eventRecord(event.ptr, model)
        return _Event(event)


class _Memory:
    def __init__(self, address: int, size: int, free: Any) -> None:
        self.address, self.size, self._free = address, size, free

    def free(self) -> None:
        with _checked("giving device memory back"):
            self._free(self.address)


class _Pinned:
    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def free(self) -> None:
        with _checked("giving pinned memory back"):
            _cupy().cuda.runtime.freeHost(self.address)


class _Event:
    def __init__(self, event: Any) -> None:
        self.inner = event

    def is_done(self) -> bool:
        # cupy's own `Event.done` takes an error for work that goes on.
        runtime = _cupy().cuda.runtime
        status: int = runtime.eventQuery(self.inner.ptr)
        if status in (_SUCCESS, _NOT_READY):
            return status == _SUCCESS
        with _checked("work on the device"):
            raise runtime.CUDARuntimeError(status)


class _Stream:
    """Its tables lie in device memory, written by way of pinned memory of the same size."""

    def __init__(self, processors: int, table_bytes: int) -> None:
        cupy = _cupy()
        self._cupy, self._processors = cupy, processors
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._rooms: list[tuple[_Memory, _Pinned]] = []
        self._uploaded: Any = None
        self._move: Move | None = None
        self._at: list[int] = []
        if table_bytes:
            kernels()
            self._room(table_bytes)

    @property
    def handle(self) -> int:
        return int(self._stream.ptr)

    def load(self, move: Move) -> None:
        tables = [move.table, move.from_units, move.to_units]
        sizes = [0 if one is None else -(-one.nbytes // 16) * 16 for one in tables]
        with _checked("tables of a move"):
            if self._uploaded is not None:
                self._uploaded.synchronize()  # passed long ago: it is behind one small copy
            memory, upload = self._room(sum(sizes))
            at, addresses = 0, list[int]()
            for one, size in zip(tables, sizes, strict=True):
                addresses.append(0 if one is None else memory.address + at)
                if one is not None:
                    upload.array[at : at + one.nbytes] = one.reshape(-1).view(np.uint8)
                at += size
            self._copy(memory.address, upload.address, at)
            self._uploaded = self._cupy.cuda.Event(disable_timing=True)
            self._uploaded.record(self._stream)
        self._move, self._at = move, addresses

    def launch(self, chunk: Chunk, from_shift: int = 0, to_shift: int = 0) -> None:
        move = self._move
        assert move is not None, "launch before load"
        if not chunk.rows:
            return
        parts = max(1, int(move.row_bytes.max()) // _PART_BYTES)
        # One block on each processor leaves the model most of it.
        grid = min(chunk.rows * parts, self._processors)
        table, from_units, to_units = (np.uintp(address) for address in self._at)
        arguments = (
            table,
            from_units,
            to_units,
            np.int32(move.units),
            np.int64(chunk.first),
            np.int64(chunk.rows),
            np.int32(parts),
            np.int64(from_shift),
            np.int64(to_shift),
        )
        with _checked("moving blocks"), self._stream:
            kernels()[move.word]((grid,), (_THREADS,), arguments)

    def copy(self, to: int, source: int, size: int) -> None:
        with _checked("copying bytes"):
            self._copy(to, source, size)

    def record(self) -> Event:
        with _checked("an event"):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream)
        return _Event(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Event)
        with _checked("waiting on the device"):
            self._stream.wait_event(event.inner)

    def close(self) -> None:
        rooms, self._rooms, self._move = self._rooms, [], None
        for memory, upload in rooms:
            memory.free()
            upload.free()

    def _copy(self, to: int, source: int, size: int) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(to, source, size, _ANY_DIRECTION, self.handle)

    def _room(self, size: int) -> tuple[_Memory, _Pinned]:
        """Room for tables of this size. What was too small is kept: to free it, CUDA would wait
        for all that runs on the device."""
        if not self._rooms or self._rooms[-1][0].size < size:
            runtime, room = self._cupy.cuda.runtime, max(_TABLE_BYTES, 2 * size)
            memory = _Memory(runtime.malloc(room), room, runtime.free)
            self._rooms.append((memory, _Pinned(runtime.hostAlloc(room, _PORTABLE), room)))
        return self._rooms[-1]


def _cupy() -> Any:
    import cupy
    import cupy.cuda.compiler

    return cupy


@once
def kernels() -> dict[int, Any]:
    """The kernel for each width of word, compiled and loaded for the GPU at hand.

    CUDA loads a function when it is first launched and may wait for all that runs on the device
    then: amid fetches that can be NCCL, which waits for a peer that waits likewise.
    """
    cupy = _cupy()
    module = cupy.RawModule(code=_KERNEL.read_text())
    with _checked("the kernel"):
        found = {word: module.get_function(f"move_rows_{word}") for word in WORDS}
        null, none = np.uintp(0), np.int64(0)
        no_rows = (null, null, null, np.int32(1), none, none, np.int32(1), none, none)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for kernel in found.values():
                kernel((1,), (32,), no_rows)
        stream.synchronize()
    return found


def _allocation(address: int) -> tuple[int, int]:
    """First address and size of the allocation around it."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    call = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    status = call(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if status != 0:
        raise TransferError(f"cuMemGetAddressRange: error {status}", reason="device")
    return base.value, size.value
