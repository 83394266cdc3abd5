"""A namespace's record of how its engines hash, in an object store; see `fingerprint`."""

from __future__ import annotations

import logging
import threading

from disagg.errors import ConfigError
from disagg.store.fingerprint import RECORD, Fingerprint, hashing_in, hashing_problem, record_of
from disagg.store.objects.base import ObjectStore, StoreError

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 16


class Claim:
    """A store may be out when an engine starts, and the engine starts all the same: every chunk has
    the digest of its writer's hashing, so that none is read that another hashing made. Then the
    first write claims the namespace."""

    def __init__(self, store: ObjectStore, fingerprint: Fingerprint) -> None:
        self._store, self._fingerprint = store, fingerprint
        self._lock = threading.Lock()
        self._done = False
        self._refused = ""

    def at_start(self) -> None:
        """Raises `ConfigError` if engines that hash differently use the namespace."""
        try:
            self._claim()
        except StoreError as error:
            logger.warning(
                "%s is out at start (%s: %s): until it is back, blocks are computed, and not kept "
                "there",
                self._store.place,
                error.reason,
                error,
            )

    def before_write(self) -> None:
        """Raises `StoreError` while the namespace is not this engine's to write to."""
        if self._done:
            return
        with self._lock:
            if self._refused:
                raise StoreError("hashing", self._refused)
            if self._done:
                return
            try:
                self._claim()
            except ConfigError as error:
                self._refused = str(error)
                logger.error("nothing is written to %s: %s", self._store.place, error)
                raise StoreError("hashing", self._refused) from error

    def _claim(self) -> None:
        name = f"{self._fingerprint.namespace}/{RECORD}"
        found = self._found(name)
        if found is None:
            record = memoryview(record_of(self._fingerprint))
            if not self._store.put(name, [record], only_new=True):
                found = self._found(name)
                if found is None:  # damaged, and it can't be replaced otherwise
                    self._store.put(name, [record])
        if found is not None:
            place = f"{self._store.place}/{self._fingerprint.namespace}"
            if problem := hashing_problem(self._fingerprint, found, place):
                raise ConfigError(problem)
        self._done = True

    def _found(self, name: str) -> dict[str, str] | None:
        content = self._store.fetch(name, _MOST_BYTES)
        return None if content is None else hashing_in(content)
