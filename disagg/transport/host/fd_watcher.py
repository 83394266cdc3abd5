"""Waits for many file descriptors in one thread, which sleeps in the kernel until one has news."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class FdWatcher:
    """Calls back once, in its own thread, when a descriptor can be read or has ended.

    The thread is started with the first descriptor. A descriptor must stay open until it was
    removed or its callback has run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._wake: tuple[int, int] | None = None
        self._closed = False

    def add(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Begin to watch it."""
        with self._lock:
            if self._closed:
                return
            self._callbacks[descriptor] = callback
            if self._wake is None:
                self._wake = os.pipe()
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
        self._stir()

    def remove(self, descriptor: int) -> bool:
        """Stop watching it; False if its callback runs, has run, or it was never added."""
        with self._lock:
            found = self._callbacks.pop(descriptor, None) is not None
        # The thread looks at a copy of the list: without this it would go on with this descriptor.
        self._stir()
        return found

    def close(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            self._closed = True
            self._callbacks.clear()
        self._stir()

    def _stir(self) -> None:
        with self._lock:
            if self._wake is not None:
                with contextlib.suppress(OSError):
                    os.write(self._wake[1], b"!")

    def _run(self) -> None:
        assert self._wake is not None
        reading, writing = self._wake
        while not self._closed:
            poll = select.poll()
            poll.register(reading, select.POLLIN)
            with self._lock:
                watched = dict(self._callbacks)
                for descriptor in watched:
                    poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor == reading:
                    os.read(reading, 4096)
                else:
                    self._call(descriptor, watched[descriptor])
        with self._lock:
            self._wake = None
        os.close(reading)
        os.close(writing)

    def _call(self, descriptor: int, callback: Callable[[], None]) -> None:
        with self._lock:
            # Removed meanwhile, its number may be another's by now.
            if self._callbacks.get(descriptor) is not callback:
                return
            del self._callbacks[descriptor]
        try:
            callback()
        except Exception:
            logger.exception("%s: what follows an end failed", self._name)
