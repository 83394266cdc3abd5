"""The outcome of a simulated load: percentiles, the share that met the targets, engines' use.

It only counts. It must never decide which numbers of engines are right.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Targets:
    """A request meets the targets if its first token came within `ttft` seconds, and the mean time
    between its tokens is at most `itl` seconds. share: share of the requests that must."""

    ttft: float
    itl: float
    share: float

    def misses_allowed(self, requests: int) -> int:
        """Number of requests that may miss them. Rounded first: 10 % of 30 are 3, not 2.9999…"""
        return int(round((1 - self.share) * requests, 6))


class Gaps:
    """All times between two tokens, stored as runs of evenly spaced times."""

    def __init__(self) -> None:
        self._low, self._high, self._count = array("d"), array("d"), array("d")

    def add(self, first_s: float, last_s: float, count: int) -> None:
        """Add a run of `count` times, from `first_s` up to `last_s` in even steps."""
        self._low.append(first_s)
        self._high.append(last_s)
        self._count.append(count)

    def quantile(self, share: float) -> float:
        """The time that this share of all times does not exceed; NaN if there are no times."""
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
class FirstTokenParts:
    """What a first token of decode was made of: the mean seconds of each part, over the requests
    whose prompt a prefill engine computed. Their sum is the time from arrival to that token."""

    router: float  # the router, and what engines do for a request before it is in their queue
    prefill_queue: float
    prefill: float
    decode_queue: float
    handoff: float
    decode_step: float  # from the end of the handoff: the wait for a step, and that step


@dataclass(frozen=True)
class SimulationOutcome:
    """One simulated run. Times in seconds, of requests that were served."""

    prefill: int
    decode: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    requests: int
    missed: int  # requests that missed one target or both
    late_first: int  # requests that missed `ttft`
    slow_next: int  # requests that missed `itl`
    refused: int  # requests that fit into no engine's cache
    # Shares of the time until the last arrival; NaN if all requests came at once.
    prefill_busy: float
    decode_busy: float
    decode_batch: float  # sequences in a step, mean over the steps' time
    parts: FirstTokenParts | None  # None: prefill computed no prompt

    @property
    def share(self) -> float:
        """Share of the requests that met both targets."""
        return 1 - self.missed / self.requests

    def meets(self, targets: Targets) -> bool:
        """Whether enough requests met the targets."""
        return self.missed <= targets.misses_allowed(self.requests)

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values; NaN becomes None."""
        figures = {**asdict(self), "share": self.share}
        return {name: None if value != value else value for name, value in figures.items()}


def missed(ttft: Floats, between: Floats, targets: Targets) -> tuple[npt.NDArray[np.bool_], ...]:
    """Two masks of requests: those that missed `ttft`, and those that missed `itl`.

    `ttft` NaN: the request was refused, and misses both. `between` NaN: an answer of one token.
    """
    refused = np.isnan(ttft)
    return refused | (ttft > targets.ttft), refused | (between > targets.itl)
