"""Waiting with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[..., object], timeout: float = 15.0) -> bool:
    """Whether the condition holds within so many seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())
