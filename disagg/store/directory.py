"""The directory tier: its finder, and a worker's half, which writes and reads the chunk files of
its rank.

Any number of threads, processes and hosts may use the same keys at once. A file is written under a
temporary name and renamed, so a file with its final name was written completely. A killed process
leaves at most a temporary file, which `directory_space` removes. A host that loses power may leave
a named file without its bytes: every read checks size and checksum; a damaged file is removed,
counted, and a miss. So is a file that was not written with the deployment's secret, if the checksum
has a key.

If two writers write one key, either may win, since a key determines the bytes. An open file stays
readable when it is removed or replaced.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from disagg.checksums import Checksum
from disagg.identity import process
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
from disagg.store.directory_files import (
    TEMPORARY,
    FileFormat,
    TensorSpec,
    file_name,
    read_all,
    reason_of,
    write_all,
)
from disagg.store.directory_space import DirectorySpace
from disagg.store.fingerprint import Fingerprint, claim

_TOUCH_INTERVAL_S = 60.0


class DirectoryFinder:
    """Finds the chunks of `ranks` worker ranks; a chunk exists when the files of all ranks do.

    Raises `ConfigError` if the folder can't be used or holds chunks of another hash seed.
    """

    name = "directory"

    def __init__(self, root: Path, fingerprint: Fingerprint, ranks: int) -> None:
        self._folder, self._ranks = claim(root, fingerprint), ranks

    def leading(self, keys: Sequence[Key]) -> int:
        with self._folder.opened() as folder:
            return sum(1 for _ in itertools.takewhile(lambda key: self._exists(key, folder), keys))

    def close(self) -> None:
        """Nothing stays open."""

    def _exists(self, key: Key, folder: int) -> bool:
        try:
            for rank in range(self._ranks):
                os.stat(file_name(key, rank), dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        return True


class Directory:
    """The files of one rank. All methods may be called from any thread.

    tensors: describe a chunk of this rank, for readers of the file with safetensors. space: limits
    the folder's size; without it there is no limit, and only others remove what killed writers
    leave. checksum: also part of the fingerprint. Buffers are C-contiguous. Raises `ConfigError` if
    the folder can't be used or holds chunks of another hash seed.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: Fingerprint,
        rank: int,
        tensors: Sequence[TensorSpec],
        space: DirectorySpace | None = None,
        *,
        checksum: Checksum | None = None,
        fsync: bool = False,
    ) -> None:
        self._folder = claim(root, fingerprint)
        self._format = FileFormat(fingerprint.digest, rank, tensors, checksum)
        self._space, self._fsync = space, fsync
        self.place = str(root)
        self._temporaries = itertools.count()
        self._counts = FileCounts()

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
        name = file_name(key, self._format.rank)
        size = self._format.head_bytes(key) + self.chunk_bytes
        if self._exists(name, size):
            return self._counts.wrote(WriteResult(WriteOutcome.EXISTED))
        if self._space is not None and not self._space.reserve(size):
            return self._counts.wrote(WriteResult(WriteOutcome.FAILED, reason="full"))
        head = self._format.head(key, buffers)
        temporary = f"{name}.{process.name()}.{next(self._temporaries)}{TEMPORARY}"
        try:
            self._write_file(temporary, [memoryview(head), *buffers])
            self._folder.rename(temporary, name)
        except OSError as error:
            self._folder.remove(temporary)
            reason = reason_of(error)
            if self._space is not None:
                self._space.give_back(size, disk_full=reason == "no_space")
            return self._counts.wrote(WriteResult(WriteOutcome.FAILED, reason=reason))
        if self._space is not None:
            self._space.written(size)
        return self._counts.wrote(WriteResult(WriteOutcome.WRITTEN, size))

    def read(self, key: Key, buffers: Sequence[memoryview]) -> ReadResult:
        """Read a chunk straight into the buffers, then check it. They hold the chunk only if the
        result is `ok`.

        Raises `ValueError` for buffers of another size.
        """
        self._check(key, buffers)
        name = file_name(key, self._format.rank)
        try:
            descriptor = self._folder.open_file(name)
        except OSError as error:
            reason = reason_of(error)
            outcome = ReadOutcome.MISSING if reason == "missing" else ReadOutcome.FAILED
            return self._counts.did_read(ReadResult(outcome, reason=reason))
        try:
            damage = self._read_file(descriptor, key, buffers)
            if damage:
                self._remove(name, descriptor)
                return self._counts.did_read(ReadResult(ReadOutcome.DAMAGED, reason=damage))
        except OSError as error:
            return self._counts.did_read(ReadResult(ReadOutcome.FAILED, reason=reason_of(error)))
        finally:
            os.close(descriptor)
        return self._counts.did_read(ReadResult(ReadOutcome.LOADED, self.chunk_bytes))

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark chunks as used that were not read from here. Missing ones are skipped."""
        with contextlib.suppress(OSError), self._folder.opened() as folder:
            for key in keys:
                name = file_name(key, self._format.rank)
                with contextlib.suppress(OSError):
                    _touch(name, os.stat(name, dir_fd=folder, follow_symlinks=False), folder)

    @property
    def stats(self) -> FileStats:
        """Counts so far."""
        return self._counts.stats

    def close(self) -> None:
        """Stop the eviction's thread."""
        if self._space is not None:
            self._space.close()

    # ---- inside ----------------------------------------------------------------------------

    def _check(self, key: Key, buffers: Sequence[memoryview]) -> None:
        check_key(key)
        if total_bytes(buffers) != self.chunk_bytes:
            raise ValueError(f"buffers of {total_bytes(buffers)} bytes, not {self.chunk_bytes}")

    def _exists(self, name: str, size: int) -> bool:
        """Whether a file of this size exists; marks it as used."""
        with contextlib.suppress(OSError), self._folder.opened() as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_size == size:
                with contextlib.suppress(OSError):
                    _touch(name, status, folder)
                return True
        return False

    def _write_file(self, name: str, buffers: Sequence[memoryview]) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            descriptor = self._folder.open_file(name, flags)
        except FileNotFoundError:
            self._make_parent(name)
            descriptor = self._folder.open_file(name, flags)
        try:
            write_all(descriptor, buffers)
            if self._fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _make_parent(self, name: str) -> None:
        with self._folder.opened() as folder, contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(name), 0o700, dir_fd=folder)

    def _read_file(self, descriptor: int, key: Key, buffers: Sequence[memoryview]) -> str:
        """Fill the buffers. Returns what is damaged; empty if nothing is."""
        head = bytearray(self._format.head_bytes(key))
        status = os.fstat(descriptor)
        size = len(head) + self.chunk_bytes
        if status.st_size != size or read_all(descriptor, [memoryview(head), *buffers]) != size:
            return "size"
        if not hmac.compare_digest(head, self._format.head(key, buffers)):
            return "content"
        with contextlib.suppress(OSError):
            _touch(descriptor, status)
        return ""

    def _remove(self, name: str, descriptor: int) -> None:
        """Unlink the open, damaged file, unless another engine has replaced it."""
        with contextlib.suppress(OSError), self._folder.opened() as folder:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(found, os.fstat(descriptor)):
                os.unlink(name, dir_fd=folder)


def _touch(file: str | int, status: os.stat_result, folder: int | None = None) -> None:
    """Update the time of use, for eviction; at most once a minute, as it costs a write."""
    if time.time() - status.st_mtime <= _TOUCH_INTERVAL_S:
        return
    if isinstance(file, int):
        os.utime(file)
    else:
        os.utime(file, dir_fd=folder, follow_symlinks=False)
