"""What first tokens of `disagg bench serve` were made of: queues, prefill, handoff, decode's step.

All parts are means over a run's requests that were handed off, from the histograms of the router
and of the engines. They tell of no single request. vLLM's own time in the queue is not used: it
begins when the engine's loop takes a request, which is after the step that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from disagg.router.telemetry.engine_metrics import samples

ROUTER = "disagg_router_"
OF_PREFILL, OF_DECODE = "vllm:request_prefill_time_seconds", "disagg_handoff_seconds"
Sums = Mapping[str, float]
"""`NAME_sum` and `NAME_count` of histograms, summed over all sources."""


@dataclass(frozen=True)
class FirstTokenParts:
    """Seconds. `router_queue`: the wait for a seat. `prefill_queue`: of the prefill leg, what is
    before the engine's first step. `decode_step`: from the end of the handoff to the first bytes,
    with the wait for the step."""

    router_queue: float
    prefill_queue: float
    prefill: float
    handoff: float
    decode_step: float


def sums(text: Iterable[str], prefix: str) -> dict[str, float]:
    """The sums and counts of these expositions' histograms whose names begin so."""
    found: dict[str, float] = {}
    for one in text:
        for name, _, value in samples(one, prefix):
            if name.endswith(("_sum", "_count")):
                found[name] = found.get(name, 0.0) + value
    return found


def growth(before: Sums, after: Sums) -> dict[str, float]:
    """What was added between two readings."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def parts(router: Sums, prefill: Sums, decode: Sums) -> FirstTokenParts | None:
    """Of a run: the sums of its router, and the growth of those of its prefill and its decode
    engines. None if nothing was handed off."""
    leg, then = (_mean(router, f"{ROUTER}{name}_seconds") for name in ("prefill", "handoff"))
    computes, fetches = _mean(prefill, OF_PREFILL), _mean(decode, OF_DECODE)
    if leg is None or then is None or computes is None:
        return None
    answered = router.get(f"{ROUTER}ttft_seconds_count", 0.0)
    # Only requests that wait are in the histogram. A decode leg that follows prefill fetches early.
    waited = router.get(f"{ROUTER}queue_seconds_sum", 0.0) / max(1.0, answered)
    computes, fetches = min(computes, leg), min(fetches or 0.0, then)
    return FirstTokenParts(waited, leg - computes, computes, fetches, then - fetches)


def _mean(known: Sums, name: str) -> float | None:
    count = known.get(f"{name}_count", 0.0)
    return known[f"{name}_sum"] / count if count > 0 else None
