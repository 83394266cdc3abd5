"""Hazard pointers: they show the producer which leases consumers are reading right now.

Each control connection has a slot, in memory that both processes map. A consumer that reads a lease
directly (`lease_board.py`) first writes the lease's number into its slot, then looks the lease up.
The producer first removes a lease from the board, then checks whether a slot names it. Each side
writes before it reads, so at least one sees the other: either the consumer does not find the lease,
or the producer keeps its blocks.

Slots give no access to blocks. A consumer that writes garbage into them only delays a lease's end.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from disagg.errors import TransferError

NO_SLOT = -1
_SLOTS = 1024
_SLOT_BYTES = 64  # a cache line each
_TOKEN_BYTES = 16
_LEASES = 1 << 62
_BYTES = (1 + _SLOTS) * _SLOT_BYTES  # the first slot holds the token
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class HazardPointers:
    """The producer's end. Safe for use from any thread. Consumers open `fd` through /proc."""

    def __init__(self, token: bytes) -> None:
        self.fd = os.memfd_create("disagg-hazards", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, _BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(self.fd, _BYTES)
        memory[:_TOKEN_BYTES] = token
        self._slots = _slots(memory)
        # Reuse the slot that is free for longest: its last reader may not have noticed its end.
        self._free = deque(range(_SLOTS))
        self._lock = threading.Lock()

    def take(self) -> int:
        """A slot for a connection; `NO_SLOT` if all are taken."""
        with self._lock:
            return self._free.popleft() if self._free else NO_SLOT

    def give_back(self, slot: int) -> int | None:
        """The counterpart of `take`. Returns the lease that the slot still names, if any."""
        if slot == NO_SLOT:
            return None
        with self._lock:
            number = int(self._slots[slot])
            self._slots[slot] = 0
            self._free.append(slot)
        return number - 1 if number else None

    def names(self, lease: int) -> bool:
        """Whether any slot names this lease."""
        with self._lock:
            return lease + 1 in self._slots

    def close(self) -> None:
        """Consumers cannot open it after this; existing mappings stay writable."""
        self._close()


class RemoteHazardPointers:
    """The consumer's end: the slots of process `pid`. Raises `TransferError` if they are missing or
    have another token."""

    def __init__(self, pid: int, fd: int, token: bytes) -> None:
        try:
            with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as file:
                # An unsealed file could shrink, and then reading it would raise SIGBUS.
                if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                    raise OSError("not sealed")
                memory = mmap.mmap(file.fileno(), _BYTES)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map slots of process {pid}: {error}") from error
        if memory[:_TOKEN_BYTES] != token:
            raise TransferError(f"process {pid} has other slots there")
        self._slots = _slots(memory)
        self._lock = threading.Lock()

    def have(self, slot: int, lease: int) -> bool:
        """Whether the slot exists, and the lease's number fits into it."""
        return 0 <= slot < _SLOTS and 0 <= lease < _LEASES

    @contextlib.contextmanager
    def naming(self, slot: int, lease: int) -> Iterator[None]:
        """Name the lease in the slot. Look it up and read it within the context, in one thread."""
        # Releasing and taking a lock is a full fence: the look-up cannot move before the write.
        with self._lock:
            self._slots[slot] = lease + 1
        with self._lock:
            pass
        try:
            yield
        finally:
            if self._slots[slot] == lease + 1:  # else the slot belongs to another connection now
                self._slots[slot] = 0


def _slots(memory: mmap.mmap) -> npt.NDArray[np.int64]:
    """int64 [slots]: lease + 1 that is being read, 0 for none."""
    rows = np.frombuffer(memory, np.int64).reshape(1 + _SLOTS, -1)
    return rows[1:, 0]
