"""`disagg bench predicted`: compares the prediction of `disagg plan` with real engines.

One load, as in `disagg bench serve`, on one pair of engines and on two pairs. The speeds are
measured on the first pair just before. Engines that are not being measured are stopped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.bench.first_token.handoff import MODEL
from disagg.bench.results import Output, Row
from disagg.bench.results import Table as ResultTable
from disagg.bench.serve import load as serve_load
from disagg.bench.serve import trace as serve_trace
from disagg.bench.serve.score import percentile
from disagg.bench.serve.trace import Ask, Kind
from disagg.bench.speeds import run as speeds
from disagg.errors import ConfigError
from disagg.planning import speeds as speeds_file
from disagg.planning.outcome import Targets
from disagg.planning.simulation import Routing, SimulatedLoad, simulate
from disagg.planning.speeds import Speeds
from disagg.planning.trace import Trace
from disagg.tables import show as show_table
from disagg.testing.checkpoint import make_model
from disagg.testing.launch import launch
from disagg.testing.vllm_server import VllmServer

_OURS = {"kv_connector": "DisaggConnector", "kv_connector_module_path": "disagg.connector"}
_SECRET = {"DISAGG_SECRET": "the secret of this bench"}
_WARM_UP_S = 0.4  # between two requests of the warm-up
_FIGURES = {
    "ttft_p50": "first token p50",
    "ttft_p99": "first token p99",
    "itl_p50": "between tokens p50",
    "itl_p99": "between tokens p99",
}
_NO_TARGETS = Targets(1e9, 1e9, 1.0)


@dataclass(frozen=True)
class PredictionPlan:
    """What to compare. `pairs`: numbers of engines of each role.

    `speeds`: how to measure the speeds; `file`: a speeds file to use instead.
    """

    pairs: Sequence[int]
    rate: float
    duration_s: float
    kinds: Sequence[Kind]
    local_prefill_tokens: int
    seed: int
    speeds: speeds.SpeedsPlan
    file: Path | None

    def __post_init__(self) -> None:
        if min(self.pairs) < 1:
            raise ConfigError(f"--pairs: {min(self.pairs)} — must be 1 or more")
        for name, value in (("rate", self.rate), ("duration", self.duration_s)):
            if value <= 0:
                raise ConfigError(f"--{name}: {value:g} — must be more than 0")


def run(plan: PredictionPlan, output: Output) -> int:
    """Measure, simulate, print. Returns the exit status: 1 if a request failed."""
    console = Console(highlight=False, soft_wrap=True)
    asks = serve_trace.poisson(plan.kinds, plan.rate, plan.duration_s, plan.seed)
    if not asks:
        raise ConfigError(f"--duration: no request in {plan.duration_s:g} s; raise it")
    make_model(MODEL, layers=4, hidden=256, kv_heads=8, head_dim=128)
    known = None if plan.file is None else speeds_file.load(plan.file)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        pairs = _engines(plan, known, stack, console)
        for server in _servers(pairs[1:]):
            server.pause()
        if known is None:
            prefill, decode = pairs[0]
            known = speeds.measure(plan.speeds, prefill.url, decode.url, console)
        for server in _servers(pairs[:1]):
            server.pause()
        for count in plan.pairs:
            measured = _measured(plan, pairs[:count], asks, console)
            rows.append({"pairs": count, "requests": len(asks), "load_average": os.getloadavg()[0]})
            rows[-1] |= {"measured": measured, "predicted": _predicted(plan, known, asks, count)}
            _show(rows[-1], console)
    table = ResultTable("Measured and predicted", [one for row in rows for one in _shown(row)])
    output.write("predicted", {"rows": rows, "speeds": known.model_dump()}, [table], [])
    return 1 if any(row["measured"]["failed"] for row in rows) else 0


def _engines(
    plan: PredictionPlan, known: Speeds | None, stack: ExitStack, console: Console
) -> list[tuple[VllmServer, VllmServer]]:
    """Pairs of a prefill and a decode engine, with the vLLM limits of the speeds."""
    tokens = known.decode.max_num_batched_tokens if known else plan.speeds.batched_tokens
    seqs = known.decode.max_num_seqs if known else plan.speeds.seqs
    args = ["--max-num-batched-tokens", str(tokens), "--max-num-seqs", str(seqs)]

    def start(name: str, role: str) -> VllmServer:
        config = {**_OURS, "kv_role": role}
        server = VllmServer(name, MODEL.absolute(), None, config, args, env=_SECRET)
        return stack.enter_context(server)

    pairs = [
        (start(f"prefill-{n}", "kv_producer"), start(f"decode-{n}", "kv_consumer"))
        for n in range(max(plan.pairs))
    ]
    console.print(f"starting {2 * len(pairs)} engines, which takes minutes on few cores")
    for server in _servers(pairs):
        server.wait_ready()
    return pairs


def _servers(pairs: Sequence[tuple[VllmServer, VllmServer]]) -> list[VllmServer]:
    return [server for pair in pairs for server in pair]


def _measured(
    plan: PredictionPlan,
    pairs: Sequence[tuple[VllmServer, VllmServer]],
    asks: Sequence[Ask],
    console: Console,
) -> dict[str, Any]:
    """The load on these engines, behind the router."""
    console.print(f"{len(pairs)}P{len(pairs)}D: {len(asks)} requests in {plan.duration_s:g} s")
    servers = _servers(pairs)
    for server in servers:
        server.resume()
    command = [sys.executable, "-m", "disagg.cli", "router", "--port", "{port}"]
    command += ["--local-prefill-tokens", str(plan.local_prefill_tokens)]
    for prefill, decode in pairs:
        command += ["--prefill", prefill.url, "--decode", decode.url]
    sizes = sorted({(ask.prompt_tokens, ask.output_tokens) for ask in asks}) * 3 * len(pairs)
    first = [Ask(n * _WARM_UP_S, *size) for n, size in enumerate(sizes)]
    with ExitStack() as stack:
        url, _ = launch(stack, "the router", command)
        for name, load in (("warm-up", first), ("load", asks)):
            key = f"{plan.seed} {len(pairs)} {name}"
            batch = serve_load.run(url, load, serve_trace.prompts(load, key))
    for server in servers:
        server.pause()
    right = [outcome for outcome in batch.outcomes if outcome.problem is None]
    gaps = [gap for outcome in right for gap in outcome.gaps]
    return {
        "failed": len(asks) - len(right),
        "ttft_p50": percentile((outcome.first_s for outcome in right), 0.5),
        "ttft_p99": percentile((outcome.first_s for outcome in right), 0.99),
        "itl_p50": percentile(gaps, 0.5),
        "itl_p99": percentile(gaps, 0.99),
    }


def _predicted(
    plan: PredictionPlan, known: Speeds, asks: Sequence[Ask], count: int
) -> dict[str, Any]:
    trace = Trace(
        [ask.at for ask in asks],
        [ask.prompt_tokens for ask in asks],
        [ask.output_tokens for ask in asks],
        "disagg bench predicted",
    )
    load = SimulatedLoad(trace, known, _NO_TARGETS, Routing(plan.local_prefill_tokens), plan.seed)
    return simulate(load, count, count).as_json()


def _shown(row: dict[str, Any]) -> list[Row]:
    """Rows of the results file. `error`: below 0 where the prediction is too fast."""
    count, measured, predicted = row["pairs"], row["measured"], row["predicted"]
    found: list[Row] = []
    for key, name in _FIGURES.items():
        real, said = measured[key], predicted[key]
        shown: Row = {"engines": f"{count}P{count}D", "requests": row["requests"], "figure": name}
        if real is not None and said is not None:
            shown |= {"measured, ms": real * 1e3, "predicted, ms": said * 1e3}
            shown["error"] = f"{said / real - 1:+.0%}"
        found.append(shown)
    return found


def _show(row: dict[str, Any], console: Console) -> None:
    count, measured, predicted = row["pairs"], row["measured"], row["predicted"]
    failed = f", {measured['failed']} failed" if measured["failed"] else ""
    table = Table(
        title=f"{count}P{count}D, {row['requests']} requests{failed}; ms", title_justify="left"
    )
    for column in ("", "measured", "predicted", "error"):
        table.add_column(column, justify="right" if column else "left")
    for key, words in _FIGURES.items():
        real, said = measured[key], predicted[key]
        if real is None or said is None:
            table.add_row(words, "-", "-", "-")
        else:
            table.add_row(
                words, f"{real * 1e3:,.0f}", f"{said * 1e3:,.0f}", f"{said / real - 1:+.0%}"
            )
    show_table(table)
    console.print(
        f"simulated: prefill {predicted['prefill_busy']:.0%} busy, decode "
        f"{predicted['decode_busy']:.0%}; load average at the end: "
        f"{row['load_average']:.1f} on {os.cpu_count()} cores"
    )
