"""Switch: vLLM's processes sleep for a moment instead of spinning, where cores are few.

For a second after each message a vLLM worker calls `os.sched_yield` in a loop. On a GPU host
that spends a core nobody misses. Where the same cores must compute, it is worse than a waste:
on two cores and Linux 6.18, requests stalled for tenths of a second, up to seconds, and no longer
did when the loop slept 50 us instead (docs/decisions/0001). Why is not proven; that kernel's
scheduler is thought to charge each yield to the process that makes it.

A worker that waits longer than between two steps of a busy engine sleeps longer each time. What it
waits for then is a new request, or a step without one.
"""

from __future__ import annotations

import os
import threading
import time

from disagg.engine.vllm_patches.patching import Patch

POLL_SLEEP_ENV = "DISAGG_POLL_SLEEP_US"
POLL_SLEEP_US = "50"


_SHARE, _LONGEST_S = 1 / 8, 1e-3
"""A worker's sleep, as a share of its wait so far, and at most."""


def sleep_instead_of_yield() -> None:
    """Have `os.sched_yield` sleep as many microseconds as the environment says."""
    seconds = _seconds()
    if seconds > 0:

        def nap() -> None:
            time.sleep(seconds)

        os.sched_yield = nap


def sleep_longer_and_longer() -> None:
    """As `sleep_instead_of_yield`, in a worker."""
    seconds = _seconds()
    if seconds > 0:
        os.sched_yield = Naps(seconds)


class Naps:
    """Sleeps of so many seconds, longer ones in a long wait. Safe for use from any thread."""

    def __init__(self, seconds: float) -> None:
        self._least, self._of_thread = seconds, threading.local()

    def __call__(self) -> None:
        mine, now = self._of_thread, time.monotonic()
        # A loop that waits is back at once.
        if now > getattr(mine, "woke", 0.0) + self._least:
            mine.began = now
        time.sleep(max(self._least, min((now - mine.began) * _SHARE, _LONGEST_S)))
        mine.woke = time.monotonic()


def _seconds() -> float:
    return float(os.environ[POLL_SLEEP_ENV]) / 1e6


def _is_asked() -> bool:
    return bool(os.environ.get(POLL_SLEEP_ENV)) and hasattr(os, "sched_yield")


PATCH = Patch(
    "busy_poll",
    fault="vLLM's processes spin while they wait, which takes a core from the model on a CPU.",
    versions="",  # of vLLM's it needs no more than that it waits by os.sched_yield
    report="https://github.com/vllm-project/vllm/pull/28053 removed most of the spinning",
    until="vLLM's readers no longer spin for a second after each message",
    apply=sleep_instead_of_yield,
    when=_is_asked,
)
IN_WORKERS = Patch(
    "busy_poll_of_workers",
    fault="idle workers look for work 15,000 times a second.",
    versions=PATCH.versions,
    report=PATCH.report,
    until=PATCH.until,
    apply=sleep_longer_and_longer,
    when=_is_asked,
    in_workers=True,
)
