"""Hazard pointers: which lease a consumer reads right now, where its producer sees it.

A slot for each control connection, in memory that both ends map. Who reads a lease without asking
(board.py) writes its number into the slot first, and then looks the lease up; the producer takes a
lease off the board first, and then looks whether a slot names it. Each writes before it looks, so
at least one sees the other: the lease is not found, or its blocks are kept.

Slots say nothing of the blocks. Who writes nonsense into them keeps a lease for a while longer.
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
_BYTES = (1 + _SLOTS) * _SLOT_BYTES  # the first is the token's
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class HazardPointers:
    """The producer's end. Safe for use from any thread. `fd` is for consumers to open by /proc."""

    def __init__(self, token: bytes) -> None:
        self.fd = os.memfd_create("disagg-hazards", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, _BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(self.fd, _BYTES)
        memory[:_TOKEN_BYTES] = token
        self._slots = _slots(memory)
        # The one free for longest first: who lost its connection may not know it yet.
        self._free = deque(range(_SLOTS))
        self._lock = threading.Lock()

    def take(self) -> int:
        """A slot for a connection; `NO_SLOT` if all are taken."""
        with self._lock:
            return self._free.popleft() if self._free else NO_SLOT

    def give_back(self, slot: int) -> int | None:
        """The counterpart of `take`. The lease that the slot still names: its reader is gone."""
        if slot == NO_SLOT:
            return None
        with self._lock:
            number = int(self._slots[slot])
            self._slots[slot] = 0
            self._free.append(slot)
        return number - 1 if number else None

    def name(self, lease: int) -> bool:
        """Whether any slot does."""
        with self._lock:
            return lease + 1 in self._slots

    def close(self) -> None:
        """Nobody can open it any more; who has it mapped may write on."""
        self._close()


class RemoteHazardPointers:
    """A consumer's end: the slots of process `pid`. Raises `TransferError` if they are not there,
    or not those of this token."""

    def __init__(self, pid: int, fd: int, token: bytes) -> None:
        try:
            with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as file:
                # Else it could shrink under us, which is a SIGBUS.
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
        """Whether there is such a slot, and room in it for the number."""
        return 0 <= slot < _SLOTS and 0 <= lease < _LEASES

    @contextlib.contextmanager
    def naming(self, slot: int, lease: int) -> Iterator[None]:
        """Look the lease up, and read it, in here. One thread at a time has the slot."""
        # To let go of a lock and take it again is a full fence: looking cannot come first.
        with self._lock:
            self._slots[slot] = lease + 1
        with self._lock:
            pass
        try:
            yield
        finally:
            if self._slots[slot] == lease + 1:  # else it is another connection's by now
                self._slots[slot] = 0


def _slots(memory: mmap.mmap) -> npt.NDArray[np.int64]:
    """int64 [slots]: the lease + 1 that is read there, 0 for none."""
    rows = np.frombuffer(memory, np.int64).reshape(1 + _SLOTS, -1)
    return rows[1:, 0]
