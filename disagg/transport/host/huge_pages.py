"""Huge pages for host memory, so that blocks move fast.

A copy between processes looks up every page it touches, and the first write to a page is a page
fault. With 4 KiB pages there are 512 times as many as with 2 MiB pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Iterable

from disagg.transport.blocks import Bytes
from disagg.transport.host.process_vm import libc_function

_HUGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1; not in Python's mmap
_STEP = 64 << 20
_NICE = 10


def prefer_huge_pages(memories: Iterable[Bytes]) -> bool:
    """Advise the kernel to back this memory with huge pages; returns whether it accepted.

    Content and addresses stay. It takes effect only where the memory was not written to yet; for
    the rest see `collapse`.
    """
    if not sys.platform.startswith("linux"):
        return False
    madvise = libc_function("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    agreed = madvise is not None
    for memory in memories:
        begin = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        size = memory.ctypes.data + memory.nbytes - begin
        if madvise is not None and size >= _HUGE:
            agreed &= madvise(begin, size, mmap.MADV_HUGEPAGE) == 0
    return agreed


def collapse(memories: Iterable[Bytes]) -> threading.Thread:
    """`prefer_huge_pages`, and in a thread move existing small pages into huge ones.

    Content and addresses stay, and the memory may be used meanwhile. vLLM has written to all of its
    cache before a connector gets it.
    """
    kept = list(memories)
    prefer_huge_pages(kept)
    thread = threading.Thread(target=_collapse, args=(kept,), name="kv-huge-pages", daemon=True)
    thread.start()
    return thread


def _collapse(memories: list[Bytes]) -> None:
    madvise = libc_function("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise is None or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    for memory in memories:
        begin = -(-memory.ctypes.data // _HUGE) * _HUGE
        end = (memory.ctypes.data + memory.nbytes) // _HUGE * _HUGE
        for at in range(begin, end, _STEP):
            failed = madvise(at, min(_STEP, end - at), _COLLAPSE)
            if failed and ctypes.get_errno() == errno.EINVAL:
                return  # the kernel is older, or has huge pages disabled
