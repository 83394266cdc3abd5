"""Shared storage: the producer writes one safetensors file per fetch, the consumer reads it.

A file is written under a temporary name, synced if configured, and renamed, so a file with its
final name is complete. The consumer checks size, block shape and checksum (xxh3) before the bytes
count, and removes the file. The producer removes it too when the lease ends, so a file outlives its
handoff only if both processes die; `sweep` removes those. A name from the wire is never used as a
path: only its last component, within our own folder.

The consumer reads straight into its blocks and does not map the file: a mapped file that
another host truncates or removes kills the reader with SIGBUS, a read fails with an error.
Blocks on a device pass through staging memory; one piece is copied while another is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import xxhash

from disagg.errors import DataCorrupt, TransferError
from disagg.transport.base import FetchJob
from disagg.transport.blocks import ITEM_BYTES, BlockCache, Bytes, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.device.staging import Staging
from disagg.transport.host.process_identity import start_time

NAME = "shared_storage"
_Pieces: TypeAlias = Generator[list[Bytes], None, None]
_SUFFIX = ".safetensors"
_LENGTH = struct.Struct("<Q")
_IOV_MAX = 512
_MAX_AGE_S = 3600.0


class _StorageOffer(msgspec.Struct, frozen=True):
    """A probe file that the consumer must find in its own folder, and its content."""

    name: str
    token: bytes


class _File(msgspec.Struct, frozen=True):
    """A fetch's file. size: of the whole file. checksum: xxh3-128 over the tensors."""

    name: str
    size: int
    checksum: bytes


_decode_offer = msgspec.msgpack.Decoder(_StorageOffer).decode
_decode_file = msgspec.msgpack.Decoder(_File).decode


@dataclass(frozen=True)
class Storage:
    """The folder and its limits. Both ends must see the same folder, under any path."""

    folder: Path
    max_bytes: int
    fsync: bool = False


class SharedStorageSender:
    """Writes fetches as files, which never take more than `max_bytes` together.

    `staging`: for a cache on a device.
    """

    name = NAME

    def __init__(self, cache: BlockCache, storage: Storage, staging: Staging | None = None) -> None:
        self._cache, self._storage, self._staging = cache, storage, staging
        self._prefix = f"{_owner()}-{secrets.token_hex(4)}"
        self._live: dict[str, int] = {}
        self._lock = threading.Lock()
        self._count = 0
        storage.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(storage.folder)
        self._probe = _StorageOffer(f"{self._prefix}.probe", secrets.token_bytes(16))
        self._probe_path.write_bytes(self._probe.token)

    @property
    def _probe_path(self) -> Path:
        return self._storage.folder / self._probe.name

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(self._probe)

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        header = _header(self._cache, blocks)
        size = len(header) + self._cache.num_bytes(blocks)
        name = self._reserve(size)
        try:
            checksum = self._write(name, header, self._content(blocks, deadline))
            deadline.left()
        except OSError as error:
            self._remove(name)
            raise TransferError(f"cannot write: {error}", reason="storage_write") from error
        except BaseException:
            self._remove(name)
            raise
        return msgspec.msgpack.encode(_File(name, size, checksum))

    def finish(self, answer: bytes) -> None:
        self._remove(_decode_file(answer).name)

    def close(self) -> None:
        for name in list(self._live):
            self._remove(name)
        _unlink(self._probe_path)

    def _reserve(self, size: int) -> str:
        with self._lock:
            in_use = sum(self._live.values())
            if in_use + size > self._storage.max_bytes:
                raise TransferError(
                    f"{size} bytes on top of the {in_use} in use exceed "
                    f"transfer.storage.max_bytes ({self._storage.max_bytes})",
                    reason="storage_full",
                )
            self._count += 1
            name = f"{self._prefix}-{self._count}{_SUFFIX}"
            self._live[name] = size
            return name

    def _remove(self, name: str) -> None:
        _unlink(self._storage.folder / name)
        _unlink(self._storage.folder / (name + ".tmp"))
        with self._lock:
            self._live.pop(name, None)

    def _content(self, blocks: Selection, deadline: Deadline) -> _Pieces:
        if self._staging is None:
            return self._cache.views(blocks)
        return _one_by_one(self._staging.outgoing(self._cache, blocks, deadline))

    def _write(self, name: str, header: bytes, content: _Pieces) -> bytes:
        path, checksum = self._storage.folder / name, xxhash.xxh3_128()
        temporary = path.with_name(name + ".tmp")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            _write_all(descriptor, [np.frombuffer(header, dtype=np.uint8)])
            with contextlib.closing(content):
                for pieces in content:
                    _write_all(descriptor, pieces)
                    for piece in pieces:
                        checksum.update(piece.data)
            if self._storage.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
        return checksum.digest()


class SharedStorageReceiver:
    """Reads files straight into the cache: one copy. `staging`: for a cache on a device."""

    name = NAME

    def __init__(self, cache: BlockCache, storage: Storage, staging: Staging | None = None) -> None:
        self._cache, self._folder, self._staging = cache, storage.folder, staging

    def open(self, offer: bytes) -> SharedStorageReceiver | None:
        try:
            probe = _decode_offer(offer)
            found = (self._folder / Path(probe.name).name).read_bytes()
            return self if found == probe.token else None
        except (msgspec.DecodeError, OSError, ValueError):
            return None

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        """Nothing to do without the answer."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        try:
            file = _decode_file(answer)
        except msgspec.DecodeError as error:
            raise DataCorrupt(f"answer not understood: {error}") from error
        path = self._folder / Path(file.name).name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                self._load(job, file, descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise TransferError(f"cannot read: {error}", reason="storage_read") from error
        finally:
            _unlink(path)
        return self._cache.num_bytes(job.blocks)

    def close(self) -> None:
        """Nothing is kept between fetches."""

    def _load(self, job: FetchJob, file: _File, descriptor: int) -> None:
        header = _header(self._cache, job.blocks)
        size = len(header) + self._cache.num_bytes(job.blocks)
        found = os.fstat(descriptor).st_size
        if found != size or file.size != size:
            raise DataCorrupt(f"{found} bytes where {size} were due", reason="storage_size")
        if os.read(descriptor, len(header)) != header:
            raise DataCorrupt("the file describes other blocks", reason="storage_header")
        checksum = xxhash.xxh3_128()
        with contextlib.closing(self._room(job)) as room:
            for pieces in room:
                _read_all(descriptor, pieces)
                for piece in pieces:
                    checksum.update(piece.data)
                job.deadline.left()
        if checksum.digest() != file.checksum:
            raise DataCorrupt("checksum differs", reason="storage_checksum")

    def _room(self, job: FetchJob) -> _Pieces:
        if self._staging is None:
            return self._cache.views(job.blocks)
        return _one_by_one(self._staging.incoming(self._cache, job.blocks, job.deadline, job.after))


def sweep(folder: Path, max_age_s: float = _MAX_AGE_S) -> int:
    """Remove what dead processes of this host left, and anything older than `max_age_s`."""
    removed = 0
    for path in folder.iterdir():
        if path.suffix not in (_SUFFIX, ".tmp", ".probe"):
            continue
        try:
            old = time.time() - path.stat().st_mtime > max_age_s and path.suffix != ".probe"
        except FileNotFoundError:
            continue  # somebody else was faster
        if old or _owner_is_dead(path.name):
            _unlink(path)
            removed += 1
    return removed


def free_bytes(folder: Path) -> int:
    """Free space of the file system that holds the folder."""
    return shutil.disk_usage(folder).free


def _header(cache: BlockCache, blocks: Selection) -> bytes:
    """The file's head in safetensors' format: length, JSON padded to 8 bytes."""
    entries: dict[str, object] = {}
    offset = 0
    for index in cache.covered(blocks):
        region, shape = cache.regions[index], cache.shape(index, blocks)
        end = offset + math.prod(shape) * ITEM_BYTES[region.dtype]
        entries[region.name] = {
            "dtype": region.dtype,
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _one_by_one(staged: Generator[Bytes, None, None]) -> _Pieces:
    """Lists of one piece; to be closed like what they come from."""
    with contextlib.closing(staged):
        for piece in staged:
            yield [piece]


def _write_all(descriptor: int, pieces: Sequence[Bytes]) -> None:
    """Gathering write: few system calls, each without the GIL."""
    _vectored(os.writev, descriptor, pieces)


def _read_all(descriptor: int, pieces: Sequence[Bytes]) -> None:
    """Scattering read that fills every piece."""
    _vectored(os.readv, descriptor, pieces)


def _vectored(
    call: Callable[[int, Sequence[memoryview]], int], descriptor: int, pieces: Sequence[Bytes]
) -> None:
    left = [piece.data for piece in reversed(pieces)]
    while left:
        batch = left[: -_IOV_MAX - 1 : -1]
        count = call(descriptor, batch)
        if count == 0:
            raise DataCorrupt("the file ends early", reason="storage_size")
        while left and count >= len(left[-1]):
            count -= len(left.pop())
        if count:
            left[-1] = left[-1][count:]


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _owner() -> str:
    """Identifies this process by host, pid and start time, for liveness checks."""
    host = xxhash.xxh32_hexdigest(socket.gethostname().encode())
    return f"{host}-{os.getpid()}-{start_time(os.getpid())}"


def _owner_is_dead(name: str) -> bool:
    host, _, rest = name.partition("-")
    if host != xxhash.xxh32_hexdigest(socket.gethostname().encode()):
        return False
    pid, _, rest = rest.partition("-")
    started = rest.partition("-")[0]
    return pid.isdigit() and str(start_time(int(pid))) != started
