"""Threads that share one fetch's copies, on other cores than the thread that calls them.

Observed on virtual machines: a thread that wakes after a pause runs on its waker's core, and both
share it for milliseconds while another core idles; probably because a sleeping virtual core looks
unavailable. So helpers are kept off the caller's core, if there is another core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")

# One core does not fill the memory's bandwidth; more than a few take it from the model.
_MOST = 4
THREAD_BYTES = 8 << 20
"""Fewer bytes than this are not worth another thread."""

_current_core: Any = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def cores() -> int:
    """How many cores this thread may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class HelperThreads:
    """`together`: how many threads share one work, the caller's among them. Safe for use from any
    thread."""

    def __init__(self, name: str) -> None:
        self.together = min(_MOST, cores())
        self._threads: list[int] = []
        self._pool = ThreadPoolExecutor(self.together - 1 or 1, name, initializer=self._begins)

    def share(self, parts: Sequence[T], work: Callable[[T], object], threads: int) -> None:
        """Do the work for each part, in this thread and `threads` - 1 helpers.

        When it returns or raises, nobody works any more. After an error no part is begun.
        """
        left = iter(parts)

        def run() -> None:
            try:
                for part in left:
                    work(part)
            finally:
                deque(left, 0)

        helped = []
        for _ in range(threads - 1):
            self._keep_off()
            with contextlib.suppress(RuntimeError):  # closed: this thread does all
                helped.append(self._pool.submit(run))
        try:
            run()
        finally:
            started = [future for future in helped if not future.cancel()]
            wait(started)
        for future in started:
            future.result()

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
