"""The cheapest numbers of engines that meet the targets.

1. Refuse what no number of engines can change: requests that miss a target on idle engines.
2. Find the fewest prefill engines, with more decode engines than needed.
3. Find the fewest decode engines, with more prefill engines than needed.
4. From these two numbers upwards, find the cheapest pair that meets the targets.

The search assumes that more engines never make the result worse. By chance they can, so the result
may be off by an engine or two. Numbers above 50 are found to within 2 %.

This module must never print. It learns about a load only through `simulation`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import DisaggError
from disagg.planning.outcome import SimulationOutcome
from disagg.planning.simulation import SimulatedLoad, meets, simulate

_PLENTY = 4  # times the number that serves; more engines change nothing
_FINE = 50  # numbers above it are found to within one part in 50


class Unreachable(DisaggError):
    """No number of engines meets the targets; the message has the reason."""


@dataclass(frozen=True)
class Costs:
    """Cost of one engine of each role, in any unit."""

    prefill: float
    decode: float

    def of(self, prefill: int, decode: int) -> float:
        """The cost of these numbers of engines."""
        return self.prefill * prefill + self.decode * decode


@dataclass(frozen=True)
class Choice:
    """best: the cheapest outcome that meets the targets. candidates: it and its neighbours,
    cheapest first. together: the fewest engines that meet the targets without prefill engines; None
    if no number does."""

    best: SimulationOutcome
    candidates: list[SimulationOutcome]
    together: SimulationOutcome | None


def search(load: SimulatedLoad, costs: Costs) -> Choice:
    """Find the cheapest numbers. Raises Unreachable."""
    refuse_unreachable(load)
    pair = _Cheapest(load, costs).pair()
    around = {pair} | {at for at in _around(*pair) if min(at) > 0}
    outcomes = {at: simulate(load, *at) for at in sorted(around, key=lambda at: costs.of(*at))}
    return Choice(outcomes[pair], list(outcomes.values()), _together(load, sum(pair)))


def _around(prefill: int, decode: int) -> list[tuple[int, int]]:
    p, d = _step(prefill, 20), _step(decode, 20)
    return [(prefill + i * p, decode + j * d) for i in (-1, 0, 1) for j in (-1, 0, 1) if i * j < 1]


def _step(number: int, share: int) -> int:
    return max(1, number // share)


def refuse_unreachable(load: SimulatedLoad) -> None:
    """Raises Unreachable if too many requests miss a target on idle engines."""
    trace, speeds, targets = load.trace, load.speeds, load.targets
    late: list[tuple[float, int]] = []
    slow: list[tuple[float, int]] = []
    unfit: list[int] = []
    missed = 0
    for request, (prompt, output) in enumerate(zip(trace.prompt, trace.output, strict=True)):
        if not load.fits(request):
            unfit.append(prompt + output)
            missed += 1
            continue
        first = load.first_token_alone(request)
        between = speeds.decode.between_alone(prompt, output) if output > 1 else 0.0
        if first > targets.ttft:
            late.append((first, prompt))
        if between > targets.itl:
            slow.append((between, prompt + output))
        missed += first > targets.ttft or between > targets.itl
    if missed <= targets.misses_allowed(len(trace)):
        return
    why = [
        f"no number of engines meets the targets: {missed:,} of {len(trace):,} requests miss them "
        f"even on idle engines, and only a share of {1 - targets.share:.4g} may miss them"
    ]
    if late:
        seconds, tokens = min(late)
        why.append(
            f"{len(late):,} get their first token after --ttft {targets.ttft:g} s; the fastest "
            f"of them, with a prompt of {tokens:,} tokens, takes {seconds:.3g} s"
        )
    if slow:
        seconds, tokens = min(slow)
        why.append(
            f"{len(slow):,} have more than --itl {targets.itl:g} s between tokens; the fastest "
            f"of them, with {tokens:,} tokens in all, has {seconds:.3g} s"
        )
    if unfit:
        why.append(
            f"{len(unfit):,} do not fit into a decode engine's KV cache of "
            f"{speeds.decode.kv_tokens:,} tokens; the smallest has {min(unfit):,}"
        )
    raise Unreachable("; ".join(why))


class _Cheapest:
    def __init__(self, load: SimulatedLoad, costs: Costs) -> None:
        self._load, self._costs = load, costs
        self._known: dict[tuple[int, int], bool] = {}

    def pair(self) -> tuple[int, int]:
        """The cheapest numbers of prefill and decode engines found."""
        costs = self._costs
        enough = self._enough()
        prefill_plenty, decode_plenty = (_PLENTY * n for n in enough)
        least_prefill = _least(
            lambda prefill: self._serves(prefill, decode_plenty), enough[0], prefill_plenty
        )
        least_decode = self._least_decode(prefill_plenty, decode_plenty, guess=enough[1])
        best = (least_prefill, decode_plenty)
        stride = _step(least_prefill, _FINE)
        # The smallest number of prefill engines comes second. It may need many decode engines, and
        # once there is a cost to beat, one simulation is enough to rule that out.
        nearest = (least_prefill + stride, least_prefill)
        beyond = itertools.count(least_prefill + 2 * stride, stride)
        for prefill in itertools.chain(nearest, beyond):
            if costs.of(prefill, least_decode) >= costs.of(*best):
                if prefill not in nearest:
                    break
                continue
            cheaper = (costs.of(*best) - costs.prefill * prefill) / costs.decode
            most = min(decode_plenty, math.ceil(cheaper - 1e-9) - 1)
            if self._serves(prefill, most):
                best = (prefill, self._least_decode(prefill, most, least_decode))
        return best

    def _least_decode(
        self, prefill: int, most: int, least: int = 1, guess: int | None = None
    ) -> int:
        return _least(lambda decode: self._serves(prefill, decode), guess or least, most, least)

    def _enough(self) -> tuple[int, int]:
        """Numbers that serve, found by doubling from the smallest numbers that the work needs."""
        most = len(self._load.trace)
        pair = min(most, _prefill_work(self._load)), min(most, _decode_work(self._load))
        while not self._serves(*pair):
            if min(pair) == most:
                raise Unreachable(
                    f"not even {most:,} engines of each role meet the targets, one for each "
                    "request: too many requests come at once; spread their arrivals"
                )
            pair = min(most, 2 * pair[0]), min(most, 2 * pair[1])
        return pair

    def _serves(self, prefill: int, decode: int) -> bool:
        at = (prefill, decode)
        if at not in self._known:
            self._known[at] = decode > 0 and meets(self._load, prefill, decode)
        return self._known[at]


def _least(serves: Callable[[int], bool], guess: int, most: int, least: int = 1) -> int:
    """The smallest number from `least` that serves, if `most` does. Fast if `guess` is near it."""
    below, enough = least - 1, most
    stride = _step(guess, _FINE)
    at = max(least, min(guess, most - 1))
    # Growing strides from the guess, until one end serves and the other does not.
    while below < at < enough:
        if serves(at):
            enough = at
            at -= stride
        else:
            below = at
            at += stride
        if below >= least and enough < most:
            break
        stride *= 2
    while enough - below > _step(enough, _FINE):
        middle = (below + enough) // 2
        if serves(middle):
            enough = middle
        else:
            below = middle
    return enough


def _together(load: SimulatedLoad, like: int) -> SimulationOutcome | None:
    """The fewest engines that serve without prefill engines."""
    most = max(1, like)
    while not meets(load, 0, most):
        if most >= _PLENTY * like:
            return None
        most *= 2
    return simulate(load, 0, _least(lambda n: meets(load, 0, n), like, most))


def _prefill_work(load: SimulatedLoad) -> int:
    speed, trace = load.speeds.prefill, load.trace
    seconds = sum(
        speed.alone(prompt) - speed.request_s
        for request, prompt in enumerate(trace.prompt)
        if not load.is_local(request, prefill=1)
    )
    return max(1, math.ceil(seconds / max(trace.at[-1], load.targets.ttft)))


def _decode_work(load: SimulatedLoad) -> int:
    """Decode engines that the work needs at least.

    Counts only what each sequence and its tokens add to a step. The fixed cost of a step is shared
    by all sequences in it.
    """
    speed, trace = load.speeds.decode, load.trace
    seconds = sum(
        output * (speed.step(1, prompt + output // 2) - speed.step_s)
        for prompt, output in zip(trace.prompt, trace.output, strict=True)
    )
    return max(1, math.ceil(seconds / max(trace.at[-1], load.targets.ttft)))
