"""What `disagg bench serve` is asked to measure, and what of it cannot be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg.bench.serve import trace as serve_trace
from disagg.bench.serve.conversations import Talk
from disagg.bench.serve.score import Targets
from disagg.bench.serve.trace import Ask, Kind
from disagg.bench.serve.ways import WAYS
from disagg.config import Role
from disagg.errors import ConfigError

CONTEXT = 16384
"""Tokens that the engines take, see `VllmServer`."""


@dataclass(frozen=True)
class ServeLoad:
    """One trace, or conversations. `rate`: None if it was read from a file. `offered`: requests per
    second; of conversations, those that begin per second."""

    rate: float | None
    offered: float
    asks: Sequence[Ask] = ()
    talk: Talk | None = None


@dataclass(frozen=True)
class ServePlan:
    """What to measure. `local_prefill_tokens`, `prefill_wait_share`, `first_token` and
    `first_token_hold_s` apply to `apart`. `trace` replaces rates and mix; `talk` replaces mix and
    duration.

    `pairs`: engines of each role apart; there are as many engines colocated.
    `batched_tokens`: vLLM's `max_num_batched_tokens` of all engines; None: vLLM's default.
    `decode_batched_tokens`: of decode engines; None: as the others. `prefill_seqs`: vLLM's
    `max_num_seqs` of prefill engines; None: vLLM's default.
    """

    ways: Sequence[str]
    rates: Sequence[float]
    duration_s: float
    kinds: Sequence[Kind]
    repeat_share: float
    targets: Targets
    local_prefill_tokens: int
    prefill_wait_share: float | None
    first_token: Role
    first_token_hold_s: float
    batched_tokens: int | None
    decode_batched_tokens: int | None
    prefill_seqs: int | None
    seed: int
    trace: Path | None = None
    write_trace: Path | None = None
    pairs: int = 1
    talk: Talk | None = None

    def check(self) -> None:
        """Raise `ConfigError` for a plan that cannot be measured."""
        problems = [
            f"--ways: {way} — unknown; choose from {', '.join(WAYS)}"
            for way in self.ways
            if way not in WAYS
        ]
        if len(set(self.ways)) < len(self.ways):
            problems.append("--ways: name each way once")
        if min(self.rates) <= 0 or len(set(self.rates)) < len(self.rates):
            problems.append("--rates: each must be above 0 and given once")
        if self.duration_s <= 0:
            problems.append(f"--duration: {self.duration_s:g} — must be above 0")
        if not 0 <= self.repeat_share <= 1:
            problems.append(f"--repeat-share: {self.repeat_share:g} — must be from 0 to 1")
        if min(self.targets.first_s, self.targets.gap_s) <= 0:
            problems.append("--ttft-target and --itl-target: must be above 0 seconds")
        if self.first_token_hold_s and self.first_token != "prefill":
            problems.append("--first-token-hold-s: needs --first-token prefill")
        if self.pairs < 1:
            problems.append(f"--pairs: {self.pairs} — must be at least 1")
        if self.talk is not None:
            problems += self.talk.problems()
            if self.trace is not None or self.write_trace is not None:
                problems.append("--conversations: not with --trace and --write-trace")
        if problems:
            raise ConfigError(problems)

    def loads(self) -> list[ServeLoad]:
        """One for each rate, or the one of the trace. Raises `ConfigError`."""
        if self.talk is not None:
            if self.talk.longest > CONTEXT:
                raise ConfigError(
                    f"--turns: a conversation of {self.talk.longest} tokens — the engines' limit "
                    f"is {CONTEXT}"
                )
            return [ServeLoad(rate, rate, talk=self.talk) for rate in self.rates]
        if self.trace is not None:
            asks = serve_trace.read(self.trace)
            loads = [ServeLoad(None, len(asks) / max(1.0, asks[-1].at), asks)]
        else:
            loads = [self._load(rate) for rate in self.rates]
        longest = max(a.prompt_tokens + a.output_tokens for load in loads for a in load.asks)
        if longest > CONTEXT:
            raise ConfigError(
                f"{'--mix' if self.trace is None else '--trace'}: {longest} tokens of prompt and "
                f"answer — the engines' limit is {CONTEXT}"
            )
        return loads

    def _load(self, rate: float) -> ServeLoad:
        asks = serve_trace.poisson(self.kinds, rate, self.duration_s, self.seed, self.repeat_share)
        if not asks:
            raise ConfigError(
                f"--duration: no request in {self.duration_s:g} s at {rate:g}/s; raise it"
            )
        return ServeLoad(rate, len(asks) / self.duration_s, asks)
