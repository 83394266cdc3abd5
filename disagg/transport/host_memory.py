"""What host memory needs so that blocks move fast: huge pages, where the system leaves it to us.

A copy between processes looks up every page it touches, and the first write to one is a fault:
of 4 KiB pages there are 512 times as many.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

from disagg.transport.blocks import Bytes
from disagg.transport.process_vm import libc_function

_HUGE = 2 << 20


def prefer_huge_pages(memories: Iterable[Bytes]) -> bool:
    """Advise the kernel to back these with huge pages; whether it agreed.

    Content and addresses stay. Helps most before the memory is written to for the first time.
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
