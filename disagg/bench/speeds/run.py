"""`disagg bench speeds`: measures a prefill and a decode engine for `disagg plan`.

One request at a time on one engine, while the other one is idle: prompts of several lengths on
both, handoffs between them, decode steps of several batches at several contexts. `fit.py` makes
speeds of the times by least squares; the residuals are printed. Other work on the machine makes
the speeds worse.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from disagg.bench.first_token.handoff import MODEL
from disagg.bench.results import Output, Row, Table
from disagg.bench.speeds import fit as speeds_fit
from disagg.bench.speeds.engine import Engine
from disagg.bench.speeds.fit import Fit, MoveSample, PromptSample, StepSample
from disagg.errors import ConfigError
from disagg.planning.speeds import DecodeSpeed, HandoffSpeed, PrefillSpeed, Speeds, save
from disagg.testing.checkpoint import make_model
from disagg.testing.launch import launch
from disagg.testing.vllm_server import VllmServer

_OURS = {"kv_connector": "DisaggConnector", "kv_connector_module_path": "disagg.connector"}
_SECRET = {"DISAGG_SECRET": "the secret of this bench"}
_MODEL_WORDS = "4 layers, hidden 256, 8 KV heads of 128, float32 (of disagg bench handoff)"
_STEP_TOKENS = 32  # per sequence, when decode steps are timed
_ROUTER_PAIRS = 15
_ROUTER_PROMPT = 32  # tokens: short enough that the router leaves it to decode


@dataclass(frozen=True)
class SpeedsPlan:
    """What to measure. `prefill`, `decode`: URLs of running engines; None: start a pair.

    `batched_tokens`, `seqs`: max_num_batched_tokens and max_num_seqs of both engines; a vLLM server
    does not report them. `parallel`: handoffs at once, the connector's `load_threads`.
    """

    lengths: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    repeats: int
    batched_tokens: int
    seqs: int
    parallel: int
    prefill: str | None
    decode: str | None
    note: str

    def __post_init__(self) -> None:
        if (self.prefill is None) != (self.decode is None):
            missing = "prefill" if self.prefill is None else "decode"
            raise ConfigError(f"--{missing}: missing; give the URLs of both engines, or of none")
        for name, least, values in (
            ("lengths", 3, self.lengths),
            ("batches", 2, self.batches),
            ("contexts", 2, self.contexts),
        ):
            if len(set(values)) < least or min(values) < 1:
                raise ConfigError(f"--{name}: {values} — give {least} different ones, 1 or more")
        if max(self.batches) > self.seqs:
            raise ConfigError(f"--batches: {max(self.batches)} — --max-num-seqs is {self.seqs}")


@dataclass
class _Samples:
    prefill: list[PromptSample] = field(default_factory=list)
    local: list[PromptSample] = field(default_factory=list)
    moves: list[MoveSample] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    router_s: float = 0.0


def run(plan: SpeedsPlan, out: Path, output: Output) -> int:
    """Measure, print, write the file. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    with ExitStack() as stack:
        speeds = measure(plan, *_engines(plan, stack, console), console)
    save(out, speeds)
    output.write("speeds", speeds.model_dump(), _tables(speeds), [])
    console.print(f"written: {out}, after {time.monotonic() - began:.0f} s")
    return 0


def measure(plan: SpeedsPlan, prefill_url: str, decode_url: str, console: Console) -> Speeds:
    """The speeds of two idle engines; prints how well they fit."""
    prefill, decode = Engine("prefill", prefill_url), Engine("decode", decode_url)
    kv_tokens = decode.kv_tokens()
    samples = _measure(plan, prefill, decode, console)
    samples.router_s = _router(prefill, decode)
    fits = _fits(plan, samples)
    for name, fit in fits.items():
        known = ", ".join(f"{key} {value:.4g}" for key, value in fit.speeds.items())
        off = f"error {fit.typical:.0%} (median), {fit.worst:.0%} (largest)"
        console.print(f"{name}: {known}; {len(fit.residuals)} samples, {off}")
    return _speeds(plan, samples, fits, _measured(plan, decode, fits), kv_tokens)


def _engines(plan: SpeedsPlan, stack: ExitStack, console: Console) -> tuple[str, str]:
    if plan.prefill is not None and plan.decode is not None:
        return plan.prefill, plan.decode
    make_model(MODEL, layers=4, hidden=256, kv_heads=8, head_dim=128)
    args = ["--max-num-batched-tokens", str(plan.batched_tokens), "--max-num-seqs", str(plan.seqs)]
    servers = []
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        extra = {"load_threads": plan.parallel}
        config = {**_OURS, "kv_role": role, "kv_connector_extra_config": extra}
        server = VllmServer(name, MODEL.absolute(), None, config, args, env=_SECRET)
        servers.append(stack.enter_context(server))
    console.print("starting two engines, which takes a minute or more on few cores")
    for server in servers:
        server.wait_ready()
    return servers[0].url, servers[1].url


# ---- measuring ---------------------------------------------------------------------------------


def _measure(plan: SpeedsPlan, prefill: Engine, decode: Engine, console: Console) -> _Samples:
    draw, samples = random.Random(), _Samples()
    # In turns, so that drift of the machine affects all lengths alike. The first turn warms up.
    for turn in range(plan.repeats + 1):
        for tokens in plan.lengths:
            computed, params, prompt = prefill.prefill(tokens, draw)
            move, moved = decode.take_over(prompt, params)
            local = decode.prompt(tokens, draw)
            if turn:
                samples.prefill.append(computed)
                samples.moves.append(move)
                samples.bytes_per_token.append(moved / tokens)
                samples.local.append(local)
            console.print(
                f"{tokens} tokens, {turn}/{plan.repeats}: prefill {_ms(computed.engine_s)} of "
                f"{_ms(computed.client_s)}, handoff {_ms(move.first_s)}, computed by decode "
                f"{_ms(local.engine_s)} of {_ms(local.client_s)} ms"
            )
    for sequences in plan.batches:
        for context in plan.contexts:
            taken = [
                decode.steps(sequences, context, _STEP_TOKENS, draw) for _ in range(plan.repeats)
            ]
            samples.steps += taken
            shown = ", ".join(_ms(step.seconds) for step in taken)
            console.print(f"{sequences} sequences of {context} tokens: steps of {shown} ms")
    return samples


def _router(prefill: Engine, decode: Engine) -> float:
    """Seconds that the router adds to a short prompt: the median difference with and without it."""
    command = [sys.executable, "-m", "disagg.cli", "router", "--port", "{port}"]
    command += ["--prefill", prefill.url, "--decode", decode.url]
    draw, added = random.Random(), []
    with ExitStack() as stack:
        router = Engine("router", launch(stack, "the router", command)[0])
        for _ in range(_ROUTER_PAIRS):
            direct = decode.first_token_s(_ROUTER_PROMPT, draw)
            added.append(router.first_token_s(_ROUTER_PROMPT, draw) - direct)
    return max(0.0, statistics.median(added))


# ---- speeds ------------------------------------------------------------------------------------


def _fits(plan: SpeedsPlan, samples: _Samples) -> dict[str, Fit]:
    steps = speeds_fit.steps(samples.steps)
    request_s = speeds_fit.overhead(samples.local)
    own = steps.speeds["step_s"] + steps.speeds["sequence_s"]
    waits = [
        request_s + own + steps.speeds["context_token_s"] * move.tokens for move in samples.moves
    ]
    return {
        "prefill": speeds_fit.prompts(samples.prefill, plan.batched_tokens),
        "decode steps": steps,
        "decode prompts": speeds_fit.prompts(
            samples.local, plan.batched_tokens, steps.speeds["step_s"]
        ),
        "handoff": speeds_fit.moves(samples.moves, waits),
    }


def _speeds(
    plan: SpeedsPlan,
    samples: _Samples,
    fits: dict[str, Fit],
    measured: dict[str, Any],
    kv_tokens: int,
) -> Speeds:
    computed, prompts = fits["prefill"].speeds, fits["decode prompts"].speeds
    steps, move = fits["decode steps"].speeds, fits["handoff"].speeds
    bytes_per_token = statistics.median(samples.bytes_per_token)
    return Speeds(
        measured=measured,
        prefill=PrefillSpeed(
            request_s=speeds_fit.overhead(samples.prefill),
            step_s=computed["step_s"],
            token_s=computed["token_s"],
            token_context_s=computed["token_context_s"],
            max_num_batched_tokens=plan.batched_tokens,
            max_num_seqs=plan.seqs,
        ),
        decode=DecodeSpeed(
            request_s=speeds_fit.overhead(samples.local),
            step_s=steps["step_s"],
            sequence_s=steps["sequence_s"],
            context_token_s=steps["context_token_s"],
            prompt_token_s=prompts["token_s"],
            prompt_token_context_s=prompts["token_context_s"],
            max_num_batched_tokens=plan.batched_tokens,
            max_num_seqs=plan.seqs,
            kv_tokens=kv_tokens,
        ),
        handoff=HandoffSpeed(
            latency_s=move["latency_s"],
            bytes_per_token=bytes_per_token,
            bytes_per_s=bytes_per_token / move["token_s"],
            parallel=plan.parallel,
        ),
        router_s=samples.router_s,
    )


def _measured(plan: SpeedsPlan, decode: Engine, fits: dict[str, Fit]) -> dict[str, Any]:
    own = plan.decode is None
    return {
        "by": "disagg bench speeds",
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "model": _MODEL_WORDS if own else decode.model,
        "vllm": decode.version,
        "engines": "one of each role on this machine" if own else "given by URL",
        **({"note": plan.note} if plan.note else {}),
        "samples": {name: len(fit.residuals) for name, fit in fits.items()},
        "off_typically": {name: round(fit.typical, 3) for name, fit in fits.items()},
        "off_at_most": {name: round(fit.worst, 3) for name, fit in fits.items()},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _tables(speeds: Speeds) -> list[Table]:
    """All coefficients, and how far the samples are from what they give."""
    found: list[Row] = []
    for part in ("prefill", "decode", "handoff"):
        values: dict[str, float] = getattr(speeds, part).model_dump()
        found += [{"part": part, "coefficient": key, "value": v} for key, v in values.items()]
    found.append({"part": "router", "coefficient": "router_s", "value": speeds.router_s})
    measured = speeds.measured
    fits: list[Row] = [
        {
            "fit": name,
            "samples": count,
            "error, median": f"{measured['off_typically'][name]:.1%}",
            "error, largest": f"{measured['off_at_most'][name]:.1%}",
        }
        for name, count in measured["samples"].items()
    ]
    return [Table("Speeds, in seconds, bytes and tokens", found), Table("Fits", fits)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
