"""A load on so many engines, event by event: what each request gets.

The way of a request is the router's: a decode engine is drawn, then, unless its prompt is short,
a prefill engine, each the less loaded of two drawn at random (`least_loaded` in
`disagg/router/pairing.py`: prompt tokens of the requests in flight and 256 for each); the prompt
is computed, handed over, and decoded. Without prefill engines decode computes every prompt.
One seed gives one result. Must never look at the real clock.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from disagg.planning.decode_engine import DecodeEngine
from disagg.planning.events import Clock
from disagg.planning.outcome import Floats, Gaps, Outcome, Targets, missed
from disagg.planning.prefill_engine import PrefillEngine
from disagg.planning.speeds import Speeds
from disagg.planning.trace import Trace

# What a request costs besides its prompt, in prompt tokens, as the router counts.
_REQUEST_TOKENS = 256


@dataclass(frozen=True)
class Load:
    """What does not change from one number of engines to another."""

    trace: Trace
    speeds: Speeds
    targets: Targets
    local_prefill_tokens: int
    seed: int

    def is_local(self, request: int, prefill: int) -> bool:
        """Whether decode computes this prompt, with so many prefill engines."""
        return prefill == 0 or self.trace.prompt[request] <= self.local_prefill_tokens

    def fits(self, request: int) -> bool:
        """Whether a decode engine's cache has room for it at all."""
        tokens = self.trace.prompt[request] + self.trace.output[request]
        return tokens <= self.speeds.decode.kv_tokens


def simulate(load: Load, prefill: int, decode: int) -> Outcome:
    """The load on so many engines, to its last token."""
    run = _Run(load, prefill, decode, misses=len(load.trace))
    run.serve()
    return run.outcome()


def meets(load: Load, prefill: int, decode: int) -> bool:
    """Whether enough requests meet the targets; ends as soon as too many have missed them."""
    run = _Run(load, prefill, decode, load.targets.misses_allowed(len(load.trace)))
    try:
        run.serve()
    except _TooManyMisses:
        return False
    return True


class _TooManyMisses(Exception):
    """No need to go on."""


class _Pool:
    """The router's view of the engines of one role."""

    def __init__(self, size: int, drawn: random.Random) -> None:
        self._cost = [0] * size
        self._random = drawn.random

    def take(self, tokens: int) -> int:
        """The engine that gets a request."""
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
        """The engine has nothing more to do with the request."""
        self._cost[engine] -= tokens + _REQUEST_TOKENS


class _Run:
    def __init__(self, load: Load, prefill: int, decode: int, misses: int) -> None:
        trace, speeds = load.trace, load.speeds
        drawn = random.Random(load.seed)
        self._load, self._trace, self._misses_left = load, trace, misses
        self._clock, self._gaps = Clock(), Gaps()
        self._prefill_pool, self._decode_pool = _Pool(prefill, drawn), _Pool(decode, drawn)
        self._prefill = [
            PrefillEngine(speeds.prefill, trace.prompt, self._clock, self._prefilled)
            for _ in range(prefill)
        ]
        self._decode = [
            DecodeEngine(
                speeds.decode,
                speeds.handover,
                (trace.prompt, trace.output),
                lambda request: load.is_local(request, prefill),
                self._clock,
                self,
            )
            for _ in range(decode)
        ]
        self._prefill_of, self._decode_of = [-1] * len(trace), [-1] * len(trace)
        self._first, self._last = [math.nan] * len(trace), [math.nan] * len(trace)
        # Until the last request came: seconds of prefill steps, of decode steps, of sequences.
        self._busy_s = (0.0, 0.0, 0.0)

    def serve(self) -> None:
        """Let all requests come, and everything happen."""
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
            if load.is_local(request, len(self._prefill)):
                clock.at(now + to_decode, self._at_decode, request)
            else:
                self._prefill_of[request] = self._prefill_pool.take(tokens)
                clock.at(now + to_prefill, self._at_prefill, request)
        self._busy_s = self._busy_until(self._trace.at[-1])
        clock.run(math.inf)

    def _busy_until(self, now: float) -> tuple[float, float, float]:
        decode = [engine.busy_s(now) for engine in self._decode]
        steps_s, sequences_s = (sum(part) for part in zip(*decode, strict=True))
        return sum(engine.busy_s(now) for engine in self._prefill), steps_s, sequences_s

    def _at_prefill(self, now: float, request: int) -> None:
        self._prefill[self._prefill_of[request]].add(now, request)

    def _prefilled(self, now: float, request: int) -> None:
        self._prefill_pool.leave(self._prefill_of[request], self._trace.prompt[request])
        self._clock.at(now + self._load.speeds.decode.request_s, self._at_decode, request)

    def _at_decode(self, now: float, request: int) -> None:
        self._decode[self._decode_of[request]].add(now, request)

    # ---- what the decode engines tell --------------------------------------------------------

    def first_token(self, now: float, request: int) -> None:
        """See `decode_engine.Watcher`, as of the next two."""
        self._first[request] = now

    def last_token(self, now: float, request: int) -> None:
        self._last[request] = now
        self._decode_pool.leave(self._decode_of[request], self._trace.prompt[request])
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

    # ---- what came of it ---------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """After `serve`."""
        first, last = np.array(self._first), np.array(self._last)
        ttft = first - np.array(self._trace.at)
        late, slow = missed(ttft, self._between(first, last), self._load.targets)
        served = ttft[~np.isnan(ttft)]
        came_s = self._trace.at[-1]
        prefill_s, decode_s, sequences_s = self._busy_s
        return Outcome(
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
        )

    def _between(self, first: Floats, last: Floats) -> Floats:
        gaps = np.array(self._trace.output, float) - 1
        between: Floats = (last - first) / np.where(gaps > 0, gaps, np.nan)
        return between


def _per(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if values.size else math.nan
