"""The figures of `disagg bench serve`: percentiles, targets met, goodput, ratios.

Pure functions. A failed request meets no target, and its times do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from disagg.bench.serve.conversations import TokenCounts
from disagg.bench.serve.load import Batch, RequestOutcome
from disagg.bench.serve.parts import FirstTokenParts
from disagg.bench.serve.ways import COLOCATED

# Goodput is the rate at which at least this share of the requests meets both targets.
GOOD_SHARE = 0.9
# Targets: between tokens, colocated over apart; first token, apart over colocated.
GAP_AIM, FIRST_AIM = 2.0, 1.05


@dataclass(frozen=True)
class Targets:
    """Seconds to the first token, and between tokens."""

    first_s: float
    gap_s: float

    def met_on_average(self, outcome: RequestOutcome) -> bool:
        """Whether the first token and the mean gap met their targets."""
        return self._first(outcome) and outcome.mean_gap_s <= self.gap_s

    def met_throughout(self, outcome: RequestOutcome) -> bool:
        """Whether the first token and every gap met their targets."""
        return self._first(outcome) and max(outcome.gaps, default=0.0) <= self.gap_s

    def _first(self, outcome: RequestOutcome) -> bool:
        return outcome.problem is None and outcome.first_s <= self.first_s


@dataclass(frozen=True)
class Run:
    """One load on one way to serve. `rate`: as configured, None for a trace.

    `offered`: requests per second that were sent; a Poisson process keeps its rate on average only.
    `handed_over`: prompts whose blocks arrived at decode engines, by their own count. `tokens`: of
    conversations. `parts`: of the first tokens that were handed off.
    """

    way: str
    rate: float | None
    offered: float
    batch: Batch
    handed_over: int = 0
    tokens: TokenCounts | None = None
    parts: FirstTokenParts | None = None


def percentile(values: Iterable[float], share: float) -> float | None:
    """Nearest rank: the smallest value that `share` of all values do not exceed. None if empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def row(run: Run, targets: Targets) -> dict[str, Any]:
    """The figures of one run; times in ms.

    `tokens`: see `TokenCounts`. `good_rate`: requests per second of the run that met both targets;
    conversations send no more requests while they wait, so their goodput is a rate that came.
    """
    outcomes = run.batch.outcomes
    right = [outcome for outcome in outcomes if outcome.problem is None]
    gaps = [gap for outcome in right for gap in outcome.gaps]
    tokens = sum(outcome.ask.output_tokens for outcome in right)
    lengths = sorted({outcome.ask.prompt_tokens for outcome in outcomes})
    return {
        "way": run.way,
        "rate": run.rate,
        "offered": round(run.offered, 3),
        "requests": len(outcomes),
        "failed": len(outcomes) - len(right),
        "handed_over": run.handed_over,
        "seconds": round(run.batch.wall_s, 1),
        "ttft_ms": _spread(outcome.first_s for outcome in right),
        "ttft_ms_by_prompt": {
            length: _spread(o.first_s for o in right if o.ask.prompt_tokens == length)
            for length in lengths
        },
        "itl_ms": _spread(gaps) | {"longest": _ms(max(gaps, default=None))},
        "tokens_per_chunk": round(tokens / max(1, len(gaps) + len(right)), 3),
        "met": {
            "on_average": _share(targets.met_on_average(o) for o in outcomes),
            "throughout": _share(targets.met_throughout(o) for o in outcomes),
        },
        "good_rate": {
            "on_average": _rate(map(targets.met_on_average, outcomes), run),
            "throughout": _rate(map(targets.met_throughout, outcomes), run),
        },
        "tokens": _tokens(run.tokens),
        "parts_ms": _parts(run.parts),
        "load": {
            "late_p99_ms": _ms(percentile((o.late_s for o in outcomes), 0.99)),
            "cpu_share": round(run.batch.cpu_s / run.batch.wall_s, 3),
        },
    }


def _rate(met: Iterable[bool], run: Run) -> float:
    return round(sum(met) / run.batch.wall_s, 3)


def _tokens(counts: TokenCounts | None) -> dict[str, float] | None:
    return None if counts is None else {**asdict(counts), "over": round(counts.over, 4)}


def _parts(parts: FirstTokenParts | None) -> dict[str, float] | None:
    if parts is None:
        return None
    return {name: round(1000 * seconds, 3) for name, seconds in asdict(parts).items()}


def goodput(rows: Sequence[Mapping[str, Any]], way: str, measure: str) -> float:
    """The highest rate up to which enough requests met both targets, at every rate measured;
    0 if there is none. `measure`: `on_average` or `throughout`."""
    best = 0.0
    for one in sorted((r for r in rows if r["way"] == way), key=lambda r: float(r["offered"])):
        if one["met"][measure] < GOOD_SHARE:
            break
        best = one["offered"]
    return best


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each rate and each way apart, its p99 against those of colocated.

    `itl_p99`: colocated over apart, above 1 is better. `ttft_p99`: apart over colocated, below 1 is
    better.
    """
    found = []
    base = {one["rate"]: one for one in rows if one["way"] == COLOCATED}
    for one in rows:
        other = base.get(one["rate"])
        if one["way"] == COLOCATED or other is None:
            continue
        found.append(
            {
                "way": one["way"],
                "rate": one["rate"],
                "itl_p99": _over(other["itl_ms"]["p99"], one["itl_ms"]["p99"]),
                "ttft_p99": _over(one["ttft_ms"]["p99"], other["ttft_ms"]["p99"]),
            }
        )
    return found


def _spread(seconds: Iterable[float]) -> dict[str, float | None]:
    values = list(seconds)
    return {"p50": _ms(percentile(values, 0.5)), "p99": _ms(percentile(values, 0.99))}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


def _over(upper: float | None, lower: float | None) -> float | None:
    return round(upper / lower, 3) if upper is not None and lower else None


def _share(met: Iterable[bool]) -> float:
    answers = list(met)
    return round(sum(answers) / max(1, len(answers)), 4)
