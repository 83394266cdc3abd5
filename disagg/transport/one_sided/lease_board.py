"""The lease board: leases in the producer's memory, where consumers on this host look them up.

Each lease has a row: its number, its count of block ids, a checksum, and the ids. The producer
posts a lease when it is granted, removes it before its blocks go back to vLLM, and never reuses a
number. The blocks do not go back while a hazard slot names the lease (`hazard_pointers.py`). But
the producer waits for a silent consumer only up to a limit. So the consumer reads the row twice: if
it is equal before and after the blocks were read, the lease kept the blocks in between. This is a
seqlock without the retry loop.

A row may be read while it is written: an implausible row, or one with a wrong checksum, counts as
absent. The checksum covers the board's token, so that another process's memory is never taken for
the board. A lease with too many blocks for a row is not posted, and of two leases with the same row
the later one has it; consumers ask the producer for the others.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from disagg.transport.base import LeaseEntry
from disagg.transport.one_sided.hazard_pointers import NO_SLOT, HazardPointers

_ROWS = 1024
_ROW_BYTES = 4096  # one page: rows that were never written take no memory
_HEAD = struct.Struct("<qqq")
_HEAD_BYTES = _HEAD.size
_MOST_IDS = (_ROW_BYTES - _HEAD_BYTES) // 4

Peek = Callable[[int, int], bytes]
"""Reads the producer's memory: (address, length) -> bytes. Raises `TransferError`."""


class LeaseBoard:
    """The board of one producer worker. Safe for use from any thread."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(16)
        self._rows = np.zeros((_ROWS, _ROW_BYTES), np.uint8)
        self._heads = self._rows[:, :_HEAD_BYTES].view(np.int64)
        self._ids = self._rows[:, _HEAD_BYTES:].view(np.int32)
        self._lock, self._closed = threading.Lock(), False
        self.hazards = HazardPointers(self.token) if hasattr(os, "memfd_create") else None

    @property
    def address(self) -> int:
        """The address of its first row."""
        return int(self._rows.ctypes.data)

    def post(self, lease: int, block_ids: Sequence[int]) -> None:
        """Let consumers read these blocks from now on."""
        count = len(block_ids)
        if count > _MOST_IDS:
            return
        ids = np.asarray(block_ids, np.int32)
        checksum = _checksum(self.token, lease, ids.tobytes())
        with self._lock:
            if self._closed:
                return
            head = self._heads[lease % _ROWS]
            head[0] = 0
            self._ids[lease % _ROWS, :count] = ids
            head[1:] = count, checksum
            head[0] = lease + 1

    def remove(self, lease: int) -> None:
        """Blocks read after this are not valid."""
        with self._lock:
            head = self._heads[lease % _ROWS]
            if head[0] == lease + 1:
                head[0] = 0

    def is_read(self, lease: int) -> bool:
        """Whether a hazard slot names the lease. After `remove`, no further read begins."""
        return self.hazards is not None and self.hazards.names(lease)

    def take_slot(self) -> int:
        """A hazard slot for a connection; `NO_SLOT` if there is none, so that it has to ask."""
        return NO_SLOT if self.hazards is None else self.hazards.take()

    def give_back(self, slot: int) -> int | None:
        """The connection ended. Returns the lease that it was reading, if any."""
        return None if self.hazards is None else self.hazards.give_back(slot)

    def close(self) -> None:
        """Remove all leases; nothing is posted after this."""
        with self._lock:
            self._closed = True
            self._heads[:, 0] = 0
        if self.hazards is not None:
            self.hazards.close()

    def posted(self) -> set[int]:
        """The leases on the board."""
        with self._lock:
            return {int(number) - 1 for number in self._heads[:, 0] if number}


def look_up(peek: Peek, address: int, token: bytes, lease: int) -> LeaseEntry | None:
    """The lease's entry on the board with this address and token; None if there is none."""
    at = address + lease % _ROWS * _ROW_BYTES
    row = peek(at, _ROW_BYTES)
    head, rest = row[:_HEAD_BYTES], row[_HEAD_BYTES:]
    number, count, checksum = _HEAD.unpack(head)
    if number != lease + 1 or not 0 <= count <= _MOST_IDS:
        return None
    ids = rest[: 4 * count]
    if _checksum(token, lease, ids) != checksum:
        return None
    return LeaseEntry(head, at, np.frombuffer(ids, np.int32).tolist())


def still_there(peek: Peek, entry: LeaseEntry) -> bool:
    """Whether the entry has stayed on the board since it was looked up."""
    return peek(entry.at, _HEAD_BYTES) == entry.head


def _checksum(token: bytes, lease: int, ids: bytes) -> int:
    return xxhash.xxh3_64_intdigest(token + ids, seed=lease) >> 1  # so that it fits an int64
