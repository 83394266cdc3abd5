"""Identifies what a cache was computed with, so that different caches are never mixed.

A **namespace** is a folder of the shared directory for one fingerprint. Its name contains
everything that determines the meaning of a chunk's bytes (`fields`), so engines that differ in it
use different folders.

The name deliberately omits how block hashes are made (`hashing`). Two engines that differ in
nothing else are meant to share, and with different hash seeds they would silently never hit. The
first engine of a namespace writes a record of its hashing, and an engine that differs is refused.
Every chunk's file contains the digest of both parts, so even without the record no engine would
load a chunk that was written with another seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from disagg.errors import ConfigError
from disagg.private_files import PrivateFolder

RECORD = "fingerprint.json"
_UNFINISHED = re.compile(re.escape(RECORD) + r"\.[0-9a-f]{16}\.tmp")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,48}-[0-9a-f]{16}")
_MOST_BYTES = 1 << 20
DIRECTORY = "tiers.directory.path"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fingerprint:
    """fields: model (the namespace's name begins with it), dtype, kv_dtype, layout, block_size,
    blocks_per_chunk, tp_size, vllm_version and so on, as text. hashing: hash_algorithm and
    hash_seed (a digest of the seed, not the seed)."""

    fields: Mapping[str, str]
    hashing: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        both = self.fields.keys() & self.hashing.keys()
        if both:
            raise ValueError(f"in fields and in hashing: {sorted(both)}")

    @cached_property
    def namespace(self) -> str:
        """Folder name, the same in every process for the same fields."""
        model = re.sub(r"[^A-Za-z0-9.-]+", "_", self.fields.get("model", "")).strip("._")[-48:]
        return f"{model or 'model'}-{_digest(self.fields)[:16]}"

    @cached_property
    def digest(self) -> str:
        """64 hex digits over fields and hashing."""
        return _digest({**self.fields, **self.hashing})


def open_root(root: Path) -> PrivateFolder:
    """The directory tier's folder, created if missing. Raises `ConfigError`."""
    return PrivateFolder(root.expanduser().absolute()).make(DIRECTORY)


def is_namespace(folder: str) -> bool:
    """Whether a folder of this name may be a namespace."""
    return _NAMESPACE.fullmatch(folder) is not None


def is_unfinished(name: str) -> bool:
    """Whether this is the name of a record that was never published."""
    return _UNFINISHED.fullmatch(name) is not None


def claim(root: Path, fingerprint: Fingerprint) -> PrivateFolder:
    """The namespace's folder under `root`, with its record; created if missing.

    Safe with any number of engines at once. Raises `ConfigError` when engines that hash
    differently use the namespace, or when the folder can't be written to or is not this user's
    alone.
    """
    folder = open_root(root).sub(fingerprint.namespace).make(DIRECTORY)
    record = folder.path / RECORD
    try:
        found = _read(folder)
        if found is None:
            _publish(folder, fingerprint)
            found = _read(folder)
    except OSError as error:
        raise ConfigError(f"cannot use {folder.path} for the KV cache: {error.strerror}") from error
    if found is None:
        raise ConfigError(f"{record} was removed at once: does another program clean {root}?")
    if problem := hashing_problem(fingerprint, found, str(folder.path)):
        raise ConfigError(problem)
    return folder


def hashing_problem(fingerprint: Fingerprint, found: Mapping[str, str], place: str) -> str:
    """Why engines of this fingerprint and of this record must not share a place; empty if they
    may."""
    problems = [
        f"{name} is {fingerprint.hashing.get(name)!r} here, {found.get(name)!r} there"
        for name in sorted(fingerprint.hashing.keys() | found.keys())
        if fingerprint.hashing.get(name) != found.get(name)
    ]
    if not problems:
        return ""
    return (
        f"engines that share {place} hash the same prompt's blocks differently: "
        f"{'; '.join(problems)}. Set the same PYTHONHASHSEED for all of them or use "
        f"prefix_caching_hash_algo sha256, then remove {place} if no running engine uses it."
    )


def record_of(fingerprint: Fingerprint) -> bytes:
    """The content of a namespace's record."""
    content = {"fields": dict(fingerprint.fields), "hashing": dict(fingerprint.hashing)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def hashing_in(record: bytes) -> dict[str, str] | None:
    """The hashing that a record holds; None if it is damaged."""
    try:
        content = json.loads(record)
        return {str(name): str(value) for name, value in content["hashing"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _digest(fields: Mapping[str, str]) -> str:
    text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read(folder: PrivateFolder) -> dict[str, str] | None:
    """The hashing that a record holds; None without a readable one."""
    try:
        found = hashing_in(folder.read_bytes(RECORD, _MOST_BYTES))
    except FileNotFoundError:
        return None
    if found is None:
        # It was damaged later, since it is published whole. A new record is safe: files of another
        # hashing have another digest.
        _logger.warning("%s is damaged and is written again", folder.path / RECORD)
        folder.remove(RECORD)
    return found


def _publish(folder: PrivateFolder, fingerprint: Fingerprint) -> None:
    """Write the record unless another engine was faster."""
    temporary = f"{RECORD}.{secrets.token_hex(8)}.tmp"
    folder.write_bytes(temporary, record_of(fingerprint))
    try:
        with contextlib.suppress(FileExistsError), folder.opened() as opened:
            os.link(temporary, RECORD, src_dir_fd=opened, dst_dir_fd=opened)
    except OSError:
        folder.rename(temporary, RECORD)  # a file system without links; the last engine wins
    finally:
        folder.remove(temporary)
