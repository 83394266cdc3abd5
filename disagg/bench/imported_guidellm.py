"""Results of GuideLLM (`--output kind=json`), as a results file of ours.

Its times are of single requests, by percentiles. `inter_token_latency` is the mean time per token
after the first of each request, which `vllm bench serve` calls TPOT; GuideLLM's own TPOT has the
first token in it. Fields were read from files of GuideLLM 0.8.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.bench.results import SCHEMA, Cell, Machine, Result, Row, Table
from disagg.errors import ConfigError

COMMAND = "guidellm"
# GuideLLM's name, ours, and milliseconds in its unit.
_TIMES = (
    ("time_to_first_token_ms", "first token", 1.0),
    ("inter_token_latency_ms", "per token after the first, mean of a request", 1.0),
    ("time_per_output_token_ms", "per token, the first included", 1.0),
    ("request_latency", "whole request", 1000.0),
)
_STATISTICS = {"mean": "mean", "median": "median", "std": "std_dev"}
_PERCENTILES = ("p90", "p95", "p99")
# Of one run: the column, and the path to it.
_RUN = {
    "model": ("config", "backend", "model"),
    "backend": ("config", "backend", "kind"),
    "requests": ("metrics", "request_totals", "successful"),
    "failed": ("metrics", "request_totals", "errored"),
    "cut off at the end": ("metrics", "request_totals", "incomplete"),
    "seconds": ("duration",),
    "requests/s": ("metrics", "requests_per_second", "successful", "mean"),
    "output tokens/s": ("metrics", "output_tokens_per_second", "successful", "mean"),
    "tokens/s": ("metrics", "tokens_per_second", "successful", "mean"),
    "prompt tokens": ("metrics", "prompt_token_count", "successful", "total_sum"),
    "output tokens": ("metrics", "output_token_count", "successful", "total_sum"),
}
_NEEDED = (("start_time",), _RUN["seconds"], _RUN["requests"], _RUN["requests/s"])


def is_one(document: object) -> bool:
    """Whether this JSON value is a report of GuideLLM."""
    return (
        isinstance(document, dict) and _at(document, ("metadata", "guidellm_version")) is not None
    )


def read(file: Path, document: Mapping[str, Any], called: str) -> Result:
    """The benchmarks of a report, in their order. Raises `ConfigError`."""
    runs = document.get("benchmarks")
    if not isinstance(runs, list) or not runs:
        raise ConfigError(f"{file}: a report of GuideLLM without benchmarks")
    for path in _NEEDED:
        for one in runs:
            value = _at(one, path)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{file}: a report of GuideLLM without {'.'.join(path)}")
    names = _names(runs)
    named = list(zip(names, runs, strict=True))
    tables = [
        Table("Runs", [_run(name, one) for name, one in named]),
        Table("Latency, ms", [row for name, one in named for row in _times(name, one)]),
    ]
    started = max(float(one["start_time"]) for one in runs)
    return Result(
        schema=SCHEMA,
        command=COMMAND,
        date=time.strftime("%Y-%m-%d", time.gmtime(started)),
        command_line=called,
        machine=Machine("unknown"),
        versions={"guidellm": str(_at(document, ("metadata", "guidellm_version")))},
        tables=[table for table in tables if table.rows],
        targets=[],
        note="Imported from a report of GuideLLM, which names no machine.",
    )


def _at(value: object, path: Sequence[str]) -> Any:
    """The value there; None if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """By the load that was asked for; with numbers if that is the same."""
    names = []
    for one in runs:
        kind = _at(one, ("config", "strategy", "type_")) or "run"
        rate, streams = (_at(one, ("config", "strategy", name)) for name in ("rate", "streams"))
        load = f" {rate:g}/s" if rate is not None else f" {streams}" if streams is not None else ""
        names.append(f"{kind}{load}")
    if len(set(names)) < len(names):
        return [f"{name}, run {number}" for number, name in enumerate(names, start=1)]
    return names


def _run(name: str, one: Mapping[str, Any]) -> Row:
    known = {column: _at(one, path) for column, path in _RUN.items()}
    return {"run": name, **{c: _cell(value) for c, value in known.items() if value is not None}}


def _times(name: str, one: Mapping[str, Any]) -> list[Row]:
    """Of the requests that succeeded."""
    rows: list[Row] = []
    for key, shown, scale in _TIMES:
        times = _at(one, ("metrics", key, "successful"))
        places: dict[str, Sequence[str]] = {c: (field,) for c, field in _STATISTICS.items()}
        places |= {each: ("percentiles", each) for each in _PERCENTILES}
        found: Row = {}
        for column, path in places.items():
            value = _at(times, path)
            if isinstance(value, int | float) and math.isfinite(value):
                found[column] = value * scale
        if found:
            rows.append({"run": name, "time": shown, **found})
    return rows


def _cell(value: object) -> Cell:
    return value if isinstance(value, int | float) and math.isfinite(value) else str(value)
