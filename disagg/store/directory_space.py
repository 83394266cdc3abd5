"""The size limit of the shared directory, and eviction.

The limit covers all namespaces of a directory, in bytes of files. Every writing process keeps an
estimate: the size at the last scan of the directory, plus its own writes since. When the estimate
nears the limit, or enough was written since the last scan, a thread scans again and removes the
least recently used chunks, until a tenth of the limit is free. One process alone never exceeds the
limit. Several may, by the others' writes since the last scan: each scans again after writing a
fiftieth of the limit.

A lock file prevents concurrent scans, and passes the result on to the processes that waited.
Correctness does not depend on it: where locks do not work, at worst too much is removed. All ranks'
files of a chunk are removed together, as the chunk is useless without one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from disagg.identity import process
from disagg.store.base import Key
from disagg.store.directory_files import key_of, writer_of
from disagg.store.fingerprint import is_namespace, is_unfinished, open_root

logger = logging.getLogger(__name__)

LOCK = ".space"

_HIGH, _LOW = 0.95, 0.9
_STEP = 0.02
_ABANDONED_S = 3600.0
_RECORD_BYTES = 64

OnRemoved = Callable[[str, list[Key]], None]
"""(namespace, keys): this process has evicted these chunks. Called by the evicting thread;
must not raise."""


@dataclass(slots=True)
class _Chunk:
    """All ranks' files of a key."""

    paths: list[str] = field(default_factory=list)
    num_bytes: int = 0
    used_at: float = 0.0


class Evicted(NamedTuple):
    """The result of one scan."""

    chunks: int
    num_bytes: int
    temporaries: int
    """Files that dead writers left behind."""


class DirectorySpace:
    """One per writing process. Any thread may call `reserve`, `written` and `give_back`, which
    never wait for the disk. This object's thread calls `make_room`; others may call it too."""

    def __init__(self, root: Path, max_bytes: int, on_removed: OnRemoved | None = None) -> None:
        if max_bytes < 1:
            raise ValueError(f"a cap of {max_bytes} bytes")
        self._max_bytes, self._on_removed = max_bytes, on_removed
        self._lock = threading.Lock()
        self._writing = 0  # reserved, not finished
        self._since = 0  # written since the last scan began
        self._refused = 0  # the largest file that did not fit
        self._disk_full = False
        self._chunks_evicted = 0
        self._mentioned = False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._folder = open_root(root)
        self._used = self._recorded()[0]
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name="kv-directory-space", daemon=True)
        self._thread.start()

    @property
    def used(self) -> int:
        """Bytes in the directory, by this process's estimate."""
        return self._used

    @property
    def chunks_evicted(self) -> int:
        """Chunks evicted by this process so far."""
        return self._chunks_evicted

    def reserve(self, num_bytes: int) -> bool:
        """Whether a file fits. If so it is counted, and `written` or `give_back` must follow; if
        not, an eviction is started, and a later file may fit."""
        with self._lock:
            fits = self._used + num_bytes <= self._max_bytes
            if fits:
                self._used += num_bytes
                self._writing += num_bytes
            elif num_bytes <= self._max_bytes:  # evict nothing for a file that can never fit
                self._refused = max(self._refused, num_bytes)
            if self._refused or self._used > _HIGH * self._max_bytes:
                self._wake.set()
        return fits

    def written(self, num_bytes: int) -> None:
        """A reserved file was written."""
        with self._lock:
            self._writing -= num_bytes
            self._since += num_bytes
            if self._since > _STEP * self._max_bytes:
                self._wake.set()

    def give_back(self, num_bytes: int, *, disk_full: bool = False) -> None:
        """A reserved file was not written. disk_full: the disk has less space than the limit, so
        evict a tenth of the chunks."""
        with self._lock:
            self._writing -= num_bytes
            self._used -= num_bytes
            self._disk_full |= disk_full
            if disk_full:
                self._wake.set()

    def make_room(self) -> Evicted:
        """Scan the directory; remove excess chunks and the files of dead writers."""
        with self._alone():
            return self._make_room()

    def close(self) -> None:
        """Stop the thread. Removes nothing from the directory."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=5)

    # ---- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._stop.is_set():
                return
            with contextlib.suppress(OSError):
                before = self._recorded()
                with self._alone():
                    if not self._adopted(before):
                        self._make_room()
            self._stop.wait(0.01)  # however often it wakes, leave time for others

    def _adopted(self, before: tuple[int, float]) -> bool:
        """Whether another process has scanned while this one waited for the lock; then its result
        is used."""
        found = self._recorded()
        if found == before:
            return False
        with self._lock:
            if self._disk_full or self._refused:
                return False
            self._used, self._since = found[0] + self._since + self._writing, 0
            return self._used <= _HIGH * self._max_bytes

    def _make_room(self) -> Evicted:
        with self._lock:
            self._since = 0
            refused, self._refused = self._refused, 0
            disk_full, self._disk_full = self._disk_full, False
        chunks, temporaries = self._look()
        total = sum(chunk.num_bytes for chunk in chunks.values())
        excess = 0.0
        if disk_full:
            excess = total - _LOW * min(total, self._max_bytes)
        elif total + refused > _HIGH * self._max_bytes:
            excess = total + refused - _LOW * self._max_bytes
        evicted = self._evict(chunks, excess)
        total -= evicted.num_bytes
        with self._lock:
            # Files written meanwhile may be counted twice, but are never missed.
            self._used = total + self._since + self._writing
            self._chunks_evicted += evicted.chunks
        self._record(total)
        return evicted._replace(temporaries=temporaries)

    # ---- the lock file ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock, if locks work here."""
        descriptor = self._folder.open_file(LOCK, os.O_CREAT | os.O_RDWR)
        try:
            while not self._stop.is_set():
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._stop.wait(0.02)
                except OSError:
                    break
            yield
        finally:
            os.close(descriptor)

    def _record(self, total: int) -> None:
        """One write of fixed length, so that no process reads a partial record."""
        content = json.dumps([total, time.time()]).ljust(_RECORD_BYTES).encode()
        with contextlib.suppress(OSError):
            descriptor = self._folder.open_file(LOCK, os.O_RDWR)
            with open(descriptor, "r+b", buffering=0) as file:
                file.write(content)
                file.truncate(len(content))

    def _recorded(self) -> tuple[int, float]:
        """The last scan's result and time; zeros if it can't be read."""
        try:
            used, at = json.loads(self._folder.read_bytes(LOCK, _RECORD_BYTES))
            return int(used), float(at)
        except (OSError, ValueError, TypeError):
            return 0, 0.0

    # ---- scan and eviction ----------------------------------------------------------------

    def _look(self) -> tuple[dict[tuple[str, Key], _Chunk], int]:
        """All chunks, by namespace and key, and the number of abandoned files removed. Files with
        names that no engine of ours makes are left alone."""
        chunks: dict[tuple[str, Key], _Chunk] = {}
        abandoned = foreign = 0
        for namespace in _folders(self._folder.path):
            if not is_namespace(namespace.name):
                foreign += 1
                continue
            abandoned += sum(map(_swept, _files(namespace)))
            for folder in _folders(namespace):
                for entry in _files(folder):
                    key = key_of(entry.name)
                    if key is None or not entry.name.startswith(folder.name):
                        abandoned += _swept(entry)
                        continue
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        chunk = chunks.setdefault((namespace.name, key), _Chunk())
                        chunk.paths.append(entry.path)
                        chunk.num_bytes += status.st_size
                        chunk.used_at = max(chunk.used_at, status.st_mtime)
        self._mention(foreign + sum(entry.name != LOCK for entry in _files(self._folder.path)))
        return chunks, abandoned

    def _mention(self, foreign: int) -> None:
        """Log, once, that the folder holds what is not ours."""
        if foreign and not self._mentioned:
            self._mentioned = True
            logger.warning(
                "%s holds %d files or folders that are not disagg's; they are left alone, and do "
                "not count towards its limit",
                self._folder.path,
                foreign,
            )

    def _evict(self, chunks: dict[tuple[str, Key], _Chunk], num_bytes: float) -> Evicted:
        """Remove the least recently used chunks, until so many bytes are free."""
        removed: dict[str, list[Key]] = {}
        freed = 0
        if num_bytes > 0:
            for (namespace, key), chunk in sorted(chunks.items(), key=lambda c: c[1].used_at):
                if freed >= num_bytes:
                    break
                for path in chunk.paths:
                    _unlink(path)
                freed += chunk.num_bytes
                removed.setdefault(namespace, []).append(key)
        for namespace, keys in removed.items():
            if self._on_removed is not None:
                self._on_removed(namespace, keys)
        return Evicted(sum(map(len, removed.values())), freed, 0)


def _folders(parent: os.PathLike[str]) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(parent) if entry.is_dir(follow_symlinks=False)]


def _files(parent: os.PathLike[str]) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(parent) if entry.is_file(follow_symlinks=False)]


def _entries(parent: os.PathLike[str]) -> list[os.DirEntry[str]]:
    """A folder's entries; none if it is gone or can't be read."""
    try:
        with os.scandir(parent) as entries:
            return list(entries)
    except OSError:
        return []


def _swept(entry: os.DirEntry[str]) -> bool:
    """Remove an unfinished file of ours whose writer is dead, or is unknown here and inactive for
    an hour."""
    writer = writer_of(entry.name)
    if writer is None and not is_unfinished(entry.name):
        return False
    dead = None if writer is None else process.is_dead(writer)
    if dead is None:
        try:
            dead = time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_S
        except OSError:
            return False
    return dead and _unlink(entry.path)


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
