"""A worker's half of the host memory tier: one mapping, cut into slots of one size.

Any thread may read and write slots; which slot holds what, and when it may change, is decided by
`host_index` in the scheduler. The memory belongs to this process alone. Huge pages are asked for,
and a thread touches all pages from the beginning on, so that stores do not wait for the kernel to
find and clear memory; slots can be used before it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

Pin = Callable[[int, int], Callable[[], None]]
"""(address, bytes) -> what undoes it. Registers memory with a device, so that copies run fast."""

_STEP = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap


class HostPool:
    """`slots` of `slot_bytes` each. Raises `OSError` (ENOMEM) if the system refuses so much.

    With `pin` the caller's function is called once with the whole mapping; it touches every page
    itself, and what it returns is called by `close`.
    """

    def __init__(self, slots: int, slot_bytes: int, pin: Pin | None = None) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes are no pool")
        self.slots, self.slot_bytes = slots, slot_bytes
        self._memory = mmap.mmap(-1, slots * slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        """Of slot 0; slot i is at `address + i * slot_bytes`, until `close`."""
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
        """Wait until no page is left to touch; whether that is so. For measurements."""
        if self._toucher is not None:
            self._toucher.join(timeout_s)
            return not self._toucher.is_alive()
        return True

    def close(self) -> None:
        """Give the memory back. While somebody holds a view of a slot, it stays until they let
        go; nothing is read or written by the pool after this."""
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
            return False  # not Linux, or built without them
        return True

    def _touch(self) -> None:
        # Not by mmap.madvise, which keeps the GIL for as long as the kernel clears pages.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for at in range(0, self.nbytes, _STEP):
            size = min(_STEP, self.nbytes - at)
            if self._stop.is_set() or madvise(self.address + at, size, _MADV_POPULATE_WRITE):
                return  # an older kernel: pages come when they are first written to
