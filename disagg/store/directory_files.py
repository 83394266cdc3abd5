"""One chunk of one rank as a safetensors file: names, head, and moving bytes without a copy.

    <root>/<namespace>/<first 2 hex digits of key>/<key in hex>.r<rank>.safetensors

The head's `__metadata__` has format, fingerprint, key and rank, and a checksum over these and all
bytes after the head. A reader knows everything else in the head, so it builds the expected head and
compares: it never interprets content of a file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.checksums import DIGEST_BYTES, Checksum
from disagg.identity import process
from disagg.store.base import MAX_KEY_BYTES, Key

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
FORMAT = "disagg-kv-2"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1}

_CHUNK = rf"((?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}})\.r\d+{re.escape(SUFFIX)}"
_NAME = re.compile(_CHUNK)
_UNFINISHED = re.compile(rf"{_CHUNK}\.({process.NAME})\.\d+{re.escape(TEMPORARY)}")
_LENGTH = struct.Struct("<Q")
_ALIGN = 64
_CHECKSUM_DIGITS = 2 * DIGEST_BYTES
_IOV_MAX = 1024

_REASONS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "too_big",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
    errno.EMFILE: "too_many_files",
    errno.ENFILE: "too_many_files",
    errno.ENOENT: "missing",
    errno.ESTALE: "missing",
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a chunk, in safetensors' terms. A chunk's buffers are its tensors' bytes in
    order, split anywhere."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class FileFormat:
    """The files of one rank in one namespace. Keys of equal length give files of equal size."""

    def __init__(
        self,
        fingerprint: str,
        rank: int,
        tensors: Sequence[TensorSpec],
        checksum: Checksum | None = None,
    ) -> None:
        if not tensors:
            raise ValueError("a chunk needs at least one tensor")
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ValueError("two tensors of a chunk have one name")
        self.rank, self._checksum = rank, checksum or Checksum()
        self.data_bytes = sum(tensor.nbytes for tensor in tensors)
        metadata = {
            "checksum": "CHECKSUM",
            "format": FORMAT,
            "fingerprint": fingerprint,
            "rank": str(rank),
            "key": "KEY",
        }
        head = {"__metadata__": metadata, **_entries(tensors)}
        text = json.dumps(head, separators=(",", ":"))
        # Checksum and key differ between files, in this order; a name can't contain a quote.
        self._before, rest = text.split('"CHECKSUM"', 1)
        self._between, self._after = rest.split('"KEY"', 1)

    def head(self, key: Key, buffers: Sequence[memoryview]) -> bytes:
        """Length, JSON and padding that open the file of a key with these bytes, however they are
        split."""
        rest = f'{self._between}"{key.hex()}"{self._after}'
        checksum = self._checksum.of(rest.encode(), *buffers).hex()
        text = f'{self._before}"{checksum}"{rest}'.encode()
        text += b" " * (-(len(text) + _LENGTH.size) % _ALIGN)
        return _LENGTH.pack(len(text)) + text

    def head_bytes(self, key: Key) -> int:
        """Size of the head, whatever the bytes."""
        fixed = len(self._before) + len(self._between) + len(self._after)
        text = _LENGTH.size + fixed + len('""""') + _CHECKSUM_DIGITS + 2 * len(key)
        return text + -text % _ALIGN


def _entries(tensors: Sequence[TensorSpec]) -> dict[str, object]:
    entries: dict[str, object] = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    return entries


def file_name(key: Key, rank: int) -> str:
    """Path below the namespace's folder."""
    name = key.hex()
    return f"{name[:2]}/{name}.r{rank}{SUFFIX}"


def key_of(name: str) -> Key | None:
    """The key in a file's name; None if it is not a chunk's file."""
    found = _NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


def writer_of(name: str) -> str | None:
    """The process that writes the unfinished file of this name; None for other files."""
    found = _UNFINISHED.fullmatch(name)
    return found[2] if found else None


def write_all(descriptor: int, buffers: Sequence[memoryview]) -> None:
    """Write the buffers in order, with few system calls, each without the GIL."""
    if _vectored(os.writev, descriptor, buffers) < sum(buffer.nbytes for buffer in buffers):
        raise OSError(errno.EIO, "cannot write")


def read_all(descriptor: int, buffers: Sequence[memoryview]) -> int:
    """Fill the buffers in order; returns the bytes read, fewer only at the file's end."""
    return _vectored(os.readv, descriptor, buffers)


def reason_of(error: OSError) -> str:
    """A metric label for the error."""
    return _REASONS.get(error.errno or 0, "io")


def _vectored(
    call: Callable[[int, Sequence[memoryview]], int], descriptor: int, buffers: Sequence[memoryview]
) -> int:
    left = [buffer.cast("B") for buffer in reversed(buffers) if buffer.nbytes]
    total = 0
    while left:
        count = call(descriptor, left[: -_IOV_MAX - 1 : -1])
        if count == 0:
            break
        total += count
        while left and count >= len(left[-1]):
            count -= len(left.pop())
        if count:
            left[-1] = left[-1][count:]
    return total
