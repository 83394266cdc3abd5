"""The memory of this machine's GPUs, from NVIDIA's management library, which the driver brings.

It starts no CUDA context, so it takes milliseconds and no memory of a GPU.
"""

from __future__ import annotations

import ctypes

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpu_bytes() -> int | None:
    """The total memory of the largest GPU; None if there is none, or its driver does not say."""
    return max(gpus(), default=0) or None


def gpus() -> list[int]:
    """The total memory of each GPU; 0 where its driver does not say."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    if library.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        return [_total(library, index) for index in range(count.value)]
    finally:
        library.nvmlShutdown()


def _total(library: ctypes.CDLL, index: int) -> int:
    handle, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
        return 0
    failed = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return 0 if failed else int(memory.total)
