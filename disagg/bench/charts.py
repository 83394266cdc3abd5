"""Which charts the tables of a results file have, by command, and the figures that they draw.

A `Chart` names columns of a table. `panels` reads these columns. It draws nothing: `drawing` does.
The charts are not kept in results files, so that old files get the charts of today.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from disagg.bench.results import Cell, Result, Row, Table, Target
from disagg.bench.shown import DIGITS, cell, number

Kind = Literal["bars", "lines", "stacked"]

_PAIR = re.compile(r"(.+) p50 / p99(, .+)?")
_PLACE = re.compile(r"([\d,]*\.?\d+)(/s)?")
_SIZE = re.compile(r"([\d,]+) MB")
_AT_ONCE = re.compile(r"(\d+) at once")
_MOST_SAID = 40  # figures in the text that stands for a chart


@dataclass(frozen=True)
class Chart:
    """Columns of each table whose title begins with `table`; those that are missing are left out.

    kind: `lines` become bars where `x` is not a number, or has one value only.
    x: columns whose cells, together, are the places on the first axis.
    y: columns with the values. With `by`, one column; each value of the column `by` is a series.
    A column "... p50 / p99" gives both. unit: of the values. reference: series to compare with.
    limit: the name of a target whose limit is drawn, if it is the same everywhere.
    log: axes that are logarithmic; all others begin at 0.
    names: of the series of `y`, if the columns' own do not say what they are.
    """

    kind: Kind
    title: str
    table: str
    x: tuple[str, ...]
    y: tuple[str, ...]
    unit: str
    by: str = ""
    reference: tuple[str, ...] = ()
    limit: str = ""
    log: Literal["", "x", "y", "xy"] = ""
    names: tuple[str, ...] = ()


@dataclass
class Series:
    """One value for each place; None where there is none. `low`: p50, where the values are p99."""

    name: str
    values: list[float | None]
    low: list[float | None] = field(default_factory=list)
    reference: bool = False


@dataclass(frozen=True)
class Panel:
    """The figures of one chart. numbers: the places, if they are numbers. limit: name and value."""

    kind: Kind
    title: str
    x: str
    unit: str
    places: list[str]
    numbers: list[float] | None
    series: list[Series]
    limit: tuple[str, float] | None
    log: str

    @property
    def text(self) -> str:
        """All figures in words, for those who cannot see the chart."""
        said = [
            f"{one.name}: " + ", ".join(_said(self, one, n) for n in range(len(self.places)))
            for one in self.series
        ]
        axes = f"{self.unit} by {self.x}."
        if self.limit is not None:
            axes += f" {self.limit[0]}: {number(self.limit[1], DIGITS)}."
        if len(self.places) * len(self.series) > _MOST_SAID:
            names = ", ".join(one.name for one in self.series)
            return f"{axes} Series: {names}. The table has the figures."
        return f"{axes} {'; '.join(said)}."


def _said(panel: Panel, one: Series, place: int) -> str:
    value = one.values[place]
    if value is None:
        return f"none at {panel.places[place]}"
    low = one.low[place] if one.low else None
    spread = f" (p50 {number(low, DIGITS)})" if low is not None else ""
    return f"{number(value, DIGITS)}{spread} at {panel.places[place]}"


# ---- the charts of each command ----------------------------------------------------------------

_CONNECTORS = ("disagg", "ExampleConnector", "NixlConnector")
_FIRST = "First token of decode"
_SPEED = "Speed, GB/s"
_OUTCOMES = (
    "right", "computed locally", "refused clearly", "wrong tokens", "hung", "engine died",
)  # fmt: skip
MEET = "requests that meet both targets, %"
FIRST_TOKEN = "One request on average, from its arrival to its first token"
"""Of a table with the parts of that time, in their order."""


def _transfer(log: Literal["x", "xy"], *reference: str) -> tuple[Chart, ...]:
    return (
        Chart("lines", "Speed of whole fetches", _SPEED, ("MB",), ("GB/s",), "GB/s", "way",
              reference, log=log),
    )  # fmt: skip


def _parts(x: tuple[str, ...], *parts: str) -> Chart:
    columns = tuple(f"{part}, ms" for part in parts)
    return Chart("stacked", FIRST_TOKEN, FIRST_TOKEN, x, columns, "ms")


_SERVED_PARTS = _parts(
    ("load", "way"),
    "router's queue", "prefill's queue", "prefill", "handoff", "decode's first step",
)  # fmt: skip
_IMPORTED = (
    Chart("bars", "Latency", "Latency", ("run", "time"), ("median", "p99"), "ms"),
    Chart("bars", "Throughput", "Runs", ("run",), ("requests/s", "goodput, requests/s"),
          "requests/s"),
)  # fmt: skip
CHARTS: Mapping[str, tuple[Chart, ...]] = {
    "serve": (
        Chart("lines", "Time between tokens", "", ("load", "help"),
              ("between tokens p50 / p99, ms",), "ms", "way"),
        Chart("lines", "Time to the first token", "", ("load", "help"),
              ("first token p50 / p99, ms",), "ms", "way"),
        Chart("bars", "Goodput", "Goodput", ("way",),
              ("mean gap, requests/s", "every gap, requests/s"), "requests/s"),
        _SERVED_PARTS,
    ),
    "serve-conversations": (
        Chart("bars", "Prompt tokens computed, over the unavoidable ones", "Prompt tokens",
              ("way", "load"), ("computed / unavoidable",), "times"),
        Chart("bars", "Time to the first token", "The same conversations", ("way", "load"),
              ("first token p50 / p99, ms",), "ms"),
        Chart("bars", "Time between tokens", "The same conversations", ("way", "load"),
              ("between tokens p50 / p99, ms",), "ms"),
        _SERVED_PARTS,
    ),
    "reuse": (
        Chart("bars", "Prompt tokens computed, over the unavoidable ones", "Reuse",
              ("policy", "a cache serves"), ("computed / unavoidable",), "times"),
        Chart("bars", "Prompts' tokens that were not computed", "Reuse",
              ("policy", "a cache serves"), ("reuse, %",), "%"),
        Chart("bars", "The engine that computes most, over the mean", "Balance",
              ("policy", "a cache serves"), ("most computed at one / mean",), "times"),
    ),
    "handoff": (
        Chart("bars", "First token of decode after a handoff", _FIRST, ("tokens",),
              (*_CONNECTORS, "prefix cache"), "ms"),
        Chart("bars", "First token of decode: handed off, or computed by decode", _FIRST,
              ("tokens",), ("disagg", "computed by decode"), "ms"),
        Chart("stacked", "One request: prefill, then handoff and first token of decode", _FIRST,
              ("tokens",), ("prefill leg", "disagg"), "ms",
              names=("prefill", "handoff and first token of decode")),
        Chart("bars", "The first handoff between two engines", "First token of the first",
              ("connector",), ("first", "later, median"), "ms"),
    ),
    "offload": (
        Chart("bars", "First token, by the place of the prompt's blocks", "First token",
              ("tokens",), ("own cache", "host", "files", "offloading, host", "simple, host"),
              "ms"),
        Chart("bars", "First token: from host memory, or computed", "First token", ("tokens",),
              ("host", "computed"), "ms"),
    ),
    "transfer": _transfer("x", "memcpy"),
    "transfer-cuda": _transfer("xy", "device copy", "PCIe", "NCCL bare", "sockets bare"),
    "router": (
        Chart("bars", "Requests per second", "answers", ("clients",), ("requests/s",),
              "requests/s", "router"),
        Chart("lines", "First byte, p50", "answers", ("clients",), ("first byte p50, ms",), "ms",
              "router", log="xy"),
        Chart("lines", "First byte, p99", "answers", ("clients",), ("first byte p99, ms",), "ms",
              "router", log="xy"),
    ),
    "router-faults": (
        Chart("bars", "Answers by outcome", "", ("outcome",), ("count",), "requests"),
    ),
    "faults": (
        Chart("stacked", "Answers, all faults together", "Answers, all", ("connector",),
              _OUTCOMES, "requests"),
    ),
    "predicted": (
        Chart("bars", "Measured and predicted", "Measured", ("engines", "figure"),
              ("measured, ms", "predicted, ms"), "ms"),
    ),
    "heal": (
        Chart("bars", "From a SIGKILL until all serves again", "Deaths", ("killed",),
              ("serves again, s", "start of the new engine, s"), "s"),
    ),
    "scale": (
        Chart("bars", "Commands under load, done after", "Commands", ("command",),
              ("done after, s",), "s"),
    ),
    "demo": (
        Chart("bars", "Resident memory by process", "Resident memory", ("process",), ("MB",),
              "MB"),
    ),
    "plan": (
        Chart("bars", "Requests that meet both targets", "Simulated", ("engines",), (MEET,),
              "%", limit=MEET),
        Chart("bars", "Time to the first token", "Simulated", ("engines",),
              ("first token p50 / p99, ms",), "ms"),
        Chart("bars", "Time between tokens", "Simulated", ("engines",),
              ("between tokens p50 / p99, ms",), "ms"),
        _parts(("engines",), "router and HTTP", "prefill's queue", "prefill", "decode's queue",
               "handoff", "decode's first step"),
    ),
    "vllm-bench": _IMPORTED,
    "guidellm": _IMPORTED,
}  # fmt: skip


def charts_of(command: str) -> tuple[Chart, ...]:
    """Of a command or a variant of one: `handoff-tcp` has the charts of `handoff`."""
    known = [name for name in CHARTS if command == name or command.startswith(f"{name}-")]
    return CHARTS[max(known, key=len)] if known else ()


# ---- tables that are computed from a table -----------------------------------------------------


def with_derived(tables: Sequence[Table]) -> Iterator[Table]:
    """The tables, and before each what its chart draws if no table of the file has it."""
    for table in tables:
        if table.title.startswith("Median ms, blocks"):
            yield _speeds(table)
        if table.title.startswith("Answers to each kind of fault"):
            yield _by_connector(table)
        yield table


def _speeds(table: Table) -> Table:
    """GB/s of each way at each size: MB of all fetches over ms."""
    found = _AT_ONCE.search(table.title)
    fetches = int(found[1]) if found else 1
    rows: list[Row] = []
    for row in table.rows:
        for name, value in row.items():
            size, ms = _SIZE.fullmatch(name), as_number(value)
            if size and ms:
                megabytes = int(size[1].replace(",", ""))
                speed = fetches * megabytes / ms
                rows.append({"way": row["way"], "MB": megabytes, "GB/s": float(f"{speed:.3g}")})
    return Table(f"{_SPEED}, from the medians: {table.title.partition(', ')[2]}", rows)


def _by_connector(table: Table) -> Table:
    sums: dict[Cell, dict[str, int]] = {}
    for row in table.rows:
        mine = sums.setdefault(row["connector"], dict.fromkeys(_OUTCOMES, 0))
        for name in _OUTCOMES:
            mine[name] += int(as_number(row.get(name)) or 0)
    rows: list[Row] = [{"connector": name, **counts} for name, counts in sums.items()]
    return Table("Answers, all faults together", rows)


# ---- figures of the charts ---------------------------------------------------------------------


def panels(result: Result, table: Table) -> list[Panel]:
    """The charts that this table has: those whose columns it has."""
    found = (_panel(chart, table, result.targets) for chart in charts_of(result.command))
    return [panel for panel in found if panel is not None]


def _panel(chart: Chart, table: Table, targets: Sequence[Target]) -> Panel | None:
    columns = dict.fromkeys(name for row in table.rows for name in row)
    x, y = ([name for name in names if name in columns] for names in (chart.x, chart.y))
    if not table.title.startswith(chart.table) or not x or not y:
        return None
    if chart.by not in ("", *columns) or (chart.kind == "stacked" and len(y) < len(chart.y[:2])):
        return None
    places, series = _series(chart, table.rows, x, y)
    if not any(value is not None for one in series for value in one.values):
        return None
    numbers = [_place_number(place) for place in places]
    known = [value for value in numbers if value is not None]
    lines = chart.kind == "lines" and len(known) == len(places) > 1
    return Panel(
        kind="bars" if chart.kind == "lines" and not lines else chart.kind,
        title=chart.title,
        x=", ".join(x),
        unit=chart.unit,
        places=places,
        numbers=known if lines else None,
        series=series,
        limit=_limit(chart.limit, targets),
        log=chart.log if lines else chart.log.replace("x", ""),
    )


def _series(
    chart: Chart, rows: Sequence[Row], x: Sequence[str], y: Sequence[str]
) -> tuple[list[str], list[Series]]:
    found: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    places: dict[str, None] = {}
    for row in rows:
        base = ", ".join(cell(row[name]) for name in x if row.get(name) is not None)
        for column in y:
            name = str(row.get(chart.by)) if chart.by else _name(chart, column)
            mine, place, again = found.setdefault(name, {}), base, 1
            while place in mine:  # the same load, run again
                again += 1
                place = f"{base} ({again})"
            places[place] = None
            mine[place] = _values(column, row.get(column))
    series = []
    for name, mine in found.items():
        pairs = [mine.get(place, (None, None)) for place in places]
        low = [value for value, _ in pairs]
        has_low = any(value is not None for value in low)
        values = [value for _, value in pairs]
        if any(value is not None for value in values):
            is_reference = name in chart.reference
            series.append(Series(name, values, low if has_low else [], is_reference))
    return list(places), series


def _name(chart: Chart, column: str) -> str:
    if chart.names:
        return chart.names[chart.y.index(column)]
    return column.removesuffix(f", {chart.unit}")


def _values(column: str, value: Cell) -> tuple[float | None, float | None]:
    """p50 and the value; or None and the value."""
    if _PAIR.fullmatch(column):
        low, _, high = str(value or "").partition(" / ")
        return as_number(low), as_number(high)
    return None, as_number(value)


def as_number(value: Cell) -> float | None:
    """The number of a cell, with or without commas; None if it is none."""
    if value is None or isinstance(value, int | float):
        return value
    text = value.replace(",", "").removesuffix("%").strip()
    return float(text) if re.fullmatch(r"-?\d*\.?\d+", text) else None


def _place_number(place: str) -> float | None:
    found = _PLACE.fullmatch(place)
    return float(found[1].replace(",", "")) if found else None


def _limit(name: str, targets: Sequence[Target]) -> tuple[str, float] | None:
    limits = {
        (one.limit.rpartition(" ")[0], one.at_most if one.at_least is None else one.at_least)
        for one in targets
        if one.name == name
    }
    if len(limits) != 1:
        return None
    words, value = limits.pop()
    return None if value is None else (f"target: {words}", value)
