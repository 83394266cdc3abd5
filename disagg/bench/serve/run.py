"""`disagg bench serve`: one load on plain engines, and on as many prefill and decode engines.

Every way to serve (`ways.py`) has as many engines of one model on the same cores, behind the
router. The load is open: requests are sent at their times, whether or not earlier ones were
answered. Or it is conversations (`conversations.py`), whose turns wait for the answers before them.

Each rate measures every way, so that drift of the machine affects all alike.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from disagg.bench.first_token.handoff import KV_BYTES_PER_TOKEN, MODEL
from disagg.bench.results import Output
from disagg.bench.serve import trace as serve_trace
from disagg.bench.serve.plan import ServeLoad, ServePlan
from disagg.bench.serve.report import line, show, tables, targets
from disagg.bench.serve.scene import BLOCK, Scene
from disagg.bench.serve.score import Run, goodput, ratios, row
from disagg.bench.serve.trace import Ask
from disagg.bench.serve.ways import WAYS
from disagg.errors import StartupError
from disagg.testing.checkpoint import make_model

_MOST_PROBLEMS = 10


def run(plan: ServePlan, output: Output) -> int:
    """Measure and print. Returns the exit status: 1 if a request failed or a way was left out."""
    plan.check()
    loads = plan.loads()
    console = Console(highlight=False, soft_wrap=True)
    if plan.write_trace is not None:
        _write_traces(plan.write_trace, loads, console)
    if not plan.ways:
        return 0
    make_model(MODEL, layers=4, hidden=256, kv_heads=8, head_dim=128)
    began, load_before = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="disagg-serve-") as folder, ExitStack() as stack:
        scene = Scene(plan, stack, console, Path(folder))
        runs = _measure(plan, scene, loads, console)
    rows = [row(one, plan.targets) for one in runs]
    report = {
        **_settings(plan),
        "load_before": round(load_before, 2),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "rows": rows,
        "ratios": ratios(rows),
        "goodput": {
            way: {measure: goodput(rows, way, measure) for measure in ("on_average", "throughout")}
            for way in dict.fromkeys(one.way for one in runs)
        },
    }
    show(report, console)
    command = "serve" if plan.talk is None else "serve-conversations"
    output.write(command, report, tables(report), targets(report))
    left_out = {one.way for one in runs} != set(plan.ways)
    return 1 if left_out or any(one["failed"] for one in rows) else 0


def _write_traces(path: Path, loads: Sequence[ServeLoad], console: Console) -> None:
    """Write to the path; of several rates, each to a file of its own beside it."""
    for load in loads:
        file = path if len(loads) == 1 else path.with_stem(f"{path.stem}-{load.rate:g}")
        serve_trace.write(file, load.asks)
        console.print(f"{file}: {len(load.asks)} requests")


def _settings(plan: ServePlan) -> dict[str, Any]:
    is_mix = plan.trace is None and plan.talk is None
    return {
        "cores": os.cpu_count(),
        "model": {"path": str(MODEL), "kv_bytes_per_token": KV_BYTES_PER_TOKEN},
        "block_tokens": BLOCK,
        "pairs": plan.pairs,
        "mix": [vars(kind) for kind in plan.kinds] if is_mix else None,
        "trace": None if plan.trace is None else plan.trace.name,
        "conversations": None if plan.talk is None else asdict(plan.talk),
        "duration_s": plan.duration_s,
        "repeat_share": plan.repeat_share,
        "seed": plan.seed,
        "targets": {"ttft_s": plan.targets.first_s, "itl_s": plan.targets.gap_s},
        "local_prefill_tokens": plan.local_prefill_tokens,
        "prefill_wait_share": plan.prefill_wait_share,
        "first_token": plan.first_token,
        "first_token_hold_s": plan.first_token_hold_s,
        "max_num_batched_tokens": plan.batched_tokens,
        "decode_max_num_batched_tokens": plan.decode_batched_tokens,
        "prefill_max_num_seqs": plan.prefill_seqs,
    }


def _measure(
    plan: ServePlan, scene: Scene, loads: Sequence[ServeLoad], console: Console
) -> list[Run]:
    warm_up = ServeLoad(None, 0.0, _warm_up(plan, loads))
    ways = list[str]()
    for way in plan.ways:
        try:
            _tell(scene.run(way, warm_up, f"{plan.seed} {way} warm-up"), console)
        except StartupError as error:
            if WAYS[way].peer is None:
                raise
            console.print(f"{way} is left out: {error}", markup=False)
            continue
        console.print(f"{way} is warm")
        ways.append(way)
    if not ways:
        raise StartupError("none of --ways could be started")
    generator = random.Random(plan.seed)
    runs = []
    for load in loads:
        for way in generator.sample(ways, len(ways)):
            one = scene.run(way, load, f"{plan.seed} {way} {load.rate}")
            _tell(one, console)
            console.print(line(row(one, plan.targets)))
            runs.append(one)
    order = {way: number for number, way in enumerate(ways)}
    return sorted(runs, key=lambda one: (one.offered, order[one.way]))


def _warm_up(plan: ServePlan, loads: Sequence[ServeLoad]) -> list[Ask]:
    """Two requests of each kind at once for each pair, so that every engine has seen its load. Of
    many kinds some, the longest among them."""
    sizes = {(ask.prompt_tokens, ask.output_tokens) for load in loads for ask in load.asks}
    if (talk := plan.talk) is not None:
        ends = (talk.shared_tokens + talk.turn_tokens, talk.longest - talk.answer_tokens)
        sizes = {(tokens, talk.answer_tokens) for tokens in ends}
    some = sorted(sizes, reverse=True)[:: max(1, len(sizes) // 4)]
    return [Ask(0.0, *size) for size in some for _ in range(2 * plan.pairs)]


def _tell(one: Run, console: Console) -> None:
    """Print the first failed requests."""
    problems = [outcome for outcome in one.batch.outcomes if outcome.problem is not None]
    for outcome in problems[:_MOST_PROBLEMS]:
        asked = outcome.ask
        console.print(
            f"  {one.way}: {asked.prompt_tokens} tokens at {asked.at:.2f} s: {outcome.problem}",
            markup=False,
        )
