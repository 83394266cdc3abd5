"""Lets vLLM's workers end when their engine process has died.

Two threads of a worker hear of it: the one that waits for that death, and the main one, which is
told by a flag. In vLLM 0.32 both then send on one ZeroMQ socket, to wake a reader that has woken.
Such sockets are for one thread at a time: of 199 workers two waited in `send` for ever, and kept
their memory. Where workers are forks of the engine process its streams waited too: as long as one
of them lives, vLLM's server takes that process for alive.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

Cancel = Callable[[Any], None]


def install() -> None:
    """In every process of vLLM's: workers may be forks of it."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.cancel = once(SpinCondition.cancel)  # type: ignore[method-assign]


def once(cancel: Cancel) -> Cancel:
    """vLLM's way to wake a reader for good, which does it once, whichever threads ask."""
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
