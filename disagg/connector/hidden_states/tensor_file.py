"""Safetensors files, written piece by piece and read straight into tensors.

A file is written under another name and renamed, so a file with its final name is complete. It is
read, not mapped: a mapped file that another host truncates kills its reader with SIGBUS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from disagg.errors import HiddenStatesFailed
from disagg.private_files import PrivateFolder, open_regular

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER = 1 << 20


@dataclass(frozen=True)
class Spec:
    """Describes one tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def header(specs: Sequence[Spec], metadata: Mapping[str, str]) -> bytes:
    """The file's head: length, JSON, padded to 8 bytes. The tensors follow in this order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        entries[spec.name] = {
            "dtype": DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class Draft:
    """A file that gets its name when it is complete, or never. Both names are in `folder`."""

    def __init__(self, folder: PrivateFolder, temporary: str, name: str) -> None:
        self._folder, self._temporary, self._name = folder, temporary, name
        self._descriptor = -1

    def __enter__(self) -> Draft:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        self._descriptor = self._folder.open_file(self._temporary, flags)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append all of it; raises OSError."""
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            os.close(
                self._descriptor
            )  # may fail too: a network file system reports write errors here
            if kind is None:
                self._folder.rename(self._temporary, self._name)
        except OSError:
            self._folder.remove(self._temporary)
            raise
        if kind is not None:
            self._folder.remove(self._temporary)


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the file, on the CPU. Raises HiddenStatesFailed if it is damaged, OSError."""
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MAX_HEADER, size - _LENGTH_BYTES):
            raise HiddenStatesFailed(f"{path}: is damaged (a header of {length} bytes)")
        try:
            entries: dict[str, Any] = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            specs = [
                Spec(name, _BY_NAME[entry["dtype"]], tuple(entry["shape"]))
                for name, entry in sorted(
                    entries.items(), key=lambda item: item[1]["data_offsets"][0]
                )
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise HiddenStatesFailed(f"{path}: is damaged (header: {error!r})") from error
        due = _LENGTH_BYTES + length + sum(spec.num_bytes for spec in specs)
        if size != due:
            raise HiddenStatesFailed(f"{path}: is damaged ({size} bytes instead of {due})")
        return {spec.name: _read_tensor(file.fileno(), path, spec) for spec in specs}


def _read_tensor(descriptor: int, path: Path, spec: Spec) -> torch.Tensor:
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    left = as_bytes(tensor)
    while left:
        count = os.readv(descriptor, [left])
        if count == 0:
            raise HiddenStatesFailed(f"{path}: is damaged (it ends within {spec.name})")
        left = left[count:]
    return tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.reshape(-1).view(torch.uint8).numpy().data
