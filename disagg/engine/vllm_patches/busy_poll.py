"""Lets vLLM's processes sleep a moment instead of spinning, where cores are few.

For a second after each message a vLLM worker calls `os.sched_yield` in a loop. On a GPU host
that spends a core nobody misses. Where the same cores must compute, it is worse than a waste:
on two cores and Linux 6.18, requests stalled for tenths of a second, up to seconds, and no longer
did when the loop slept 50 us instead (docs/decisions/0001). Why is not proven; that kernel's
scheduler is thought to charge each yield to the process that makes it.
"""

from __future__ import annotations

import os
import time

POLL_SLEEP_ENV = "DISAGG_POLL_SLEEP_US"
POLL_SLEEP_US = "50"


def install() -> None:
    """If the environment says so, `os.sched_yield` sleeps as long, in microseconds."""
    try:
        seconds = float(os.environ.get(POLL_SLEEP_ENV, "0")) / 1e6
    except ValueError:
        return  # a plugin that raises would end the engine
    if seconds > 0 and hasattr(os, "sched_yield"):

        def nap() -> None:
            time.sleep(seconds)

        os.sched_yield = nap
