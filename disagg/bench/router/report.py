"""The figures of `bench router`: one row for each case and router, its ratios, and the tables.

Rates and times are medians over the rounds. A ratio is the median of the ratios of the rounds. A
disturbed round changes neither. CPU is the sum over all rounds, because its clock ticks are too
coarse for a single round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from disagg.bench.results import Row, Target, target
from disagg.bench.results import Table as ResultTable
from disagg.bench.router.fake_engine import CHUNKS
from disagg.tables import show as show_table

MODES = ("stream", "whole")
DIRECT, OURS, PEER = "direct", "ours", "vllm-router"
WITH_TWO_PROCESSES, WITH_MIGRATION = "ours-2-processes", "ours-migration"
WITH_TWO_MODELS = "ours-2-models"
WITH_ALL, WITH_ALL_IN_TWO = "ours-all", "ours-all-2-processes"
VARIANTS = (WITH_TWO_PROCESSES, WITH_MIGRATION, WITH_TWO_MODELS, WITH_ALL, WITH_ALL_IN_TWO)
# Peers with engines of their own.
DYNAMO, RAY_SERVE = "dynamo", "ray-serve-llm"
OTHERS = (DYNAMO, RAY_SERVE)
TARGETS = (DIRECT, OURS, *VARIANTS, PEER, *OTHERS)
_FAKES = "the fake engines"
ENGINES = {
    DYNAMO: "Dynamo's mocker at its fastest, in two processes; the frontend tokenizes",
    RAY_SERVE: "a fake engine within Ray's replicas, counted with the router",
}
_MEASURES = ("requests_s", "first_p50", "cpu")
_AS_FAST = (OURS, WITH_ALL, WITH_ALL_IN_TWO)  # as the peer
_BUSY = (16, 64)  # numbers of clients that the targets are for


class RouterCase(NamedTuple):
    """`mode`: of `MODES`."""

    mode: str
    clients: int


class Sample(NamedTuple):
    """One batch. Times in seconds; CPU seconds of all its requests."""

    requests: int
    wall: float
    first_p50: float
    first_p99: float
    whole_p50: float
    whole_p99: float
    cpu_router: float
    cpu_fakes: float
    cpu_load: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.wall


# One sample per round, by case and target.
Samples = dict[tuple[RouterCase, str], list[Sample]]

# Heading and keys of a row, by table. Slashes separate several values of one column.
_COLUMNS = {
    "speed": (
        ("requests/s", ("requests_s",)),
        ("chunks/s", ("chunks_s",)),
        ("first byte ms\np50 / p99", ("first_p50_ms", "first_p99_ms")),
        ("last byte ms\np50 / p99", ("whole_p50_ms", "whole_p99_ms")),
    ),
    "CPU and ratios": (
        ("CPU ms: router\n/ fakes / load", ("cpu_router_ms", "cpu_fakes_ms", "cpu_load_ms")),
        ("CPU s a\nM chunks", ("cpu_s_per_million_chunks",)),
        ("x peer: req/s\n/ first / CPU", tuple(f"{m}_over_peer" for m in _MEASURES)),
        ("x ours: req/s\n/ first / CPU", tuple(f"{m}_over_ours" for m in _MEASURES)),
    ),
}


def rows(samples: Samples) -> list[dict[str, Any]]:
    """All figures, by mode, clients and target."""
    found = []
    for case, name in sorted(samples, key=lambda key: (key[0], TARGETS.index(key[1]))):
        mine = samples[case, name]
        row = _row(case, name, mine)
        row |= _ratios("peer", mine, samples.get((case, PEER)) if name.startswith(OURS) else None)
        variant = name in VARIANTS
        row |= _ratios("ours", mine, samples.get((case, OURS)) if variant else None)
        found.append(row)
    return found


def _row(case: RouterCase, name: str, mine: Sequence[Sample]) -> dict[str, Any]:
    requests = sum(sample.requests for sample in mine)
    rate = _median(mine, lambda s: s.rate)
    streams = case.mode == "stream"
    router = sum(s.cpu_router for s in mine) / requests if name != DIRECT else None
    return {
        **case._asdict(),
        "target": name,
        "requests": requests,
        "requests_s": round(rate, 1),
        "chunks_s": round(rate * CHUNKS) if streams else None,
        "first_p50_ms": _ms(_median(mine, lambda s: s.first_p50)),
        "first_p99_ms": _ms(_median(mine, lambda s: s.first_p99)),
        "whole_p50_ms": _ms(_median(mine, lambda s: s.whole_p50)),
        "whole_p99_ms": _ms(_median(mine, lambda s: s.whole_p99)),
        "cpu_router_ms": _ms(router),
        "cpu_fakes_ms": _ms(sum(s.cpu_fakes for s in mine) / requests),
        "cpu_load_ms": _ms(sum(s.cpu_load for s in mine) / requests),
        "cpu_s_per_million_chunks": (
            round(router / CHUNKS * 1e6, 2) if streams and router is not None else None
        ),
        "requests_s_by_round": [round(s.rate, 1) for s in mine],
    }


def _ratios(
    name: str, mine: Sequence[Sample], theirs: Sequence[Sample] | None
) -> dict[str, float | None]:
    """Below 1 is better, but for requests a second."""
    measures: dict[str, Callable[[Sample], float]] = {
        "requests_s": lambda s: s.rate,
        "first_p50": lambda s: s.first_p50,
    }
    ratios: dict[str, float | None] = {}
    for measure, value in measures.items():
        pairs = [value(a) / value(b) for a, b in zip(mine, theirs or (), strict=bool(theirs))]
        ratios[f"{measure}_over_{name}"] = round(statistics.median(pairs), 3) if pairs else None
    used = sum(s.cpu_router for s in theirs or ())
    cpu = sum(s.cpu_router for s in mine)
    ratios[f"cpu_over_{name}"] = round(cpu / used, 3) if used else None
    return ratios


def _median(mine: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(value(sample) for sample in mine)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


# ---- the results file ------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> list[ResultTable]:
    """One for streams, one for answers in one piece, one of the routers."""
    found = []
    for mode in MODES:
        mine = [_shown(row) for row in report["rows"] if row["mode"] == mode]
        if mine:
            found.append(ResultTable(_title(mode, report["pace_ms"]), mine))
    if report["memory_mb"]:
        found.append(ResultTable("routers, their engines, and memory", _routers(report)))
    return found


def _routers(report: Mapping[str, Any]) -> list[Row]:
    return [
        {
            "router": name,
            "versions": ", ".join(f"{k} {v}" for k, v in report["peers"].get(name, {}).items()),
            "engines": ENGINES.get(name, _FAKES),
            "router's processes": memory["processes"],
            "memory at the start, MB": memory["start"],
            "most memory, MB": memory["most"],
        }
        for name, memory in report["memory_mb"].items()
    ]


def _shown(row: Mapping[str, Any]) -> Row:
    streams = row["mode"] == "stream"
    shown: Row = {"clients": row["clients"], "router": row["target"]}
    shown["requests/s"] = row["requests_s"]
    if streams:
        shown["chunks/s"] = row["chunks_s"]
    shown["first byte p50, ms"] = row["first_p50_ms"]
    shown["first byte p99, ms"] = row["first_p99_ms"]
    if streams:
        shown["router CPU, s per million chunks"] = row["cpu_s_per_million_chunks"]
    shown["router CPU, ms per request"] = row["cpu_router_ms"]
    shown[f"requests/s, ratio to {PEER}"] = row["requests_s_over_peer"]
    shown[f"first byte p50, ratio to {PEER}"] = row["first_p50_over_peer"]
    shown[f"CPU, ratio to {PEER}"] = row["cpu_over_peer"]
    return shown


def targets(report: Mapping[str, Any]) -> list[Target | None]:
    """Against the peer: requests/s when busy, the first byte when idle. And two processes against
    one."""
    found: list[Target | None] = []
    for row in report["rows"]:
        clients, name = row["clients"], row["target"]
        shape = "streams" if row["mode"] == "stream" else "whole answers"
        at = f"{clients} client{'s' if clients > 1 else ''}, {shape}"
        if name in _AS_FAST and clients in _BUSY:
            ratio = row["requests_s_over_peer"]
            what = f"requests/s, {name} to {PEER}"
            found.append(target(what, ratio, at=at, at_least=1.0))
        if name == OURS and clients == 1:
            ratio = row["first_p50_over_peer"]
            found.append(target(f"first byte p50, ratio to {PEER}", ratio, at=at, at_most=1.0))
        if name == WITH_TWO_PROCESSES and clients in _BUSY:
            ratio = row["requests_s_over_ours"]
            found.append(target("requests/s, 2 processes to 1", ratio, at=at, at_least=1.0))
    return found


# ---- tables on the terminal ------------------------------------------------------------------


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print two tables for each mode, then memory and notes."""
    for mode in MODES:
        mine = [row for row in report["rows"] if row["mode"] == mode]
        for what in _COLUMNS if mine else ():
            show_table(_table(mode, what, mine, report["pace_ms"]), keys=2)
    for name, memory in report["memory_mb"].items():
        console.print(
            f"{name}: {memory['processes']} processes, resident memory {memory['start']:g} MB at "
            f"the start, {memory['most']:g} MB at most; in front of {ENGINES.get(name, _FAKES)}"
        )
    console.print("\n" + _notes(report))


def _table(mode: str, what: str, mine: Sequence[Mapping[str, Any]], pace_ms: float) -> Table:
    table = Table(title=f"Routers in front of fake engines, {_title(mode, pace_ms)}: {what}")
    columns = [c for c in _COLUMNS[what] if mode == "stream" or "chunks" not in c[0]]
    table.add_column("clients", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for row in mine:
        if last not in (None, row["clients"]):
            table.add_section()
        last = row["clients"]
        cells = (_cell([row[key] for key in keys]) for _, keys in columns)
        table.add_row(str(row["clients"]), row["target"], *cells)
    return table


def _title(mode: str, pace_ms: float) -> str:
    shape = f"as {CHUNKS} events" if mode == "stream" else "in one piece"
    pace = f", {pace_ms:g} ms between tokens" if pace_ms else ""
    return f"answers {shape}{pace}"


def _cell(values: Sequence[float | None]) -> str:
    if values[0] is None and values[-1] is None:
        return ""
    between = " / " if len(values) == 2 else "/"
    return between.join("-" if value is None else _short(value) for value in values)


def _short(value: float) -> str:
    """With three digits at most after each other, so that three values fit into one column."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _notes(report: Mapping[str, Any]) -> str:
    return (
        f"{report['rounds']} rounds, {report['cores']} cores, load {report['load'][0]:.1f} at the "
        f"end, {report['minutes']:g} minutes. Rates and times: medians over rounds; CPU: of all "
        "rounds, per request. The load generator and the fake engines share the cores with the "
        f"router: {_share(report)}. Where the cores are busy, ratios of requests/s are therefore "
        "closer to 1 than those of CPU. Ratios of req/s: above 1 is better; of first byte (p50) "
        "and of CPU: below 1."
    )


def _share(report: Mapping[str, Any]) -> str:
    parts = []
    for name in (OURS, PEER, *OTHERS):
        shares = []
        for row in report["rows"]:
            if row["target"] == name and row["cpu_router_ms"]:
                others = row["cpu_fakes_ms"] + row["cpu_load_ms"]
                shares.append(others / (others + row["cpu_router_ms"]))
        if shares:
            parts.append(f"they use {min(shares):.0%} to {max(shares):.0%} of the CPU with {name}")
    return ", ".join(parts) or "no router was measured"
