"""Leases posted in memory, where consumers of the same host look them up without asking.

A row for each lease: its number, how many block ids it has, a checksum, and the ids. The producer
posts a lease when it is granted, takes it off before its blocks go back to vLLM, and never uses a
number again; and the blocks do not go back while somebody says that it reads them (hazards.py). A
consumer may be silent for so long that it is waited for no more. So the row is looked at again: who
finds the same one before and after it read the blocks has read them while the lease kept them; like
a seqlock, but nobody reads in a loop.

A row is read while it may be written: what makes no sense, or has another checksum, is taken for no
row. The board's own token is part of the checksum, so that no other process is read for it. A lease
that does not fit a row is not posted, and where two want the same row the later one has it: of the
others the producer is asked.
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
_ROW_BYTES = 4096  # a page: of what was never posted nothing is taken
_HEAD = struct.Struct("<qqq")
_HEAD_BYTES = _HEAD.size
_MOST_IDS = (_ROW_BYTES - _HEAD_BYTES) // 4

Peek = Callable[[int, int], bytes]
"""Bytes of the producer's memory: address and length. Raises `TransferError`."""


class LeaseBoard:
    """One worker's. Safe for use from any thread."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(16)
        self._rows = np.zeros((_ROWS, _ROW_BYTES), np.uint8)
        self._heads = self._rows[:, :_HEAD_BYTES].view(np.int64)
        self._ids = self._rows[:, _HEAD_BYTES:].view(np.int32)
        self._lock, self._closed = threading.Lock(), False
        self.hazards = HazardPointers(self.token) if hasattr(os, "memfd_create") else None

    @property
    def address(self) -> int:
        """Of its first row."""
        return int(self._rows.ctypes.data)

    def post(self, lease: int, block_ids: Sequence[int]) -> None:
        """From now on its blocks may be read."""
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

    def take_off(self, lease: int) -> None:
        """What is read of it from now on counts no more."""
        with self._lock:
            head = self._heads[lease % _ROWS]
            if head[0] == lease + 1:
                head[0] = 0

    def is_read(self, lease: int) -> bool:
        """Whether a consumer says that it reads the blocks. Once the lease was taken off, nobody
        begins to."""
        return self.hazards is not None and self.hazards.name(lease)

    def take_slot(self) -> int:
        """For a connection, to say there what it reads; `NO_SLOT` if it cannot, and has to ask."""
        return NO_SLOT if self.hazards is None else self.hazards.take()

    def give_back(self, slot: int) -> int | None:
        """Its connection ended. The lease that was being read, if any."""
        return None if self.hazards is None else self.hazards.give_back(slot)

    def close(self) -> None:
        """Take all off; nothing is posted any more."""
        with self._lock:
            self._closed = True
            self._heads[:, 0] = 0
        if self.hazards is not None:
            self.hazards.close()

    def posted(self) -> set[int]:
        """The leases that are on it."""
        with self._lock:
            return {int(number) - 1 for number in self._heads[:, 0] if number}


def look_up(peek: Peek, address: int, token: bytes, lease: int) -> LeaseEntry | None:
    """The lease on the board of this address and token; None if it is not there."""
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


def still_there(peek: Peek, posted: LeaseEntry) -> bool:
    """Whether it has been on the board all the time since it was looked up."""
    return peek(posted.at, _HEAD_BYTES) == posted.head


def _checksum(token: bytes, lease: int, ids: bytes) -> int:
    return xxhash.xxh3_64_intdigest(token + ids, seed=lease) >> 1  # so that it fits an int64
