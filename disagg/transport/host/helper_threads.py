"""Helper threads that never run on the core of the thread that calls them.

Observed on virtual machines: a thread that wakes after a pause runs on its waker's core, and both
share it for milliseconds while another core idles; probably because a sleeping virtual core looks
unavailable. So helpers are kept off the caller's core, if there is another core.
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
    """How many cores this thread may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class HelperThreads:
    """Up to `most` threads. Safe for use from any thread."""

    def __init__(self, most: int, name: str) -> None:
        self._threads: list[int] = []
        self._pool = ThreadPoolExecutor(most, name, initializer=self._begins)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run the work in a helper."""
        self._keep_off()
        return self._pool.submit(work)

    def close(self) -> None:
        """Cancel queued work; none is started after this."""
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
