"""Threads that help the one that calls them, each time on other cores than its own.

On virtual machines a thread that is woken after a pause was seen to run beside its waker, where
both share a core for milliseconds while another one idles; most likely since a core that sleeps
there looks like one that was taken away. So helpers are kept off the caller's core, if there is
another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_current_core: Any = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def cores() -> int:
    """How many this thread may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class HelperThreads:
    """Up to `most` threads. Safe for use from any thread."""

    def __init__(self, most: int, name: str) -> None:
        self._threads: list[int] = []
        self._pool = ThreadPoolExecutor(most, name, initializer=self._begins)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run it beside the caller."""
        self._keep_off()
        return self._pool.submit(work)

    def close(self) -> None:
        """Begin nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begins(self) -> None:
        self._threads.append(threading.get_native_id())

    def _keep_off(self) -> None:
        if _current_core is None or cores() < 2:
            return
        others = os.sched_getaffinity(0) - {_current_core()}
        for thread in self._threads:
            with contextlib.suppress(OSError):  # the cores that a process may use can change
                os.sched_setaffinity(thread, others)
