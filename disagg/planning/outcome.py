"""What a simulated load got: percentiles, the share that met the targets, how busy engines were.

Only counts what a simulation told it; must never judge which numbers of engines are right.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Targets:
    """A request meets them when its first token came within `ttft` seconds, and the mean time
    between its tokens is at most `itl`. `share`: of the requests that must."""

    ttft: float
    itl: float
    share: float

    def misses_allowed(self, requests: int) -> int:
        """Requests that may miss them. Rounded first: 10 % of 30 are three, not 2.9999…"""
        return int(round((1 - self.share) * requests, 6))


class Gaps:
    """All times between two tokens, kept as runs of evenly spaced ones."""

    def __init__(self) -> None:
        self._low, self._high, self._count = array("d"), array("d"), array("d")

    def add(self, first_s: float, last_s: float, count: int) -> None:
        """So many times, from one to another in even steps; they never shrink in a run."""
        self._low.append(first_s)
        self._high.append(last_s)
        self._count.append(count)

    def quantile(self, share: float) -> float:
        """The time that this share of all does not exceed; NaN if there are none."""
        if not self._count:
            return float("nan")
        low, high = np.asarray(self._low), np.asarray(self._high)
        count = np.asarray(self._count)
        width = np.maximum(high - low, 1e-12)
        wanted = share * count.sum()
        least, most = float(low.min()), float(high.max())
        for _ in range(50):
            middle = (least + most) / 2
            below = (count * np.clip((middle - low) / width, 0.0, 1.0)).sum()
            if below < wanted:
                least = middle
            else:
                most = middle
        return most


@dataclass(frozen=True)
class SimulationOutcome:
    """One simulated run with so many engines. Times in seconds, of requests that were served."""

    prefill: int
    decode: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    requests: int
    missed: int  # one of the targets or both
    late_first: int  # missed the first target
    slow_next: int  # and the second
    refused: int  # fit into no engine's cache
    # Shares of the time in which requests came, NaN if all came at once.
    prefill_busy: float
    decode_busy: float
    decode_batch: float  # sequences in a step, mean over the steps' time

    @property
    def share(self) -> float:
        """Of the requests that met both targets."""
        return 1 - self.missed / self.requests

    def meets(self, targets: Targets) -> bool:
        """Whether enough of them did."""
        return self.missed <= targets.misses_allowed(self.requests)

    def as_json(self) -> dict[str, Any]:
        """The figures, None for what is not a number."""
        figures = {**vars(self), "share": self.share}
        return {name: None if value != value else value for name, value in figures.items()}


def missed(ttft: Floats, between: Floats, targets: Targets) -> tuple[npt.NDArray[np.bool_], ...]:
    """Which requests missed the first target, which the second. NaN as the time to the first
    token: refused, which misses both; NaN between tokens: an answer of one token."""
    refused = np.isnan(ttft)
    return refused | (ttft > targets.ttft), refused | (between > targets.itl)
