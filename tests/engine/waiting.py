"""Waiting with a deadline."""

from __future__ import annotations

import time
from typing import Any


def eventually(condition: Any, timeout: float = 15.0) -> bool:
    """Whether the condition holds before the deadline."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())
