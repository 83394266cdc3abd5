"""`disagg bench import`: results of `vllm bench serve --save-result` or of GuideLLM, as a results
file of ours.

Such files do not say on which machine it was measured, so the results file says "unknown".
`imported_guidellm` reads those of GuideLLM.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.bench import imported_guidellm
from disagg.bench.results import SCHEMA, Cell, Machine, Result, Row, Table, command_line, save
from disagg.errors import ConfigError

COMMAND = "vllm-bench"
_TIMES = {
    "ttft": "first token",
    "tpot": "per token after the first, mean of a request",
    "itl": "between tokens",
    "e2el": "whole request",
}
# Of one run: the column, and vLLM's key.
_RUN = {
    "model": "model_id",
    "backend": "backend",
    "rate asked for, requests/s": "request_rate",
    "most at once": "max_concurrency",
    "requests": "completed",
    "failed": "failed",
    "seconds": "duration",
    "requests/s": "request_throughput",
    "goodput, requests/s": "request_goodput",
    "output tokens/s": "output_throughput",
    "tokens/s": "total_token_throughput",
    "prompt tokens": "total_input_tokens",
    "output tokens": "total_output_tokens",
}
_NEEDED = ("date", "request_throughput", "completed", "duration")


def run(
    file: Path, results: Path | None, page: Callable[[Result], None] | None, argv: Sequence[str]
) -> int:
    """Write the results file and the page that were asked for. Returns the exit status."""
    result = read(file, command_line(argv))
    if results is not None:
        print(f"results file: {save(result, results)}")
    if page is not None:
        page(result)
    return 0


def read(file: Path, called: str) -> Result:
    """The runs of a file: one, or those that `--append-result` added; or all of a report of
    GuideLLM. Raises `ConfigError`."""
    runs = _values(file)
    if len(runs) == 1 and imported_guidellm.is_one(runs[0]):
        return imported_guidellm.read(file, runs[0], called)
    _check(file, runs)
    names = _names(runs)
    tables = [
        Table("Runs", [_run(name, one) for name, one in zip(names, runs, strict=True)]),
        Table(
            "Latency, ms",
            [row for name, one in zip(names, runs, strict=True) for row in _times(name, one)],
        ),
    ]
    return Result(
        schema=SCHEMA,
        command=COMMAND,
        date=max(_date(file, one) for one in runs),
        command_line=called,
        machine=Machine("unknown"),
        versions={},
        tables=[table for table in tables if table.rows],
        targets=[],
        note="Imported from a result of `vllm bench serve`, which names no machine.",
    )


def _values(file: Path) -> list[Any]:
    """JSON values after each other."""
    try:
        rest, decoder = file.read_text(encoding="utf-8").strip(), json.JSONDecoder()
        values = []
        while rest:
            one, end = decoder.raw_decode(rest)
            values.append(one)
            rest = rest[end:].lstrip()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    return values


def _check(file: Path, runs: Sequence[Any]) -> None:
    wrong = [
        name for one in runs for name in _NEEDED if not isinstance(one, dict) or name not in one
    ]
    if wrong or not runs:
        missing = f"it has no {wrong[0]}" if wrong else "it is empty"
        raise ConfigError(
            f"{file}: not a result of `vllm bench serve --save-result` or GuideLLM: {missing}"
        )


def _names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """By the rate that was asked for; with numbers if that is the same."""
    names = [f"{_cell(one.get('request_rate'))}/s" for one in runs]
    if len(set(names)) < len(names):
        return [f"{name}, run {number}" for number, name in enumerate(names, start=1)]
    return names


def _run(name: str, one: Mapping[str, Any]) -> Row:
    known = {column: one[key] for column, key in _RUN.items() if one.get(key) is not None}
    return {"run": name, **{column: _cell(value) for column, value in known.items()}}


def _times(name: str, one: Mapping[str, Any]) -> list[Row]:
    """Mean, median and the percentiles that vLLM was asked for."""
    rows: list[Row] = []
    for key, shown in _TIMES.items():
        found: Row = {}
        for statistic in ("mean", "median", "std", *_percentiles(one, key)):
            value = one.get(f"{statistic}_{key}_ms")
            if value is not None:
                found[statistic] = _cell(value)
        if found:
            rows.append({"run": name, "time": shown, **found})
    return rows


def _percentiles(one: Mapping[str, Any], key: str) -> list[str]:
    matches = (re.fullmatch(rf"(p[\d.]+)_{key}_ms", name) for name in one)
    return sorted((m[1] for m in matches if m), key=lambda name: float(name[1:]))


def _date(file: Path, one: Mapping[str, Any]) -> str:
    """vLLM writes 20261128-140312, by the clock of its machine: the day is kept."""
    found = re.fullmatch(r"(\d{4})(\d\d)(\d\d)-\d{6}", str(one["date"]))
    if not found:
        raise ConfigError(f"{file}: date: {one['date']!r} — must be as in 20261128-140312")
    return "-".join(found.groups())


def _cell(value: object) -> Cell:
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return str(value)
