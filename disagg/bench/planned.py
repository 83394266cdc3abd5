"""The page of `disagg plan`, from the figures that its `--json` prints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from disagg.bench import html
from disagg.bench.charts import FIRST_TOKEN, MEET
from disagg.bench.results import (
    SCHEMA,
    Result,
    Row,
    Table,
    Target,
    command_line,
    target,
    this_machine,
    versions,
)

_PARTS = {
    "router": "router and HTTP",
    "prefill_queue": "prefill's queue",
    "prefill": "prefill",
    "decode_queue": "decode's queue",
    "handoff": "handoff",
    "decode_step": "decode's first step",
}
_NOTE = "Simulated: no engine ran."


def writer(path: Path | None) -> Callable[[Mapping[str, Any]], None] | None:
    """What writes the page of a plan to this file. None for no file. Raises `ConfigError`."""
    write = html.writer(path)
    if write is None:
        return None
    return lambda figures: write(result(figures, command_line(sys.argv)))


def result(figures: Mapping[str, Any], called: str) -> Result:
    """The plan as a result: each number of engines that was simulated, and what was assumed."""
    assumed: list[Row] = [{"assumed": line} for line in figures["assumed"]]
    assumed += [{"not modelled": line} for line in figures["not_modelled"]]
    load: list[Row] = [
        {"load": name.replace("_", " "), "value": value if value is not None else "-"}
        for name, value in figures["load"].items()
    ]
    tables = [
        Table("Simulated", _rows(figures)),
        Table(f"{FIRST_TOKEN}, where prefill computed the prompt", _parts(figures)),
        Table("Load and routing", load),
        Table("Assumed, and not modelled", assumed),
    ]
    return Result(
        schema=SCHEMA,
        command="plan",
        date=time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        command_line=called,
        machine=this_machine(),
        versions=versions(),
        tables=[table for table in tables if table.rows],
        targets=_targets(figures),
        note=_reason(figures) + _NOTE,
    )


def _reason(figures: Mapping[str, Any]) -> str:
    return "" if figures["reason"] is None else f"{figures['reason']}. "


def _rows(figures: Mapping[str, Any]) -> list[Row]:
    rows = [_row(one, "chosen" if one == figures["chosen"] else "") for one in _candidates(figures)]
    if figures["not_apart"] is not None:
        rows.append(_row(figures["not_apart"], "not apart"))
    return rows


def _candidates(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """In the order of their engines, so that a chart shows where more of them help."""
    return sorted(figures["candidates"], key=lambda one: (one["prefill"], one["decode"]))


def _row(one: Mapping[str, Any], note: str) -> Row:
    return {
        "engines": _engines(one),
        "cost": one["cost"],
        MEET: _percent(one["share"]),
        "first token p50 / p99, ms": f"{_ms(one['ttft_p50'])} / {_ms(one['ttft_p99'])}",
        "between tokens p50 / p99, ms": f"{_ms(one['itl_p50'])} / {_ms(one['itl_p99'])}",
        "late first tokens": one["late_first"],
        "slow answers": one["slow_next"],
        "do not fit": one["refused"],
        "prefill busy, %": _whole(one["prefill_busy"]),
        "decode busy, %": _whole(one["decode_busy"]),
        "note": note,
    }


def _parts(figures: Mapping[str, Any]) -> list[Row]:
    return [
        {
            "engines": _engines(one),
            **{f"{_PARTS[name]}, ms": _part_ms(seconds) for name, seconds in one["parts"].items()},
        }
        for one in _candidates(figures)
        if one["parts"] is not None
    ]


def _targets(figures: Mapping[str, Any]) -> list[Target]:
    least = figures["targets"]["share"] * 100
    found = [
        target(MEET, _percent(one["share"]), at=_engines(one), at_least=least)
        for one in _candidates(figures)
    ]
    return [one for one in found if one is not None]


def _engines(one: Mapping[str, Any]) -> str:
    return f"{one['prefill']}P{one['decode']}D"


def _percent(share: float) -> float:
    """Rounded down: a missed target must not look met."""
    return math.floor(share * 10000) / 100


def _whole(share: float | None) -> int | None:
    return None if share is None else round(share * 100)


def _part_ms(seconds: float) -> float:
    return float(f"{seconds * 1000:.3g}")


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    ms = seconds * 1000
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
