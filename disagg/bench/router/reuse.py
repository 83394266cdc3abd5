"""`disagg bench reuse`: how much of a trace's prompts many engines compute twice.

The engines are simulated, and say so in every output: they keep the names of blocks in LRU caches
and the time that a prompt would take. The router's part is real: the policies that choose engines,
the load that they see, the picture of the caches, which the engines' KV events feed through the
router's own decoders, and who fetches from whom. Time is simulated; nothing sleeps.

Only prefill is simulated. Two forms: an engine's cache serves that engine alone; or an engine that
lacks a prefix gets it from another one that holds it (`shares`), as with `share_caches:
always`. A block that moved counts as moved, not as computed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import track
from rich.table import Table

from disagg.bench.results import Output, Row
from disagg.bench.results import Table as ResultTable
from disagg.bench.router import reuse_trace
from disagg.bench.router.reuse_engines import Job, LruCache, SimulatedEngine, Speeds
from disagg.bench.router.reuse_trace import BLOCK, Ideal, TracedRequest
from disagg.config import PairingSection, PolicyName
from disagg.errors import ConfigError
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.policies import make_policy
from disagg.router.pairing.sharing import Moves, Sharing
from disagg.router.request.plan import RequestPlan
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint, Topology
from disagg.tables import show

# Those that choose by more than these traces have.
_NOT_MEASURED = ("session_affinity",)
POLICIES = tuple(name for name in get_args(PolicyName) if name not in _NOT_MEASURED)


@dataclass(frozen=True)
class ReusePlan:
    """What to replay. `engines`: numbers of them. `cache_tokens`: of one engine. `faster`: the
    trace's times are divided by it. `shares`: also measure with caches that serve every
    engine. `requests`: only so many of the first."""

    trace: Path
    engines: Sequence[int]
    cache_tokens: int
    policies: Sequence[str]
    speeds: Speeds
    faster: float = 1.0
    shares: bool = False
    requests: int | None = None

    def check(self) -> None:
        """Raise `ConfigError` for a plan that cannot be measured."""
        problems = [
            f"--policies: {name} — choose from {', '.join(POLICIES)}"
            for name in self.policies
            if name not in POLICIES
        ]
        if not self.policies or len(set(self.policies)) < len(self.policies):
            problems.append("--policies: name at least one, and each once")
        if not self.engines or min(self.engines) < 1:
            problems.append("--engines: each number must be at least 1")
        if self.cache_tokens < BLOCK:
            problems.append(f"--cache-tokens: {self.cache_tokens} — a block has {BLOCK}")
        if min(self.speeds.computed, self.speeds.moved, self.faster) <= 0:
            problems.append("--computed-tokens-s, --moved-tokens-s, --faster: must be above 0")
        if problems:
            raise ConfigError(problems)


def run(plan: ReusePlan, output: Output) -> int:
    """Replay the trace with each policy and form, and print. Returns the exit status."""
    plan.check()
    load = reuse_trace.read(plan.trace)[: plan.requests]
    best = reuse_trace.ideal(load)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_about(plan, best))
    rows = []
    forms = (False, True) if plan.shares else (False,)
    for count, name, shares in itertools.product(plan.engines, plan.policies, forms):
        form = f"{count:,} engines, {name}, {'every cache' if shares else 'own cache'}"
        replay = Replay(plan, count, name, shares=shares)
        for request in track(load, form, console=console, transient=True):
            replay.arrives(request)
        replay.finish()
        rows.append(row(replay, best))
        console.print(
            f"{form}: reuse {rows[-1]['reuse']:.1%}, computed {rows[-1]['over']:.3f} times the "
            "unavoidable"
        )
    pooled = {count: _pooled(plan, count, load) for count in plan.engines}
    tables = _tables(plan, best, pooled, rows)
    for table in tables:
        _print(table)
    output.write(
        reuse_trace.results_name("reuse", plan.trace),
        _figures(plan, best, pooled, rows),
        tables,
        [],
    )
    return 0


# ---- one replay --------------------------------------------------------------------------------


class Replay:
    """One trace on new engines with one policy. Call `arrives` in the order of time, then
    `finish`."""

    def __init__(self, plan: ReusePlan, engines: int, policy: str, *, shares: bool) -> None:
        self.plan, self.policy, self.shares = plan, policy, shares
        self.now_s = 0.0
        self.first_s: list[float] = []
        """Seconds from the arrival of a request to the end of its prompt."""
        self._caches, self._in_flight = EngineCaches(), InFlight(RouterMetrics())
        self.engines: dict[str, SimulatedEngine] = {}
        self._endpoints: list[EngineEndpoint] = []
        for number in range(engines):
            name = f"prefill-{number}"
            picture = self._caches.join(name)
            cache = LruCache(plan.cache_tokens // BLOCK)
            self.engines[name] = SimulatedEngine(name, cache, picture, plan.speeds)
            self._endpoints.append(EngineEndpoint(name, "prefill", f"http://{name}.test"))
        settings = PairingSection()
        kind: Any = policy  # checked by the plan
        metrics, topology = RouterMetrics(), Topology(self._endpoints)
        self._sharing: Sharing | None = None
        if shares:
            self._sharing = Sharing(
                topology,
                self._caches,
                self._in_flight,
                Health(metrics, is_known=topology.has),
                Compatibility(),
                Moves(self._in_flight, always=True),
            )
        self._policy = make_policy(kind, settings, self._in_flight, self._caches, self._sharing)
        self._ends: list[tuple[float, int, SimulatedEngine]] = []
        self._order = itertools.count()

    def arrives(self, request: TracedRequest) -> None:
        """A request comes. Whatever ends before it ends now."""
        at = request.timestamp / 1000 / self.plan.faster
        self._until(at)
        self.now_s = at
        body = {"model": "traced", "prompt": request.token_ids()}
        plan = RequestPlan("/v1/completions", body)
        chosen = self._policy.choose(plan, self._endpoints)
        engine = self.engines[chosen.engine.name]
        # As `pairing/admission.py` does.
        seat = self._in_flight.take(chosen.engine, chosen.work)
        source = self._source(plan, chosen.engine)
        engine.queue.append(Job(request, at, seat, source))
        if len(engine.queue) == 1:
            self._begin(engine)

    def finish(self) -> None:
        """Nothing more comes."""
        self._until(float("inf"))

    def _source(self, plan: RequestPlan, endpoint: EngineEndpoint) -> SimulatedEngine | None:
        """The engine that the router would name."""
        found = self._sharing.source(plan, endpoint) if self._sharing is not None else None
        return None if found is None else self.engines[found.engine.name]

    def _begin(self, engine: SimulatedEngine) -> None:
        end = self.now_s + engine.begin()
        heapq.heappush(self._ends, (end, next(self._order), engine))

    def _until(self, at: float) -> None:
        while self._ends and self._ends[0][0] <= at:
            self.now_s, _, engine = heapq.heappop(self._ends)
            job = engine.end()
            job.seat.leave()
            self.first_s.append(self.now_s - job.arrived_s)
            if engine.queue:
                self._begin(engine)


# ---- figures -----------------------------------------------------------------------------------


def row(replay: Replay, best: Ideal) -> dict[str, Any]:
    """The figures of a replay.

    `reuse`: share of the prompts' tokens that were not computed. `over`: computed tokens over the
    unavoidable ones. `moved`: share of the prompts' tokens that came from other engines.
    `most_computed`: tokens that the engine computed that computed most, over the mean of all.
    `busiest`: share of the time that the busiest engine worked. `used`: engines that computed
    anything. Times: seconds.
    """
    engines = list(replay.engines.values())
    computed = [engine.computed for engine in engines]
    first = sorted(replay.first_s)
    total = sum(computed)
    return {
        "engines": len(engines),
        "policy": replay.policy,
        "shares": replay.shares,
        "reuse": round(1 - total / best.tokens, 4),
        "over": round(total / best.unavoidable, 4),
        "computed": total,
        "moved": round(sum(engine.moved for engine in engines) / best.tokens, 4),
        "evicted_blocks": sum(engine.evicted for engine in engines),
        "used": sum(engine.requests > 0 for engine in engines),
        "most_computed": round(max(computed) * len(engines) / total, 3),
        "most_requests": max(engine.requests for engine in engines),
        "busiest": round(max(e.busy_s for e in engines) / max(replay.now_s, 1e-9), 4),
        "first_p50_s": round(_rank(first, 0.5), 3),
        "first_p99_s": round(_rank(first, 0.99), 3),
    }


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _pooled(plan: ReusePlan, engines: int, load: Sequence[TracedRequest]) -> int:
    """Tokens that are computed with one cache as large as those of all engines together."""
    return reuse_trace.computed(load, LruCache(engines * (plan.cache_tokens // BLOCK)))


def _figures(
    plan: ReusePlan, best: Ideal, pooled: Mapping[int, int], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "simulated": True,
        "trace": plan.trace.name,
        "engines": list(plan.engines),
        "cache_tokens": plan.cache_tokens,
        "computed_tokens_s": plan.speeds.computed,
        "moved_tokens_s": plan.speeds.moved,
        "faster": plan.faster,
        "requests": best.requests,
        "tokens": best.tokens,
        "unavoidable": best.unavoidable,
        "ideal_reuse": round(best.reuse, 4),
        "computed_by_one_cache_of_that_size": {str(count): n for count, n in pooled.items()},
        "rows": list(rows),
    }


def _about(plan: ReusePlan, best: Ideal) -> str:
    return (
        f"SIMULATED engines, the router's real pairing; {plan.trace.name}: "
        f"{best.requests:,} requests, {best.tokens:,} prompt tokens, {best.blocks:,} different "
        f"blocks of {BLOCK}. One endless cache would reuse {best.reuse:.1%}."
    )


def _tables(
    plan: ReusePlan, best: Ideal, pooled: Mapping[int, int], rows: Sequence[dict[str, Any]]
) -> list[ResultTable]:
    def alone(cache: str, computed: int) -> Row:
        return {
            "engines": 1,
            "policy": "",
            "a cache serves": cache,
            "reuse, %": round(100 * (1 - computed / best.tokens), 1),
            "computed / unavoidable": round(computed / best.unavoidable, 3),
        }

    shown = [alone("endless", best.unavoidable)]
    shown += [alone(f"as large as {n:,} together", sum_) for n, sum_ in pooled.items()]
    balance: list[Row] = []
    for one in rows:
        names: Row = {
            "engines": one["engines"],
            "policy": one["policy"],
            "a cache serves": "every engine" if one["shares"] else "its own engine",
        }
        shown.append(
            names
            | {
                "reuse, %": round(one["reuse"] * 100, 1),
                "computed / unavoidable": round(one["over"], 3),
                "moved, % of tokens": round(one["moved"] * 100, 1),
                "blocks evicted": one["evicted_blocks"],
            }
        )
        balance.append(
            names
            | {
                "engines used": one["used"],
                "most requests at one": one["most_requests"],
                "most computed at one / mean": round(one["most_computed"], 1),
                "busiest engine works, %": round(one["busiest"] * 100, 1),
                "prompt computed p50 / p99, s": f"{one['first_p50_s']:g} / {one['first_p99_s']:g}",
            }
        )
    what = f"simulated engines, {plan.trace.stem}"
    return [
        ResultTable(f"Reuse: {what}, {best.requests:,} requests", shown),
        ResultTable(f"Balance: {what}, {plan.cache_tokens:,} tokens of cache each", balance),
    ]


def _print(table: ResultTable) -> None:
    columns = list(dict.fromkeys(key for one in table.rows for key in one))
    shown = Table(*columns, title=table.title, title_justify="left")
    for one in table.rows:
        shown.add_row(*(_cell(one.get(column)) for column in columns))
    show(shown, keys=3)


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,}"
