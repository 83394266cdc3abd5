"""The size limit and the lifetime of objects in a store that has neither, such as S3.

A thread lists all objects below the prefix from time to time, and removes what was written longest
ago: what is older than the lifetime, and what exceeds the limit, until a tenth of it is free. All
namespaces count. It also does so after this process wrote a fiftieth of the limit. Between sweeps
several engines may exceed the limit by what they write meanwhile. If no sweep succeeds, this
process stops writing after a tenth of the limit.

Any number of engines may sweep at once. All remove the same objects first, so that not more is
removed than by one. All ranks' objects of a chunk are removed together, as the chunk is useless
without one of them. Objects whose names no engine of ours makes are left alone.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.safe_logging import LimitedLog
from disagg.store.base import Key
from disagg.store.directory_files import key_of
from disagg.store.fingerprint import is_namespace
from disagg.store.objects.base import ObjectStore, StoreError

logger = logging.getLogger(__name__)

_LOW, _STEP, _UNSWEPT = 0.9, 0.02, 0.1
_INTERVAL_S, _SOON_S = 300.0, 2.0

OnRemoved = Callable[[str, list[Key]], None]
"""(namespace, keys): this process has removed these chunks. Called by the sweeping thread;
must not raise."""


@dataclass(slots=True)
class _Chunk:
    """All ranks' objects of a key."""

    names: list[str] = field(default_factory=list)
    num_bytes: int = 0
    changed_at: float = 0.0


class Swept(NamedTuple):
    """The result of one sweep. left: bytes of chunks that stay."""

    chunks: int
    num_bytes: int
    left: int


class ObjectSpace:
    """One per writing engine. Any thread may call `reserve`. interval_s: between sweeps, on
    average. Without a limit and a lifetime there is nothing to do: raises `ValueError`."""

    def __init__(
        self,
        store: ObjectStore,
        max_bytes: int | None,
        ttl_s: float | None,
        on_removed: OnRemoved | None = None,
        *,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        if max_bytes is None and ttl_s is None:
            raise ValueError("neither a limit nor a lifetime")
        self._store, self._max_bytes, self._ttl_s = store, max_bytes, ttl_s
        self._on_removed, self._interval_s = on_removed, interval_s
        self._lock = threading.Lock()
        self._since = 0  # reserved since the last sweep that succeeded began
        self._log = LimitedLog(logger, 1)
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-object-space", daemon=True)
        self._thread.start()

    def reserve(self, num_bytes: int) -> bool:
        """Whether an object of this size may be written, which is counted."""
        if self._max_bytes is None:
            return True
        with self._lock:
            fits = self._since + num_bytes <= _UNSWEPT * self._max_bytes
            if fits:
                self._since += num_bytes
            if not fits or self._since > _STEP * self._max_bytes:
                self._wake.set()
        return fits

    def sweep(self) -> Swept:
        """List the objects and remove what is too old or too much. Raises `StoreError`."""
        with self._lock:
            since = self._since
        chunks = self._chunks()
        total = sum(chunk.num_bytes for chunk in chunks.values())
        excess = 0.0
        if self._max_bytes is not None and total > self._max_bytes * (_LOW + 1) / 2:
            excess = total - _LOW * self._max_bytes
        oldest = 0.0 if self._ttl_s is None else time.time() - self._ttl_s
        removed: dict[str, list[Key]] = {}
        names: list[str] = []
        freed = 0
        for (namespace, key), chunk in sorted(chunks.items(), key=lambda one: one[1].changed_at):
            if freed >= excess and chunk.changed_at >= oldest:
                break
            freed += chunk.num_bytes
            names += chunk.names
            removed.setdefault(namespace, []).append(key)
        self._store.remove(names)
        with self._lock:
            self._since -= since
        for namespace, keys in removed.items():
            if self._on_removed is not None:
                self._on_removed(namespace, keys)
        return Swept(sum(map(len, removed.values())), freed, total - freed)

    def close(self) -> None:
        """Stop the thread; does not wait for a sweep. Removes nothing."""
        self._stop.set()
        self._wake.set()

    # ---- inside ----------------------------------------------------------------------------

    def _run(self) -> None:
        wait = _SOON_S + random.uniform(0, self._interval_s / 4)
        while not self._stop.is_set():
            if self._wake.wait(wait):
                # Engines that fill a store together need not all list it at once.
                self._stop.wait(random.uniform(0, min(_SOON_S, self._interval_s)))
            self._wake.clear()
            if self._stop.is_set():
                return
            wait = self._interval_s * random.uniform(0.5, 1.5)
            try:
                self.sweep()
            except StoreError as error:
                self._log.warning(
                    "%s was not swept (%s: %s)", self._store.place, error.reason, error
                )
                self._stop.wait(min(_SOON_S, self._interval_s))

    def _chunks(self) -> dict[tuple[str, Key], _Chunk]:
        chunks: dict[tuple[str, Key], _Chunk] = {}
        for entry in self._store.entries():
            namespace, _, rest = entry.name.partition("/")
            folder, _, name = rest.partition("/")
            key = key_of(name)
            if key is None or len(folder) != 2 or not name.startswith(folder):
                continue
            if not is_namespace(namespace):
                continue
            chunk = chunks.setdefault((namespace, key), _Chunk())
            chunk.names.append(entry.name)
            chunk.num_bytes += entry.num_bytes
            chunk.changed_at = max(chunk.changed_at, entry.changed_at)
        return chunks
