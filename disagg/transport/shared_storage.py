"""Shared storage: the producer writes one safetensors file per fetch, the consumer reads it.

A file is written under a temporary name, synced if configured, and renamed, so a file with its
final name is complete. The consumer checks size, block shape and checksum (with a key, by default)
before the bytes count, and removes the file. The producer removes it too when the lease ends, so a
file outlives its handoff only if both processes die; `sweep` removes those. It removes nothing but
files with names that this module makes. A name from the wire must be one of the producer's own.

    disagg-<producer's process>-<random>.probe             proves that both see the same folder
    disagg-<producer's process>-<random>-<n>.safetensors   one fetch; `.tmp` until it is complete

The consumer reads straight into its blocks and does not map the file: a mapped file that
another host truncates or removes kills the reader with SIGBUS, a read fails with an error.
Blocks on a device pass through staging memory; one piece is copied while another is on the disk.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np

from disagg.checksums import DIGEST_BYTES, Checksum
from disagg.errors import DataCorrupt, TransferError
from disagg.identity import process
from disagg.private_files import PrivateFolder, UnsafePathError
from disagg.transport.base import FetchJob
from disagg.transport.blocks import ITEM_BYTES, BlockCache, Bytes, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.device.staging import Staging

NAME = "shared_storage"
_Pieces: TypeAlias = Generator[list[Bytes], None, None]
_SUFFIX, _TEMPORARY, _PROBE = ".safetensors", ".tmp", ".probe"
_OURS = re.compile(
    rf"disagg-({process.NAME})-[0-9a-f]{{8}}(?:{re.escape(_PROBE)}"
    rf"|-\d+{re.escape(_SUFFIX)}(?:{re.escape(_TEMPORARY)})?)"
)
_LENGTH = struct.Struct("<Q")
_IOV_MAX = 512
_MAX_AGE_S = 3600.0
_TOKEN_BYTES = 16

logger = logging.getLogger(__name__)


class _StorageOffer(msgspec.Struct, frozen=True):
    """A probe file that the consumer must find in its own folder, and its content. checksum: which
    one the files have."""

    name: str
    token: bytes
    checksum: str


class _File(msgspec.Struct, frozen=True):
    """A fetch's file. size: of the whole file. checksum: over the tensors."""

    name: str
    size: int
    checksum: bytes


_decode_offer = msgspec.msgpack.Decoder(_StorageOffer).decode
_decode_file = msgspec.msgpack.Decoder(_File).decode


@dataclass(frozen=True)
class Storage:
    """The folder and its limits. Both ends must see the same folder, under any path, and use the
    same checksum."""

    folder: PrivateFolder
    max_bytes: int
    fsync: bool = False
    checksum: Checksum = field(default_factory=Checksum)


class SharedStorageSender:
    """Writes fetches as files, which never take more than `max_bytes` together.

    `staging`: for a cache on a device. Raises ConfigError if the folder is not this user's alone.
    """

    name = NAME

    def __init__(self, cache: BlockCache, storage: Storage, staging: Staging | None = None) -> None:
        self._cache, self._storage, self._staging = cache, storage, staging
        self._folder = storage.folder.make("transfer.storage.path")
        self._prefix = f"disagg-{process.name()}-{secrets.token_hex(4)}"
        self._live: dict[str, int] = {}
        self._lock = threading.Lock()
        self._count = 0
        sweep(self._folder)
        token, kind = secrets.token_bytes(_TOKEN_BYTES), storage.checksum.kind
        self._probe = _StorageOffer(self._prefix + _PROBE, token, kind)
        self._folder.write_bytes(self._probe.name, self._probe.token)

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
        self._folder.remove(self._probe.name)

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
        self._folder.remove(name)
        self._folder.remove(name + _TEMPORARY)
        with self._lock:
            self._live.pop(name, None)

    def _content(self, blocks: Selection, deadline: Deadline) -> _Pieces:
        if self._staging is None:
            return self._cache.views(blocks)
        return _one_by_one(self._staging.outgoing(self._cache, blocks, deadline))

    def _write(self, name: str, header: bytes, content: _Pieces) -> bytes:
        checksum, temporary = self._storage.checksum.begin(), name + _TEMPORARY
        descriptor = self._folder.open_file(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
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
        self._folder.rename(temporary, name)
        return checksum.digest()[:DIGEST_BYTES]


class SharedStorageReceiver:
    """Opens producers' folders. `staging`: for a cache on a device."""

    name = NAME

    def __init__(self, cache: BlockCache, storage: Storage, staging: Staging | None = None) -> None:
        self._cache, self._storage, self._staging = cache, storage, staging

    def open(self, offer: bytes) -> ProducersFiles | None:
        try:
            probe = _decode_offer(offer)
            if not _OURS.fullmatch(probe.name) or not probe.name.endswith(_PROBE):
                return None
            found = self._storage.folder.read_bytes(probe.name, _TOKEN_BYTES + 1)
        except UnsafePathError as error:
            logger.warning("%s is not used: %s", NAME, error)
            return None
        except (msgspec.DecodeError, OSError):
            return None
        if found != probe.token:
            return None
        if probe.checksum != self._storage.checksum.kind:
            logger.warning(
                "%s is not used: the producer's files have another checksum; set the same "
                "transfer.storage.checksum",
                NAME,
            )
            return None
        prefix = probe.name.removesuffix(_PROBE)
        return ProducersFiles(prefix, self._cache, self._storage, self._staging)

    def close(self) -> None:
        """Nothing is kept between fetches."""


class ProducersFiles:
    """One producer's files, as this worker reads them: straight into its cache, one copy."""

    name = NAME

    def __init__(
        self, prefix: str, cache: BlockCache, storage: Storage, staging: Staging | None
    ) -> None:
        self._prefix, self._cache, self._staging = prefix, cache, staging
        self._folder, self._checksum = storage.folder, storage.checksum

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        """Nothing to do without the answer."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        try:
            file = _decode_file(answer)
        except msgspec.DecodeError as error:
            raise DataCorrupt(f"answer not understood: {error}") from error
        if not (_OURS.fullmatch(file.name) and file.name.startswith(self._prefix + "-")):
            raise DataCorrupt(
                "the producer names a file that is not its own", reason="storage_name"
            )
        try:
            descriptor = self._folder.open_file(file.name)
            try:
                self._load(job, file, descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise TransferError(f"cannot read: {error}", reason="storage_read") from error
        finally:
            self._folder.remove(file.name)
        return self._cache.num_bytes(job.blocks)

    def _load(self, job: FetchJob, file: _File, descriptor: int) -> None:
        header = _header(self._cache, job.blocks)
        size = len(header) + self._cache.num_bytes(job.blocks)
        found = os.fstat(descriptor).st_size
        if found != size or file.size != size:
            raise DataCorrupt(f"{found} bytes where {size} were due", reason="storage_size")
        if os.read(descriptor, len(header)) != header:
            raise DataCorrupt("the file describes other blocks", reason="storage_header")
        checksum = self._checksum.begin()
        with contextlib.closing(self._room(job)) as room:
            for pieces in room:
                _read_all(descriptor, pieces)
                for piece in pieces:
                    checksum.update(piece.data)
                job.deadline.left()
        if not hmac.compare_digest(checksum.digest()[:DIGEST_BYTES], file.checksum):
            raise DataCorrupt("checksum differs", reason="storage_checksum")

    def _room(self, job: FetchJob) -> _Pieces:
        if self._staging is None:
            return self._cache.views(job.blocks)
        return _one_by_one(self._staging.incoming(self._cache, job.blocks, job.deadline, job.after))


def sweep(folder: PrivateFolder, max_age_s: float = _MAX_AGE_S) -> int:
    """Remove the files that dead processes of this host left, and those of unknown processes that
    are older than `max_age_s`. Files with other names stay, and are logged. Returns the number
    removed. Raises OSError."""
    removed, foreign = 0, []
    for name in folder.names():
        found = _OURS.fullmatch(name)
        if found is None:
            foreign.append(name)
            continue
        is_dead = process.is_dead(found[1])
        if is_dead is None and not name.endswith(_PROBE):
            is_dead = _age_s(folder, name) > max_age_s
        removed += bool(is_dead) and folder.remove(name)
    if foreign:
        logger.warning(
            "%s holds %d files that are not disagg's, such as %r; they are left alone",
            folder.path,
            len(foreign),
            foreign[0],
        )
    return removed


def _age_s(folder: PrivateFolder, name: str) -> float:
    """Since the last change of a regular file; 0 for anything else."""
    with contextlib.suppress(OSError), folder.opened() as opened:
        found = os.stat(name, dir_fd=opened, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            return time.time() - found.st_mtime
    return 0.0


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
