"""One thread's memcpy, and what a load may add to the first token because of it."""

from __future__ import annotations

import statistics
import time

import numpy as np

# A load may add 1.5 times the bytes over memcpy's speed, and 15 ms.
_TIMES, _SLACK_S = 1.5, 0.015


def memcpy_speed() -> float:
    """Bytes per second of one thread between pages that are mapped."""
    source, target = np.ones(1 << 28, np.uint8), np.zeros(1 << 28, np.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - began)
    return len(source) / statistics.median(seconds)


def allowed_ms(num_bytes: int, speed: float) -> float:
    """The target for the excess over a prefix cache hit, for so many bytes."""
    return round((_TIMES * num_bytes / speed + _SLACK_S) * 1000, 1)
