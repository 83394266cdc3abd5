"""Chunks whose bytes follow from their key, so that anybody can tell a wrong one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from disagg.store.directory import Directory
from disagg.store.directory_files import TensorSpec, file_name
from disagg.store.directory_space import DirectorySpace
from disagg.store.fingerprint import Fingerprint

FINGERPRINT = Fingerprint(
    {"model": "org/tiny-model", "dtype": "bfloat16", "layout": "LBHNC"},
    {"hash_algorithm": "sha256", "hash_seed": "a1"},
)
SHAPE = (2, 3, 64)
SPEC = [TensorSpec("k", "BF16", SHAPE), TensorSpec("v", "BF16", SHAPE)]
NUM_BYTES = sum(spec.nbytes for spec in SPEC)
GARBAGE = b"\xee"


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content_of(key: bytes, rank: int = 0, size: int = NUM_BYTES) -> bytes:
    return hashlib.shake_128(key + bytes([rank])).digest(size)


def cut(content: bytes, pieces: int = 3) -> list[memoryview]:
    """The bytes as so many buffers, the last one longer or shorter than the others."""
    step = len(content) // pieces
    starts = [step * number for number in range(pieces)]
    ends = [*starts[1:], len(content)]
    return [memoryview(content)[at:end] for at, end in zip(starts, ends, strict=True)]


def empty() -> tuple[bytearray, list[memoryview]]:
    """Memory for a chunk, whole and cut differently than `cut` does."""
    memory = bytearray(GARBAGE * NUM_BYTES)
    view = memoryview(memory)
    return memory, [view[:100], view[100:100], view[100:]]


def open_directory(
    root: Path, rank: int = 0, space: DirectorySpace | None = None, **more: Any
) -> Directory:
    return Directory(root, FINGERPRINT, rank, SPEC, space, **more)


def path_of(root: Path, key: bytes, rank: int = 0) -> Path:
    return root / FINGERPRINT.namespace / file_name(key, rank)
