"""`disagg bench serve`: one load on two plain engines, and on a prefill and a decode engine.

Every way to serve has two engines of one model on the same cores, behind the router.
`colocated`: two plain vLLM engines; each request goes to the less loaded one. `apart`: 1P1D with
DisaggConnector; decode computes short prompts. `apart-all`: 1P1D; prefill computes every prompt.
`apart-whole`: as `apart`, but a handoff begins when the whole prompt is computed. The load is open:
requests are sent at their times, whether or not earlier ones were answered.

All engines live for the whole run, and each rate measures every way, so that drift of the machine
affects all alike. Engines that are not being measured are stopped (SIGSTOP). Each run has a new
router, which has never seen a stopped engine.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from disagg.bench.first_token.handoff import KV_BYTES_PER_TOKEN, MODEL
from disagg.bench.results import Output
from disagg.bench.serve import load as serve_load
from disagg.bench.serve import trace as serve_trace
from disagg.bench.serve.report import line, show, tables, targets
from disagg.bench.serve.score import (
    APART,
    APART_ALL,
    APART_WHOLE,
    COLOCATED,
    WAYS,
    Run,
    Targets,
    goodput,
    ratios,
    row,
)
from disagg.bench.serve.trace import Ask, Kind
from disagg.config import Role
from disagg.errors import ConfigError, StartupError
from disagg.testing.checkpoint import make_model
from disagg.testing.launch import launch
from disagg.testing.vllm_server import VllmServer

_CONTEXT = 16384  # of the engines, see `VllmServer`
_MOST_PROBLEMS = 10
_OURS = {"kv_connector": "DisaggConnector", "kv_connector_module_path": "disagg.connector"}
_SECRET = {"DISAGG_SECRET": "the secret of this bench"}


@dataclass(frozen=True)
class ServeLoad:
    """One trace. `rate`: None if it was read from a file. `offered`: requests per second."""

    rate: float | None
    offered: float
    asks: list[Ask]


@dataclass(frozen=True)
class ServePlan:
    """What to measure. `local_prefill_tokens`, `prefill_wait_share`, `first_token` and
    `first_token_hold_s` apply to `apart`. `trace` replaces rates and mix.

    `batched_tokens`: vLLM's `max_num_batched_tokens` of all engines; None: vLLM's default.
    `decode_batched_tokens`: of the decode engine; None: as the others. `prefill_seqs`: vLLM's
    `max_num_seqs` of the prefill engine; None: vLLM's default.
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
        if problems:
            raise ConfigError(problems)

    def loads(self) -> list[ServeLoad]:
        """One for each rate, or the one of the trace. Raises `ConfigError`."""
        if self.trace is not None:
            asks = serve_trace.read(self.trace)
            loads = [ServeLoad(None, len(asks) / max(1.0, asks[-1].at), asks)]
        else:
            loads = [self._load(rate) for rate in self.rates]
        longest = max(a.prompt_tokens + a.output_tokens for load in loads for a in load.asks)
        if longest > _CONTEXT:
            raise ConfigError(
                f"{'--mix' if self.trace is None else '--trace'}: {longest} tokens of prompt and "
                f"answer — the engines' limit is {_CONTEXT}"
            )
        return loads

    def _load(self, rate: float) -> ServeLoad:
        asks = serve_trace.poisson(self.kinds, rate, self.duration_s, self.seed, self.repeat_share)
        if not asks:
            raise ConfigError(
                f"--duration: no request in {self.duration_s:g} s at {rate:g}/s; raise it"
            )
        return ServeLoad(rate, len(asks) / self.duration_s, asks)


def run(plan: ServePlan, output: Output) -> int:
    """Measure and print. Returns the exit status: 1 if a request failed."""
    plan.check()
    loads = plan.loads()
    console = Console(highlight=False, soft_wrap=True)
    if plan.write_trace is not None:
        _write_traces(plan.write_trace, loads, console)
    if not plan.ways:
        return 0
    make_model(MODEL, layers=4, hidden=256, kv_heads=8, head_dim=128)
    began, load_before = time.monotonic(), os.getloadavg()[0]
    with ExitStack() as stack:
        scene = _Scene(plan, stack, console)
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
            for way in plan.ways
        },
    }
    show(report, console)
    output.write("serve", report, tables(report), targets(report))
    return 1 if any(one["failed"] for one in rows) else 0


def _write_traces(path: Path, loads: Sequence[ServeLoad], console: Console) -> None:
    """Write to the path; of several rates, each to a file of its own beside it."""
    for load in loads:
        file = path if len(loads) == 1 else path.with_stem(f"{path.stem}-{load.rate:g}")
        serve_trace.write(file, load.asks)
        console.print(f"{file}: {len(load.asks)} requests")


def _settings(plan: ServePlan) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "model": {"path": str(MODEL), "kv_bytes_per_token": KV_BYTES_PER_TOKEN},
        "mix": None if plan.trace is not None else [vars(kind) for kind in plan.kinds],
        "trace": None if plan.trace is None else plan.trace.name,
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


# ---- engines and routers -------------------------------------------------------------------


class _Scene:
    """The engines of a plan, and a router in front of those that are measured."""

    def __init__(self, plan: ServePlan, stack: ExitStack, console: Console) -> None:
        self._plan = plan
        self._plain, self._apart = list[VllmServer](), list[VllmServer]()
        if COLOCATED in plan.ways:
            self._plain = [self._engine(stack, f"plain {n}", None, {}) for n in range(2)]
        if set(plan.ways) - {COLOCATED}:
            for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
                config = {**_OURS, "kv_role": role}
                self._apart.append(self._engine(stack, name, config, _SECRET))
        servers = [*self._plain, *self._apart]
        console.print(f"starting {len(servers)} engines, which takes minutes on few cores")
        began = time.monotonic()
        for server in servers:
            server.wait_ready()
            console.print(f"{server.name} ready after {time.monotonic() - began:.0f} s")
        for server in servers:
            server.pause()

    def _engine(
        self, stack: ExitStack, name: str, config: dict[str, Any] | None, env: dict[str, str]
    ) -> VllmServer:
        most = self._plan.batched_tokens
        if name == "decode":
            most = self._plan.decode_batched_tokens or most
        args = [] if most is None else ["--max-num-batched-tokens", str(most)]
        if name == "prefill" and self._plan.prefill_seqs is not None:
            args += ["--max-num-seqs", str(self._plan.prefill_seqs)]
        return stack.enter_context(VllmServer(name, MODEL.absolute(), None, config, args, env=env))

    def run(self, way: str, load: ServeLoad, key: str) -> Run:
        """Run the load on one way to serve. `key`: seed of the prompts; none may come twice."""
        servers = self._plain if way == COLOCATED else self._apart
        for server in servers:
            server.resume()
        before = _loaded(servers)
        with ExitStack() as stack:
            url, _ = launch(stack, f"the router of {way}", self._router(way))
            batch = serve_load.run(url, load.asks, serve_trace.prompts(load.asks, key))
        for server in servers:
            if server.process is not None and server.process.poll() is not None:
                raise StartupError(f"{server.name} ended under the load of {way}", server.tail())
        handed_over = _loaded(servers) - before
        for server in servers:
            server.pause()
        return Run(way, load.rate, load.offered, batch, handed_over)

    def _router(self, way: str) -> list[str]:
        ours = [sys.executable, "-m", "disagg.cli", "router", "--host", "127.0.0.1"]
        ours += ["--port", "{port}"]
        if way == COLOCATED:
            urls = [("--decode", server.url) for server in self._plain]
            return [*ours, "--decode-policy", "least_loaded", *(w for pair in urls for w in pair)]
        prefill, decode = self._apart
        local = 0 if way == APART_ALL else self._plan.local_prefill_tokens
        ours += ["--local-prefill-tokens", str(local)]
        if way == APART_WHOLE:
            ours += ["--no-follow"]
        if way in (APART, APART_WHOLE) and self._plan.prefill_wait_share is not None:
            ours += ["--prefill-wait-share", str(self._plan.prefill_wait_share)]
        if way in (APART, APART_WHOLE):
            ours += ["--first-token", self._plan.first_token]
            ours += ["--first-token-hold-s", str(self._plan.first_token_hold_s)]
        return [*ours, "--prefill", prefill.url, "--decode", decode.url]


def _loaded(servers: Sequence[VllmServer]) -> int:
    """Handoffs that arrived, by the engines' own count."""
    loaded = "disagg_handoffs_total{outcome=loaded"
    found = [server.metrics("disagg_handoffs") for server in servers]
    return round(sum(v for counts in found for k, v in counts.items() if k.startswith(loaded)))


# ---- measuring -----------------------------------------------------------------------------


def _measure(
    plan: ServePlan, scene: _Scene, loads: Sequence[ServeLoad], console: Console
) -> list[Run]:
    for way in plan.ways:
        # Two requests of each kind at once, so that every engine has seen its load. Of many kinds
        # some, the longest among them.
        sizes = {(ask.prompt_tokens, ask.output_tokens) for load in loads for ask in load.asks}
        some = sorted(sizes, reverse=True)[:: max(1, len(sizes) // 4)]
        asks = [Ask(0.0, *size) for size in some for _ in range(2)]
        _tell(scene.run(way, ServeLoad(None, 0.0, asks), f"{plan.seed} {way} warm-up"), console)
        console.print(f"{way} is warm")
    generator = random.Random(plan.seed)
    runs = []
    for load in loads:
        for way in generator.sample(plan.ways, len(plan.ways)):
            one = scene.run(way, load, f"{plan.seed} {way} {load.rate}")
            _tell(one, console)
            console.print(line(row(one, plan.targets)))
            runs.append(one)
    order = {way: number for number, way in enumerate(plan.ways)}
    return sorted(runs, key=lambda one: (one.offered, order[one.way]))


def _tell(one: Run, console: Console) -> None:
    """Print the first failed requests."""
    problems = [outcome for outcome in one.batch.outcomes if outcome.problem is not None]
    for outcome in problems[:_MOST_PROBLEMS]:
        asked = outcome.ask
        console.print(
            f"  {one.way}: {asked.prompt_tokens} tokens at {asked.at:.2f} s: {outcome.problem}",
            markup=False,
        )
