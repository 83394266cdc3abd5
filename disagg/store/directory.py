"""A worker's half of the directory tier: writes and reads the chunk files of its rank.

Any number of threads, processes and hosts may use the same keys at once. A file is written under a
temporary name and renamed, so a file with its final name was written completely. A killed process
leaves at most a temporary file, which `directory_space` removes. A host that loses power may leave
a named file without its bytes: every read checks size and checksum; a damaged file is removed,
counted, and a miss.

If two writers write one key, either may win, since a key determines the bytes. An open file stays
readable when it is removed or replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from disagg.store import owner
from disagg.store.base import (
    FileStats,
    Key,
    ReadOutcome,
    ReadResult,
    WriteOutcome,
    WriteResult,
    check_key,
    total_bytes,
)
from disagg.store.directory_files import (
    TEMPORARY,
    FileFormat,
    TensorSpec,
    checksum_of,
    file_name,
    read_all,
    reason_of,
    write_all,
)
from disagg.store.directory_space import DirectorySpace
from disagg.store.fingerprint import Fingerprint, claim

_TOUCH_INTERVAL_S = 60.0


class Directory:
    """The files of one rank. All methods may be called from any thread.

    tensors: describe a chunk of this rank, for readers of the file with safetensors. space: limits
    the folder's size; without it there is no limit, and only others remove what killed writers
    leave. Buffers are C-contiguous. Raises `ConfigError` if the folder can't be used or holds
    chunks of another hash seed.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: Fingerprint,
        rank: int,
        tensors: Sequence[TensorSpec],
        space: DirectorySpace | None = None,
        *,
        fsync: bool = False,
    ) -> None:
        self._folder = str(claim(root, fingerprint))
        self._format = FileFormat(fingerprint.digest, rank, tensors)
        self._space, self._fsync = space, fsync
        self._temporaries = itertools.count()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def chunk_bytes(self) -> int:
        """Total bytes of a chunk's buffers."""
        return self._format.data_bytes

    def write(self, key: Key, buffers: Sequence[memoryview]) -> WriteResult:
        """Write a chunk, unless it exists. The buffers must not change meanwhile; if they do, the
        checksum differs, and the chunk is lost, but never wrong.

        Raises `ValueError` for buffers of another size.
        """
        self._check(key, buffers)
        path = self._path(key)
        size = self._format.head_bytes(key) + self.chunk_bytes
        if _exists(path, size):
            return self._wrote(WriteResult(WriteOutcome.EXISTED))
        if self._space is not None and not self._space.reserve(size):
            return self._wrote(WriteResult(WriteOutcome.FAILED, reason="full"))
        head = self._format.head(key, checksum_of(buffers))
        temporary = f"{path}.{owner.name()}.{next(self._temporaries)}{TEMPORARY}"
        try:
            self._write_file(temporary, [memoryview(head), *buffers])
            os.rename(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            reason = reason_of(error)
            if self._space is not None:
                self._space.give_back(size, disk_full=reason == "no_space")
            return self._wrote(WriteResult(WriteOutcome.FAILED, reason=reason))
        if self._space is not None:
            self._space.written(size)
        return self._wrote(WriteResult(WriteOutcome.WRITTEN, size))

    def read(self, key: Key, buffers: Sequence[memoryview]) -> ReadResult:
        """Read a chunk straight into the buffers, then check it. They hold the chunk only if the
        result is `ok`.

        Raises `ValueError` for buffers of another size.
        """
        self._check(key, buffers)
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            reason = reason_of(error)
            outcome = ReadOutcome.MISSING if reason == "missing" else ReadOutcome.FAILED
            return self._did_read(ReadResult(outcome, reason=reason))
        try:
            damage = self._read_file(descriptor, key, buffers)
            if damage:
                self._remove(path, descriptor)
                return self._did_read(ReadResult(ReadOutcome.DAMAGED, reason=damage))
        except OSError as error:
            return self._did_read(ReadResult(ReadOutcome.FAILED, reason=reason_of(error)))
        finally:
            os.close(descriptor)
        return self._did_read(ReadResult(ReadOutcome.LOADED, self.chunk_bytes))

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark chunks as used that were not read from here. Missing ones are skipped."""
        for key in keys:
            path = self._path(key)
            with contextlib.suppress(OSError):
                _touch(path, os.stat(path))

    @property
    def stats(self) -> FileStats:
        """Counts so far."""
        with self._lock:
            return FileStats(**self._counts)

    # ---- inside ----------------------------------------------------------------------------

    def _check(self, key: Key, buffers: Sequence[memoryview]) -> None:
        check_key(key)
        if total_bytes(buffers) != self.chunk_bytes:
            raise ValueError(f"buffers of {total_bytes(buffers)} bytes, not {self.chunk_bytes}")

    def _path(self, key: Key) -> str:
        return f"{self._folder}/{file_name(key, self._format.rank)}"

    def _write_file(self, path: str, buffers: Sequence[memoryview]) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        try:
            write_all(descriptor, buffers)
            if self._fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read_file(self, descriptor: int, key: Key, buffers: Sequence[memoryview]) -> str:
        """Fill the buffers. Returns what is damaged; empty if nothing is."""
        head = bytearray(self._format.head_bytes(key))
        status = os.fstat(descriptor)
        size = len(head) + self.chunk_bytes
        if status.st_size != size or read_all(descriptor, [memoryview(head), *buffers]) != size:
            return "size"
        if head != self._format.head(key, checksum_of(buffers)):
            return "content"
        with contextlib.suppress(OSError):
            _touch(descriptor, status)
        return ""

    def _remove(self, path: str, descriptor: int) -> None:
        """Unlink the open, damaged file, unless another engine has replaced it."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                os.unlink(path)

    def _wrote(self, result: WriteResult) -> WriteResult:
        name = "writes_failed" if not result.ok else str(result.outcome)
        with self._lock:
            self._counts[name] += 1
            self._counts["bytes_written"] += result.num_bytes
        return result

    def _did_read(self, result: ReadResult) -> ReadResult:
        name = "reads_failed" if result.outcome is ReadOutcome.FAILED else str(result.outcome)
        with self._lock:
            self._counts[name] += 1
            self._counts["bytes_read"] += result.num_bytes
        return result


def _exists(path: str, size: int) -> bool:
    """Whether a file of this size exists; marks it as used."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    if status.st_size != size:
        return False
    with contextlib.suppress(OSError):
        _touch(path, status)
    return True


def _touch(file: str | int, status: os.stat_result) -> None:
    """Update the time of use, for eviction; at most once a minute, as it costs a write."""
    if time.time() - status.st_mtime > _TOUCH_INTERVAL_S:
        os.utime(file)
