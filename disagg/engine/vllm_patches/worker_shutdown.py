"""Mends vLLM workers that do not end when their engine process has died.

Two threads of a worker notice that death: one waits for it, and the main thread sees a flag. Both
then send on one ZeroMQ socket, to wake a reader that is awake already. A ZeroMQ
socket is for one thread at a time: 2 of 199 workers waited in `send` for ever and kept their
memory. Where workers are forks of the engine process, its streams waited too: while a fork lives,
vLLM's server takes the engine process for alive.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from disagg.engine.vllm_patches.patching import Patch

Cancel = Callable[[Any], None]


def cancel_once() -> None:
    """Change vLLM's wake-up call, in every process: a worker may be a fork of any."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.cancel = once(SpinCondition.cancel)  # type: ignore[method-assign]


def once(cancel: Cancel) -> Cancel:
    """vLLM's wake-up of a reader at the end. It is done once, whichever threads ask for it."""
    if hasattr(cancel, "is_once"):
        return cancel  # plugins may be loaded twice
    lock = threading.Lock()

    @functools.wraps(cancel)
    def cancels(condition: Any) -> None:
        with lock:
            if not getattr(condition, "is_cancelled", False):
                condition.is_cancelled = True
                cancel(condition)

    cancels.is_once = True  # type: ignore[attr-defined]
    return cancels


PATCH = Patch(
    "worker_shutdown",
    fault="a worker may stay for ever, with its memory, when its engine process has died.",
    versions=">=0.29,<0.34",
    report="none that we know of; related: https://github.com/vllm-project/vllm/issues/56251",
    until="one thread alone sends on the socket of SpinCondition",
    apply=cancel_once,
)
