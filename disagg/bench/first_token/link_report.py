"""Of `disagg bench handoff --link`: from samples to rows, tables and targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from disagg.bench.first_token.pairs import SHOWN, SOCKETS
from disagg.bench.results import Cell, Row, Target, target
from disagg.bench.results import Table as ResultTable

# First token of `streamed` over prefill alone, where the transfer takes as long as prefill.
AIMS = {4: 1.30, 16: 1.10}
_RATIO, _AFTER = "over prefill alone", "after prefill, ms"


@dataclass(frozen=True)
class Sample:
    """One handoff, and a plain request to the same prefill engine just before. Of the way `beside`
    both times are the prefill engine's.

    In seconds from the start: first_s to decode's first token, prefilled_s to the prefill engine's
    answer. rate: of the link, in bits per second; None: there was none.
    """

    connector: str
    way: str
    steps: int
    alone_s: float
    first_s: float
    prefilled_s: float
    right: bool
    rate: int | None

    @property
    def ratio(self) -> float:
        """First token over prefill alone."""
        return self.first_s / self.alone_s

    def __str__(self) -> str:
        wrong = "" if self.right else ", WRONG TOKENS"
        return (
            f"{self.way} {self.first_s * 1000:.0f} ms, {self.ratio:.2f} of "
            f"{self.alone_s * 1000:.0f}{wrong}"
        )


@dataclass(frozen=True)
class Missing:
    """What was not measured, and why. steps: None: whatever their number."""

    connector: str
    why: str
    steps: int | None = None

    def __str__(self) -> str:
        steps = "" if self.steps is None else f", {steps_text(self.steps)}"
        return f"{SHOWN[self.connector]}{steps}: not measured: {self.why}"


def steps_text(steps: int) -> str:
    """Such as `4 steps`."""
    return f"{steps} {'step' if steps == 1 else 'steps'}"


def rows(samples: Sequence[Sample], kv_bytes: int, *, auto: bool) -> list[Row]:
    """Medians by steps, connector and way, in the order of the samples. kv_bytes: of one prompt.
    auto: whether the link was as fast as prefill, for which there are aims."""
    groups: dict[tuple[int, str, str], list[Sample]] = {}
    for one in samples:
        groups.setdefault((one.steps, one.connector, one.way), []).append(one)
    found: list[Row] = []
    for (steps, connector, way), ones in groups.items():
        row: Row = {"steps": steps, "connector": SHOWN[connector], "way": way}
        row["first token, ms"] = _ms([one.first_s for one in ones])
        row[_RATIO] = round(statistics.median(one.ratio for one in ones), 3)
        transfers = [kv_bytes * 8 / one.rate / one.alone_s for one in ones if one.rate]
        if transfers:
            row["ideal"] = round(ideal(way, steps, statistics.median(transfers)), 2)
        if auto and way == "streamed" and steps in AIMS:
            row["aim"] = AIMS[steps]
        row["prefill alone, ms"] = _ms([one.alone_s for one in ones])
        if connector != SOCKETS:
            row["prefill leg, ms"] = _ms([one.prefilled_s for one in ones])
            row[_AFTER] = _ms([one.first_s - one.prefilled_s for one in ones])
        if rates := [one.rate for one in ones if one.rate]:
            row["link, Mbit/s"] = round(statistics.median(rates) / 1e6, 1)
        found.append(row)
    return found


def ideal(way: str, steps: int, transfer: float) -> float:
    """First token over prefill alone where nothing else takes time. transfer: over prefill alone,
    too."""
    if way == "beside":
        return 1
    if way == "serial":
        return 1 + transfer
    # The last step's part follows prefill; or, on a slower link, all parts follow the first step.
    return max(1 + transfer / steps, 1 / steps + transfer)


def tables(rows: Sequence[Row], title: str, missing: Sequence[Missing]) -> list[ResultTable]:
    """For the page: what was measured, and what was not."""
    found = [ResultTable(title, list(rows))]
    if missing:
        gaps: list[Row] = [
            {"connector": SHOWN[one.connector], "steps": one.steps, "why": one.why}
            for one in missing
        ]
        found.append(ResultTable("Not measured", gaps))
    return found


def table(rows: Sequence[Row], title: str) -> Table:
    """For the terminal. Its first three columns name a row."""
    made = Table(title=title)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        made.add_column(column, justify="left" if column in ("connector", "way") else "right")
    for row in rows:
        made.add_row(*(_shown(row.get(column)) for column in columns))
    return made


def targets(rows: Sequence[Row], wrong: int, *, paced: bool) -> list[Target | None]:
    """paced: whether peers were measured over the same link; ExampleConnector knows none, so it is
    compared only without."""
    found: list[Target | None] = []
    for row in rows:
        if row["connector"] != SHOWN["ours"]:
            continue
        ratio, at = _number(row, _RATIO), f"{row['steps']} steps, {row['way']}"
        if "aim" in row:
            name = "first token, ratio to prefill alone"
            found.append(target(name, ratio, at=at, at_most=_number(row, "aim")))
        for peer in rows:
            same = (peer["steps"], peer["way"]) == (row["steps"], "serial")
            if paced and same and str(peer["connector"]).startswith("Nixl"):
                name = f"first token over prefill alone, ratio to {peer['connector']}"
                measured = round(ratio / _number(peer, _RATIO), 3)
                found.append(target(name, measured, at=at, at_most=1.0))
            if not paced and peer["connector"] == SHOWN["example"]:
                name = f"first token after the prefill leg, ratio to {peer['connector']}"
                measured = round(_number(row, _AFTER) / _number(peer, _AFTER), 3)
                found.append(target(name, measured, at=at, at_most=1.0))
    name = "answers with other tokens than the prefill engine's own"
    return [*found, target(name, float(wrong), at_most=0)]


def _shown(value: Cell) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:g}"
    return "" if value is None else str(value)


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1000, 1)


def _number(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return float(value)
