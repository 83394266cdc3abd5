"""A worker's half of the host memory tier: one mapping, divided into slots of equal size.

Any thread may read and write slots; `host_index` in the scheduler decides which slot holds which
chunk, and when it may change. The memory is private to this process. It requests huge pages, and a
thread touches all pages from the start on, so that stores do not wait for the kernel to allocate
and clear memory; slots can be used before that is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

Pin = Callable[[int, int], Callable[[], None]]
"""Registers memory with a device, for fast copies: (address, bytes) -> its undo function."""

_STEP = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap


class HostPool:
    """`slots` of `slot_bytes` each. Raises `OSError` (ENOMEM) if the system refuses so much.

    pin: called once with the whole mapping; it touches every page itself. `close` calls the
    function that it returned.
    """

    def __init__(self, slots: int, slot_bytes: int, pin: Pin | None = None) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes are no pool")
        self.slots, self.slot_bytes = slots, slot_bytes
        self._memory = mmap.mmap(-1, slots * slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        """The address of slot 0; slot i is at `address + i * slot_bytes`, until `close`."""
        self.huge_pages = self._advise_huge_pages()
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None
        self._unpin = pin(self.address, self.nbytes) if pin else None
        if pin is None:
            self._toucher = threading.Thread(target=self._touch, name="kv-host-pool", daemon=True)
            self._toucher.start()

    @property
    def nbytes(self) -> int:
        """Size of the mapping."""
        return self.slots * self.slot_bytes

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot, to read and write. Must not be used after `close`."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def wait_until_touched(self, timeout_s: float | None = None) -> bool:
        """Wait until all pages are touched; returns whether they are. For measurements."""
        if self._toucher is not None:
            self._toucher.join(timeout_s)
            return not self._toucher.is_alive()
        return True

    def close(self) -> None:
        """Free the memory. It stays while a caller holds a view of a slot; the pool does not use it
        after this."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join()
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._view.release()
        with contextlib.suppress(BufferError):
            self._memory.close()

    def _advise_huge_pages(self) -> bool:
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            return False  # not Linux, or a kernel without huge pages
        return True

    def _touch(self) -> None:
        # Not mmap.madvise, which holds the GIL while the kernel clears pages.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for at in range(0, self.nbytes, _STEP):
            size = min(_STEP, self.nbytes - at)
            if self._stop.is_set() or madvise(self.address + at, size, _MADV_POPULATE_WRITE):
                return  # the kernel is older: pages are allocated at the first write
