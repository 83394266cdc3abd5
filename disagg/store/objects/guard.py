"""A circuit breaker: while a store is out, callers hear it at once instead of waiting for it.

After some failures in a row every call fails at once, for some seconds. Then one call tries the
store, while the others still fail: its result decides.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from disagg.store.objects.base import FULL, UNREACHABLE, Entry, ObjectStore, StoreError

logger = logging.getLogger(__name__)

_FAILURES = 3
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 15.0
# The store answered, so it is not out.
_ANSWERS = frozenset({FULL, "size", "unsupported", "refused"})
T = TypeVar("T")


class Breaker:
    """failures: in a row, before it opens. pause_s: how long then; doubled at each failed try, up
    to 15 seconds. clock: for tests."""

    def __init__(
        self,
        place: str,
        *,
        failures: int = _FAILURES,
        pause_s: float = _PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place, self._failures, self._pause_s = place, failures, pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = self._opened = 0
        self._until: float | None = None
        self._reason = ""

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once."""
        return self._until is not None

    def run(self, call: Callable[[], T]) -> T:
        """The call's result. Raises its `StoreError`; `unreachable` at once while open."""
        self._admit()
        try:
            result = call()
        except StoreError as error:
            if error.reason in _ANSWERS:
                self._worked()
            else:
                self._did_fail(error)
            raise
        except BaseException:
            self._worked()  # not the store's failure; another call must be admitted
            raise
        self._worked()
        return result

    def _admit(self) -> None:
        with self._lock:
            if self._until is None:
                return
            if self._clock() < self._until:
                raise StoreError(UNREACHABLE, f"{self._place} does not answer ({self._reason})")
            # This call tries; the others wait for its result for one more pause at most.
            self._until = self._clock() + self._pause()

    def _worked(self) -> None:
        with self._lock:
            again = self._until is not None
            self._failed = self._opened = 0
            self._until = None
        if again:
            logger.warning("%s answers again", self._place)

    def _did_fail(self, error: StoreError) -> None:
        with self._lock:
            self._failed += 1
            self._reason = error.reason
            if self._failed < self._failures:
                return
            first = self._until is None
            self._until = self._clock() + self._pause()
            self._opened += 1
        if first:
            logger.warning(
                "%s is out (%s: %s): until it is back, blocks are computed, and not kept there",
                self._place,
                error.reason,
                error,
            )

    def _pause(self) -> float:
        pause: float = min(self._pause_s * 2.0**self._opened, _LONGEST_PAUSE_S)
        return pause * random.uniform(0.8, 1.2)  # engines need not all try at once


class GuardedStore:
    """A store behind a breaker."""

    def __init__(self, store: ObjectStore, breaker: Breaker | None = None) -> None:
        self.place, self.batch = store.place, store.batch
        self._store = store
        self.breaker = breaker or Breaker(store.place)

    def put(self, name: str, pieces: Sequence[memoryview], *, only_new: bool = False) -> bool:
        return self.breaker.run(lambda: self._store.put(name, pieces, only_new=only_new))

    def get(self, name: str, buffers: Sequence[memoryview]) -> int | None:
        return self.breaker.run(lambda: self._store.get(name, buffers))

    def fetch(self, name: str, limit: int) -> bytes | None:
        return self.breaker.run(lambda: self._store.fetch(name, limit))

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        return self.breaker.run(lambda: self._store.sizes(names))

    def touch(self, names: Sequence[str]) -> None:
        self.breaker.run(lambda: self._store.touch(names))

    def remove(self, names: Sequence[str]) -> None:
        self.breaker.run(lambda: self._store.remove(names))

    def entries(self) -> Iterator[Entry]:
        """As a list: a listing is one call."""
        return iter(self.breaker.run(lambda: [*self._store.entries()]))

    def unlimited(self) -> str:
        return self.breaker.run(self._store.unlimited)

    def close(self) -> None:
        self._store.close()
