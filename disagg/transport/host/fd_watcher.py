"""Watches many file descriptors in one thread, which sleeps until one of them is readable."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class FdWatcher:
    """Calls a callback once, in its own thread, when a descriptor is readable or has ended.

    The first `add` starts the thread. A descriptor must stay open until it is removed or its
    callback has run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._wake: tuple[int, int] | None = None
        self._closed = False

    def add(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Start to watch a descriptor."""
        with self._lock:
            if self._closed:
                return
            self._callbacks[descriptor] = callback
            if self._wake is None:
                self._wake = os.pipe()
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
        self._wake_up()

    def remove(self, descriptor: int) -> bool:
        """Stop watching; False if the callback runs or has run, or the descriptor is unknown."""
        with self._lock:
            found = self._callbacks.pop(descriptor, None) is not None
        # The thread polls a copy of the list; wake it, or it would keep polling this descriptor.
        self._wake_up()
        return found

    def close(self) -> None:
        """Stop watching everything."""
        with self._lock:
            self._closed = True
            self._callbacks.clear()
        self._wake_up()

    def _wake_up(self) -> None:
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
            # It was removed meanwhile, and another file may have its number.
            if self._callbacks.get(descriptor) is not callback:
                return
            del self._callbacks[descriptor]
        try:
            callback()
        except Exception:
            logger.exception("%s: a callback failed", self._name)
