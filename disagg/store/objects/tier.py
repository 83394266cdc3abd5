"""The tier of an object store: its finder, and a worker's half, which writes and reads the chunks
of its rank.

Any number of engines on any number of machines may use the same names at once. A store shows an
object whole or not at all. Nothing in an object is believed before its head, with the checksum over
its bytes, is the one that this rank would have written: see `directory_files.FileFormat`. A damaged
object is removed, counted, and a miss. If another engine has replaced it meanwhile, that one is
removed, which costs time only.

Whatever a store does, a call's result is a result, and never later than the store's timeouts.
"""

from __future__ import annotations

import contextlib
import hmac
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from disagg.checksums import Checksum
from disagg.store.base import (
    FileCounts,
    FileStats,
    Key,
    ReadOutcome,
    ReadResult,
    WriteOutcome,
    WriteResult,
    check_key,
    total_bytes,
)
from disagg.store.directory_files import FileFormat, TensorSpec, file_name
from disagg.store.fingerprint import Fingerprint
from disagg.store.objects.base import ObjectStore, StoreError
from disagg.store.objects.claim import Claim
from disagg.store.objects.space import ObjectSpace

_TOUCH_INTERVAL_S = 60.0
_MOST_TOUCHED = 1 << 16


class ObjectFinder:
    """Finds the chunks of `ranks` worker ranks; a chunk exists when the objects of all ranks do.

    Raises `ConfigError` if the store holds chunks of another hash seed. If it is out, lookups say
    so until it is back.
    """

    name = "objects"

    def __init__(self, store: ObjectStore, fingerprint: Fingerprint, ranks: int) -> None:
        self._store, self._namespace, self._ranks = store, fingerprint.namespace, ranks
        Claim(store, fingerprint).at_start()

    def leading(self, keys: Sequence[Key]) -> int:
        at_once, found = max(1, self._store.batch // self._ranks), 0
        for begin in range(0, len(keys), at_once):
            some = keys[begin : begin + at_once]
            names = [self._name(key, rank) for key in some for rank in range(self._ranks)]
            sizes = self._store.sizes(names)
            if None in sizes:
                return found + sizes.index(None) // self._ranks
            found += len(some)
        return found

    def close(self) -> None:
        self._store.close()

    def _name(self, key: Key, rank: int) -> str:
        return f"{self._namespace}/{file_name(key, rank)}"


class Objects:
    """The objects of one rank. All methods may be called from any thread.

    tensors: describe a chunk of this rank, for readers of an object with safetensors. space: limits
    the size of all objects; without it the store does, or nothing. ttl_s: how long the store keeps
    unused objects. checksum: also part of the fingerprint. Buffers are C-contiguous. Raises
    `ConfigError` if the store holds chunks of another hash seed.
    """

    def __init__(
        self,
        store: ObjectStore,
        fingerprint: Fingerprint,
        rank: int,
        tensors: Sequence[TensorSpec],
        space: ObjectSpace | None = None,
        *,
        checksum: Checksum | None = None,
        ttl_s: float | None = None,
    ) -> None:
        self.place = store.place
        self._store, self._space = store, space
        self._namespace = fingerprint.namespace
        self._format = FileFormat(fingerprint.digest, rank, tensors, checksum)
        self._touched = _Recent(min(_TOUCH_INTERVAL_S, (ttl_s or 1e9) / 4))
        self._counts = FileCounts()
        self._claim = Claim(store, fingerprint)
        self._claim.at_start()

    @property
    def chunk_bytes(self) -> int:
        """Total bytes of a chunk's buffers."""
        return self._format.data_bytes

    def write(self, key: Key, buffers: Sequence[memoryview]) -> WriteResult:
        """Write a chunk, unless an object of its size exists."""
        self._check(key, buffers)
        try:
            return self._counts.wrote(self._write(key, buffers))
        except StoreError as error:
            return self._counts.wrote(WriteResult(WriteOutcome.FAILED, reason=error.reason))

    def read(self, key: Key, buffers: Sequence[memoryview]) -> ReadResult:
        """Read a chunk straight into the buffers, then check it."""
        self._check(key, buffers)
        try:
            return self._counts.did_read(self._read(key, buffers))
        except StoreError as error:
            return self._counts.did_read(ReadResult(ReadOutcome.FAILED, reason=error.reason))

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark chunks as used; each at most once a minute, as it costs a request."""
        names = [self._name(key) for key in self._touched.due(keys)]
        with contextlib.suppress(StoreError):
            self._store.touch(names)

    @property
    def stats(self) -> FileStats:
        """Counts so far."""
        return self._counts.stats

    def close(self) -> None:
        """Stop the sweeps, and let go of connections. Removes no object."""
        if self._space is not None:
            self._space.close()
        self._store.close()

    # ---- inside ----------------------------------------------------------------------------

    def _check(self, key: Key, buffers: Sequence[memoryview]) -> None:
        check_key(key)
        if total_bytes(buffers) != self.chunk_bytes:
            raise ValueError(f"buffers of {total_bytes(buffers)} bytes, not {self.chunk_bytes}")

    def _name(self, key: Key) -> str:
        return f"{self._namespace}/{file_name(key, self._format.rank)}"

    def _write(self, key: Key, buffers: Sequence[memoryview]) -> WriteResult:
        self._claim.before_write()
        name = self._name(key)
        size = self._format.head_bytes(key) + self.chunk_bytes
        if self._store.sizes([name]) == [size]:
            self.touch([key])
            return WriteResult(WriteOutcome.EXISTED)
        if self._space is not None and not self._space.reserve(size):
            return WriteResult(WriteOutcome.FAILED, reason="full")
        self._store.put(name, [memoryview(self._format.head(key, buffers)), *buffers])
        return WriteResult(WriteOutcome.WRITTEN, size)

    def _read(self, key: Key, buffers: Sequence[memoryview]) -> ReadResult:
        name = self._name(key)
        head = bytearray(self._format.head_bytes(key))
        size = self._store.get(name, [memoryview(head), *buffers])
        if size is None:
            return ReadResult(ReadOutcome.MISSING, reason="missing")
        damage = "size" if size != len(head) + self.chunk_bytes else ""
        if not damage and not hmac.compare_digest(head, self._format.head(key, buffers)):
            damage = "content"
        if damage:
            with contextlib.suppress(StoreError):
                self._store.remove([name])
            return ReadResult(ReadOutcome.DAMAGED, reason=damage)
        self.touch([key])
        return ReadResult(ReadOutcome.LOADED, self.chunk_bytes)


class _Recent:
    """Which keys were touched in the last `interval_s` seconds; of the last 65,536."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._at: OrderedDict[Key, float] = OrderedDict()
        self._lock = threading.Lock()

    def due(self, keys: Iterable[Key]) -> list[Key]:
        """Those that were not; now they are."""
        now = time.monotonic()
        with self._lock:
            due = [
                key
                for key in dict.fromkeys(keys)
                if now - self._at.get(key, -self._interval_s) >= self._interval_s
            ]
            for key in due:
                self._at[key] = now
                self._at.move_to_end(key)
            while len(self._at) > _MOST_TOUCHED:
                self._at.popitem(last=False)
        return due
