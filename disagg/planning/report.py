"""`disagg plan`: reads trace and speeds, runs the search, and prints the result.

It prints every assumption beside the result. It must never decide a number of engines itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.errors import ConfigError
from disagg.planning import speeds as speeds_file
from disagg.planning import trace as trace_file
from disagg.planning.outcome import SimulationOutcome, Targets
from disagg.planning.search import Choice, Costs, Unreachable, search
from disagg.planning.simulation import Routing, SimulatedLoad, simulate
from disagg.tables import show as show_table

ASSUMED = (
    "every prompt is computed whole: no prefix cache, no tiers, no shared prefixes",
    "a request meets the --itl target by the mean time between its tokens",
    "a decode engine admits a request when its prompt and its whole answer fit into the KV cache; "
    "vLLM admits earlier, and preempts",
    "engines are as fast as measured, because each has its own cores or GPUs",
)
NOT_MODELLED = (
    "a full KV cache of a prefill engine, and leases that expire",
    "a network that handoffs share: each handoff has the measured speed",
    "the router's limits and its queue",
    "policies other than least_loaded",
    "engines that fail, start or drain; speculative decoding; clients that disconnect",
)


@dataclass(frozen=True)
class Question:
    """The options of `disagg plan`, by their names. Raises ConfigError if one is wrong."""

    trace: Path | None
    synthetic: str | None
    speeds: Path
    ttft: float
    itl: float
    share: float
    prefill_cost: float
    decode_cost: float
    rate: float | None
    routing: Routing
    seed: int
    prefill: int | None
    decode: int | None

    def __post_init__(self) -> None:
        for name in ("ttft", "itl", "rate", "prefill_cost", "decode_cost"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option}: {value:g} — must be a finite number, more than 0")
        held = self.routing.first_token_hold_s
        if held and self.routing.first_token != "prefill":
            raise ConfigError(
                f"--first-token-hold-s: {held:g} — holds prefill's first token, but streams begin "
                "with decode's; add --first-token prefill"
            )
        if not 0 < self.share <= 1:
            raise ConfigError(f"--share: {self.share:g} — must be more than 0 and at most 1")
        if (self.trace is None) == (self.synthetic is None):
            raise ConfigError("--trace: name a file, or describe a load with --synthetic; not both")
        if (self.prefill is None) != (self.decode is None):
            missing = "prefill" if self.prefill is None else "decode"
            raise ConfigError(f"--{missing}: missing; set both numbers, or neither for a search")

    @property
    def targets(self) -> Targets:
        return Targets(self.ttft, self.itl, self.share)

    @property
    def costs(self) -> Costs:
        return Costs(self.prefill_cost, self.decode_cost)

    @property
    def engines(self) -> tuple[int, int] | None:
        """The numbers (prefill, decode) to simulate; None for a search."""
        if self.prefill is None or self.decode is None:
            return None
        return self.prefill, self.decode


def run(
    question: Question,
    *,
    as_json: bool,
    keep: Callable[[Mapping[str, Any]], None] | None = None,
) -> int:
    """Search or simulate, and print the result. Raises ConfigError.

    keep: is given the figures that `--json` prints.
    Returns 0, or 1 if no numbers of engines meet the targets, or the given numbers do not.
    """
    load = _load(question)
    console = Console(highlight=False, soft_wrap=True)
    reason, choice = None, None
    try:
        if question.engines is None:
            choice = search(load, question.costs)
        else:
            outcome = simulate(load, *question.engines)
            choice = Choice(outcome, [outcome], None)
    except Unreachable as error:
        reason = str(error)
    figures = _as_json(question, load, choice, reason)
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        if choice is not None:
            show_table(_table(choice, question), keys=2)
            console.print(_verdict(choice, question))
        else:
            console.print(reason)
        console.print()
        for line in _assumptions(load):
            console.print(line)
    if keep is not None:
        keep(figures)
    return 0 if choice is not None and choice.best.meets(question.targets) else 1


def _load(question: Question) -> SimulatedLoad:
    measured = speeds_file.load(question.speeds)
    if question.trace is not None:
        load = trace_file.read(question.trace, question.rate, question.seed)
    else:
        load = trace_file.synthetic(question.synthetic or "", question.rate, question.seed)
    return SimulatedLoad(load, measured, question.targets, question.routing, question.seed)


# ---- for people --------------------------------------------------------------------------------


def _table(choice: Choice, question: Question) -> Table:
    table = Table(title="Simulated; times in ms", title_justify="left", header_style="dim")
    columns = ["prefill", "decode", "cost", "TTFT\np50", "\np99", "ITL\np50", "\np99"]
    columns += ["meet\nboth", "prefill\nbusy", "decode\nbusy", "decode\nbatch", ""]
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    rows = [(row, "chosen" if row is choice.best else "") for row in choice.candidates]
    if question.engines is not None:
        rows = [(choice.best, "")]
    if choice.together is not None:
        rows.append((choice.together, "not apart"))
    for row, note in rows:
        table.add_row(
            f"{row.prefill:,}",
            f"{row.decode:,}",
            f"{question.costs.of(row.prefill, row.decode):,.6g}",
            *(_ms(t) for t in (row.ttft_p50, row.ttft_p99, row.itl_p50, row.itl_p99)),
            f"{_down(row.share)}",
            _percent(row.prefill_busy if row.prefill else math.nan),
            _percent(row.decode_busy),
            "-" if math.isnan(row.decode_batch) else f"{row.decode_batch:.1f}",
            note,
        )
    return table


def _verdict(choice: Choice, question: Question) -> str:
    best, targets = choice.best, question.targets
    asked = (
        f"{targets.share:.4g} of the requests: first token within {targets.ttft:g} s and at most "
        f"{targets.itl:g} s between tokens on average"
    )
    pair = f"{best.prefill:,} prefill and {best.decode:,} decode engines"
    if question.engines is None:
        return f"{pair} are the cheapest found to meet the targets ({asked})."
    words = "meet" if best.meets(targets) else "do not meet"
    return (
        f"{pair} {words} the targets ({asked}); of {best.requests:,} requests {best.late_first:,} "
        f"miss the first target, {best.slow_next:,} the second, {best.refused:,} do not fit."
    )


def _assumptions(load: SimulatedLoad) -> list[str]:
    speeds, trace = load.speeds, load.trace
    p, d, h, routing = speeds.prefill, speeds.decode, speeds.handoff, load.routing
    where = ", ".join(f"{k}: {v}" for k, v in speeds.measured.items() if not isinstance(v, dict))
    return [
        "Assumed:",
        f"- load: {trace.origin}; {len(trace):,} requests, {trace.rate:.4g} a second, mean prompt "
        f"{_mean(trace.prompt):,.0f} and answer {_mean(trace.output):,.0f} tokens",
        f"- speeds measured: {where}",
        f"- prefill engine: {_ms(p.request_s)} ms a request, {_ms(p.step_s)} ms a step of at most "
        f"{p.max_num_batched_tokens:,} tokens and {p.max_num_seqs} prompts, {p.token_s * 1e6:.3g} "
        f"us a token, {p.token_context_s * 1e9:.3g} ns a token and token before it",
        f"- decode engine: {_ms(d.request_s)} ms a request, {_ms(d.step_s)} ms a step, "
        f"{d.sequence_s * 1e6:.3g} us a sequence, {d.context_token_s * 1e9:.3g} ns a token of "
        f"context; {d.max_num_seqs} sequences, {d.kv_tokens:,} tokens of KV cache",
        f"- handoff: {_ms(h.latency_s)} ms and {h.bytes_per_token:,.0f} bytes a token at "
        f"{h.bytes_per_s / 1e9:.3g} GB/s, {h.parallel} at once",
        f"- decode computes prompts of at most {routing.local_prefill_tokens} tokens itself"
        f"{_local_prefill(routing)}, in steps that take {d.prompt_token_s * 1e6:.3g} us longer a "
        f"token and {d.prompt_token_context_s * 1e9:.3g} ns a token and token before it",
        *_first_token(routing),
        f"- router: {_ms(speeds.router_s)} ms a request, least_loaded for both roles, seed "
        f"{load.seed}",
        *(f"- {line}" for line in ASSUMED),
        "Not modelled: " + "; ".join(NOT_MODELLED) + ".",
    ]


def _local_prefill(routing: Routing) -> str:
    share = routing.prefill_wait_share
    if share is None:
        return ""
    return f", and those that would wait longer at prefill (prefill_wait_share {share:g})"


def _first_token(routing: Routing) -> list[str]:
    if routing.first_token == "decode":
        return []
    held = routing.first_token_hold_s
    return [
        "- answers whose prompt prefill computed are streamed, and begin with prefill's first token"
        + (f", held for up to {_ms(held)} ms" if held else "")
    ]


def _ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    ms = seconds * 1000
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _down(share: float) -> str:
    """A share in percent, rounded down: a missed target must not look met."""
    return f"{math.floor(share * 10000) / 100:g} %"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


# ---- for programs ------------------------------------------------------------------------------


def _as_json(
    question: Question, load: SimulatedLoad, choice: Choice | None, reason: str | None
) -> dict[str, Any]:
    costs, trace = question.costs, load.trace

    def shown(outcome: SimulationOutcome) -> dict[str, Any]:
        cost = costs.of(outcome.prefill, outcome.decode)
        return {**outcome.as_json(), "cost": cost, "meets": outcome.meets(load.targets)}

    return {
        "chosen": shown(choice.best) if choice and reason is None else None,
        "reason": reason,
        "candidates": [shown(row) for row in choice.candidates] if choice else [],
        "not_apart": shown(choice.together) if choice and choice.together else None,
        "targets": vars(load.targets),
        "load": {
            "from": trace.origin,
            "requests": len(trace),
            "rate": trace.rate if math.isfinite(trace.rate) else None,
            "prompt_tokens_mean": _mean(trace.prompt),
            "output_tokens_mean": _mean(trace.output),
            **asdict(load.routing),
            "seed": load.seed,
        },
        "speeds": load.speeds.model_dump(),
        "assumed": list(ASSUMED),
        "not_modelled": list(NOT_MODELLED),
    }
