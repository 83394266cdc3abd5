"""Simulates a load on a number of engines, event by event.

Requests are routed as the router does. A decode engine is chosen, then a prefill engine, unless the
prompt is short. Each is the less loaded of two random engines (`least_loaded` in
`disagg/router/pairing/policies.py`: prompt tokens of the requests in flight, and 256 for each
request). Then the prompt is computed, handed off, and decoded. Without prefill engines decode
computes every prompt. The settings of `Routing` work as in the router.

One seed gives one result. This module must never read the real clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from disagg.planning.decode_engine import DecodeEngine
from disagg.planning.events import Clock
from disagg.planning.outcome import (
    FirstTokenParts,
    Floats,
    Gaps,
    SimulationOutcome,
    Targets,
    missed,
)
from disagg.planning.prefill_engine import PrefillEngine
from disagg.planning.speeds import Speeds
from disagg.planning.trace import Trace
from disagg.router.pairing.first_token_hold import FirstTokenHold
from disagg.router.pairing.local_prefill import LocalPrefill
from disagg.router.pairing.prefill_backlog import PrefillBacklog, Speed

# Load of a request besides its prompt, in prompt tokens, as the router counts it.
_REQUEST_TOKENS = 256


@dataclass(frozen=True)
class Routing:
    """The router's settings of `router.pairing` in the YAML."""

    local_prefill_tokens: int = 64
    prefill_wait_share: float | None = None
    first_token: Literal["prefill", "decode"] = "decode"
    first_token_hold_s: float = 0.0


@dataclass(frozen=True)
class SimulatedLoad:
    """All inputs of a simulation except the numbers of engines."""

    trace: Trace
    speeds: Speeds
    targets: Targets
    routing: Routing
    seed: int

    def is_local(self, request: int, prefill: int) -> bool:
        """Whether decode computes this prompt whatever the load of prefill is.

        `prefill`: the number of prefill engines.
        """
        return prefill == 0 or self.trace.prompt[request] <= self.routing.local_prefill_tokens

    def begins_at_prefill(self, request: int) -> bool:
        """Whether the answer begins with prefill's first token, if prefill computes the prompt."""
        return self.routing.first_token == "prefill" and self.trace.output[request] > 1

    def first_token_alone(self, request: int) -> float:
        """Seconds to the first token on idle engines."""
        prompt, speeds = self.trace.prompt[request], self.speeds
        local = self.is_local(request, prefill=1)
        first = speeds.first_token_alone(prompt, local=local)
        if not local and self.begins_at_prefill(request):
            begun = speeds.router_s + speeds.prefill.alone(prompt)
            first = min(first, begun + self.routing.first_token_hold_s)
        return first

    def fits(self, request: int) -> bool:
        """Whether the request fits into an empty decode engine's cache."""
        tokens = self.trace.prompt[request] + self.trace.output[request]
        return tokens <= self.speeds.decode.kv_tokens


def simulate(load: SimulatedLoad, prefill: int, decode: int) -> SimulationOutcome:
    """Simulate the load on these numbers of engines, to the last token."""
    run = _Run(load, prefill, decode, misses=len(load.trace))
    run.serve()
    return run.outcome()


def meets(load: SimulatedLoad, prefill: int, decode: int) -> bool:
    """Whether enough requests meet the targets. Ends as soon as too many have missed them."""
    run = _Run(load, prefill, decode, load.targets.misses_allowed(len(load.trace)))
    try:
        run.serve()
    except _TooManyMisses:
        return False
    return True


class _TooManyMisses(Exception):
    """Ends a simulation whose result is known."""


class _Pool:
    """The router's view of the engines of one role."""

    def __init__(self, size: int, drawn: random.Random) -> None:
        self._cost = [0] * size
        self._random = drawn.random

    def take(self, tokens: int) -> int:
        """Choose the engine of a request, and add the request to its load."""
        cost, count = self._cost, len(self._cost)
        chosen = int(self._random() * count)
        if count > 1:
            other = int(self._random() * (count - 1))
            other += other >= chosen
            if cost[other] < cost[chosen]:
                chosen = other
        cost[chosen] += tokens + _REQUEST_TOKENS
        return chosen

    def leave(self, engine: int, tokens: int) -> None:
        """The request has left the engine."""
        self._cost[engine] -= tokens + _REQUEST_TOKENS


class _WaitRule:
    """When decode computes a prompt that would wait at prefill: the router's rule and estimates
    (`prefill_wait_share`, `LocalPrefill`)."""

    def __init__(self, share: float, prompts: Sequence[int], prefill: int, decode: int) -> None:
        self._local_prefill, self._prompts, self._now = LocalPrefill(share), prompts, 0.0
        self._speed = Speed()
        self._prefill = [PrefillBacklog(self._speed, self._time) for _ in range(prefill)]
        self._decode = [PrefillBacklog(self._speed, self._time) for _ in range(decode)]
        self._requests = [0] * decode

    def seated(self, engine: int) -> None:
        self._requests[engine] += 1

    def left(self, engine: int) -> None:
        self._requests[engine] -= 1

    def is_local(self, now: float, request: int, engine: int) -> bool:
        """Whether this decode engine, where the request has its seat, computes the prompt."""
        self._now = now
        wait_s = math.inf
        for backlog in self._prefill:  # may be thousands, but usually the first is idle
            wait_s = min(wait_s, backlog.left_s())
            if not wait_s:
                break
        return self._local_prefill.is_worth_it(
            wait_s,
            self._decode[engine].left_s(),
            self._speed.takes(self._prompts[request]),
            self._requests[engine],
        )

    def prefill_begins(self, now: float, request: int, engine: int) -> None:
        self._now = now
        self._prefill[engine].begin(self._prompts[request])

    def prefill_ends(self, now: float, request: int, engine: int) -> None:
        self._now = now
        self._prefill[engine].finish(self._prompts[request])

    def decode_begins(self, now: float, request: int, engine: int) -> None:
        self._now = now
        self._decode[engine].begin(self._prompts[request])

    def decode_ends(self, now: float, request: int, engine: int) -> None:
        self._now = now
        self._decode[engine].forget(self._prompts[request])

    def _time(self) -> float:
        return self._now


class _Stages:
    """When each request reached a stage, in seconds; NaN: never."""

    def __init__(self, requests: int) -> None:
        self.at_prefill, self.prefill_begins, self.prefilled = (_never(requests) for _ in range(3))
        self.at_decode, self.handoff_begins, self.decoded = (_never(requests) for _ in range(3))

    def parts(
        self,
        came: Sequence[float],
        handoff_s: Callable[[int], float],
        sizes: tuple[Sequence[int], Sequence[int]],
    ) -> FirstTokenParts | None:
        """The mean parts. `sizes`: tokens of prompts and answers at decode."""
        handed = [n for n, seconds in enumerate(self.at_prefill) if not math.isnan(seconds)]
        if not handed:
            return None
        names = ("at_prefill", "prefill_begins", "prefilled", "at_decode", "handoff_begins")
        times = {name: np.array(getattr(self, name))[handed] for name in (*names, "decoded")}
        moved = np.array([handoff_s(sizes[0][n]) for n in handed])
        parts = {
            "router": times["at_prefill"] - np.array(came)[handed]
            + times["at_decode"] - times["prefilled"],
            "prefill_queue": times["prefill_begins"] - times["at_prefill"],
            "prefill": times["prefilled"] - times["prefill_begins"],
            "decode_queue": times["handoff_begins"] - times["at_decode"],
            "handoff": moved,
            "decode_step": times["decoded"] - times["handoff_begins"] - moved,
        }  # fmt: skip
        return FirstTokenParts(**{name: float(values.mean()) for name, values in parts.items()})


def _never(requests: int) -> list[float]:
    return [math.nan] * requests


class _Run:
    def __init__(self, load: SimulatedLoad, prefill: int, decode: int, misses: int) -> None:
        trace, speeds = load.trace, load.speeds
        drawn = random.Random(load.seed)
        self._load, self._trace, self._misses_left = load, trace, misses
        self._clock, self._gaps = Clock(), Gaps()
        share = load.routing.prefill_wait_share
        self._wait_rule: _WaitRule | None = None
        if share is not None and prefill:
            self._wait_rule = _WaitRule(share, trace.prompt, prefill, decode)
        # Prompt and output tokens at decode. If an answer begins with prefill's first token, decode
        # gets that token as the last one of the prompt.
        self._sizes = [*trace.prompt], [*trace.output]
        self._is_local = [False] * len(trace)
        self._prefill_pool, self._decode_pool = _Pool(prefill, drawn), _Pool(decode, drawn)
        self._prefill = [
            PrefillEngine(
                speeds.prefill, trace.prompt, self._clock, self._prefill_begins, self._prefilled
            )
            for _ in range(prefill)
        ]
        self._decode = [
            DecodeEngine(
                speeds.decode,
                speeds.handoff,
                self._sizes,
                self._is_local.__getitem__,
                self._clock,
                self,
            )
            for _ in range(decode)
        ]
        self._prefill_of, self._decode_of = [-1] * len(trace), [-1] * len(trace)
        self._first, self._last = [math.nan] * len(trace), [math.nan] * len(trace)
        self._stages = _Stages(len(trace))
        self._begun: dict[int, float] = {}  # time until which prefill's first token is held
        self._first_token_hold = FirstTokenHold(load.routing.first_token_hold_s)
        # Until the last arrival: seconds of prefill steps, of decode steps, of decode sequences.
        self._busy_s = (0.0, 0.0, 0.0)

    def serve(self) -> None:
        """Simulate all arrivals and events."""
        clock, load = self._clock, self._load
        to_prefill = load.speeds.router_s + load.speeds.prefill.request_s
        to_decode = load.speeds.router_s + load.speeds.decode.request_s
        for request, now in enumerate(self._trace.at):
            clock.run(now)
            if not load.fits(request):
                self._miss()
                continue
            tokens = self._trace.prompt[request]
            self._decode_of[request] = self._decode_pool.take(tokens)
            if self._stays(now, request):
                self._is_local[request] = True
                clock.at(now + to_decode, self._at_decode, request)
            else:
                engine = self._prefill_of[request] = self._prefill_pool.take(tokens)
                if self._wait_rule is not None:
                    self._wait_rule.prefill_begins(now, request, engine)
                clock.at(now + to_prefill, self._at_prefill, request)
        self._busy_s = self._busy_until(self._trace.at[-1])
        clock.run(math.inf)

    def _stays(self, now: float, request: int) -> bool:
        """Whether decode computes the prompt."""
        rule, engine = self._wait_rule, self._decode_of[request]
        stays = self._load.is_local(request, len(self._prefill))
        if rule is not None:
            rule.seated(engine)
            stays = stays or rule.is_local(now, request, engine)
            if stays:
                rule.decode_begins(now, request, engine)
        return stays

    def _busy_until(self, now: float) -> tuple[float, float, float]:
        decode = [engine.busy_s(now) for engine in self._decode]
        steps_s, sequences_s = (sum(part) for part in zip(*decode, strict=True))
        return sum(engine.busy_s(now) for engine in self._prefill), steps_s, sequences_s

    def _at_prefill(self, now: float, request: int) -> None:
        self._stages.at_prefill[request] = now
        self._prefill[self._prefill_of[request]].add(now, request)

    def _prefill_begins(self, now: float, request: int) -> None:
        self._stages.prefill_begins[request] = now

    def _prefilled(self, now: float, request: int) -> None:
        self._stages.prefilled[request] = now
        engine = self._prefill_of[request]
        self._prefill_pool.leave(engine, self._trace.prompt[request])
        if self._wait_rule is not None:
            self._wait_rule.prefill_ends(now, request, engine)
        if self._load.begins_at_prefill(request):
            self._begun[request] = now + self._first_token_hold.of(now - self._trace.at[request])
            prompts, outputs = self._sizes
            prompts[request] += 1
            outputs[request] -= 1
        self._clock.at(now + self._load.speeds.decode.request_s, self._at_decode, request)

    def _at_decode(self, now: float, request: int) -> None:
        self._stages.at_decode[request] = now
        self._decode[self._decode_of[request]].add(now, request)

    # ---- TokenListener: called by the decode engines -----------------------------------------

    def handoff_begins(self, now: float, request: int) -> None:
        """See `TokenListener`, also for the next three methods."""
        self._stages.handoff_begins[request] = now

    def first_token(self, now: float, request: int) -> None:
        self._stages.decoded[request] = now
        until = self._begun.pop(request, None)
        if until is not None:
            held = min(until, now)
            self._first[request] = held
            if held < now:  # else the client gets both at once
                self._gaps.add(now - held, now - held, 1)
            return
        self._first[request] = now
        if self._wait_rule is not None and self._is_local[request]:
            self._wait_rule.decode_ends(now, request, self._decode_of[request])

    def last_token(self, now: float, request: int) -> None:
        self._last[request] = now
        self._decode_pool.leave(self._decode_of[request], self._trace.prompt[request])
        if self._wait_rule is not None:
            self._wait_rule.left(self._decode_of[request])
        targets, first = self._load.targets, self._first[request]
        gaps = self._trace.output[request] - 1
        late = first - self._trace.at[request] > targets.ttft
        if late or (gaps and (now - first) / gaps > targets.itl):
            self._miss()

    def gaps(self, first_s: float, last_s: float, count: int) -> None:
        self._gaps.add(first_s, last_s, count)

    def _miss(self) -> None:
        self._misses_left -= 1
        if self._misses_left < 0:
            raise _TooManyMisses

    # ---- result ------------------------------------------------------------------------------

    def outcome(self) -> SimulationOutcome:
        """The outcome. Call it after `serve`."""
        first, last = np.array(self._first), np.array(self._last)
        ttft = first - np.array(self._trace.at)
        late, slow = missed(ttft, self._between(first, last), self._load.targets)
        served = ttft[~np.isnan(ttft)]
        came_s = self._trace.at[-1]
        prefill_s, decode_s, sequences_s = self._busy_s
        return SimulationOutcome(
            prefill=len(self._prefill),
            decode=len(self._decode),
            ttft_p50=_quantile(served, 0.5),
            ttft_p99=_quantile(served, 0.99),
            itl_p50=self._gaps.quantile(0.5),
            itl_p99=self._gaps.quantile(0.99),
            requests=len(ttft),
            missed=int((late | slow).sum()),
            late_first=int(late.sum()),
            slow_next=int(slow.sum()),
            refused=len(ttft) - served.size,
            prefill_busy=_per(prefill_s, len(self._prefill) * came_s),
            decode_busy=_per(decode_s, len(self._decode) * came_s),
            decode_batch=_per(sequences_s, decode_s),
            parts=self._stages.parts(self._trace.at, self._load.speeds.handoff.takes, self._sizes),
        )

    def _between(self, first: Floats, last: Floats) -> Floats:
        gaps = np.array(self._trace.output, float) - 1
        between: Floats = (last - first) / np.where(gaps > 0, gaps, np.nan)
        return between


def _per(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if values.size else math.nan
