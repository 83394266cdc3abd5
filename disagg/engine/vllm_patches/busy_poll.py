"""Switch: vLLM's processes sleep for a moment instead of spinning, where cores are few.

For a second after each message a vLLM worker calls `os.sched_yield` in a loop. On a GPU host
that spends a core nobody misses. Where the same cores must compute, it is worse than a waste:
on two cores and Linux 6.18, requests stalled for tenths of a second, up to seconds, and no longer
did when the loop slept 50 us instead (docs/decisions/0001). Why is not proven; that kernel's
scheduler is thought to charge each yield to the process that makes it.
"""

from __future__ import annotations

import os
import time

from disagg.engine.vllm_patches.patching import Patch

POLL_SLEEP_ENV = "DISAGG_POLL_SLEEP_US"
POLL_SLEEP_US = "50"


def sleep_instead_of_yield() -> None:
    """Have `os.sched_yield` sleep as many microseconds as the environment says."""
    seconds = float(os.environ[POLL_SLEEP_ENV]) / 1e6
    if seconds > 0:

        def nap() -> None:
            time.sleep(seconds)

        os.sched_yield = nap


PATCH = Patch(
    "busy_poll",
    fault="vLLM's processes spin while they wait, which takes a core from the model on a CPU.",
    versions="",  # of vLLM's it needs no more than that it waits by os.sched_yield
    report="https://github.com/vllm-project/vllm/pull/28053 removed most of the spinning",
    until="vLLM's readers no longer spin for a second after each message",
    apply=sleep_instead_of_yield,
    when=lambda: bool(os.environ.get(POLL_SLEEP_ENV)) and hasattr(os, "sched_yield"),
)
