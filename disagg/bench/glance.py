"""The picture at the top of README.md: the newest `serve` beside the newest `handoff`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from disagg.bench import drawing
from disagg.bench.charts import Panel, Series, panels
from disagg.bench.results import Result
from disagg.bench.shown import described

_COMMANDS = {"serve": "Time between tokens", "handoff": "First token of decode after a handoff"}
_TITLES = (
    "Time between tokens, p99 (less is better)",
    "First token after a handoff (less is better)",
)
_TITLE = "Time between tokens with and without disagg; first token by connector"
_NAMES = {"apart": "prefill and decode apart (disagg)", "colocated": "two plain engines"}
_OURS, _LEFT_OUT = ("apart", "disagg"), ("prefix cache",)


def drawn(found: Mapping[str, tuple[Path, Result]]) -> str | None:
    """The SVG of the newest results; None if a command has none. Raises `ConfigError`."""
    results = [found[name][1] for name in _COMMANDS if name in found]
    charts = [
        panel
        for result in results
        for panel in (_first(result, _COMMANDS[result.command]),)
        if panel is not None
    ]
    if len(charts) < len(_COMMANDS):
        return None
    drawing.require("the picture")
    shown = [replace(panel, title=title) for panel, title in zip(charts, _TITLES, strict=True)]
    return drawing.picture(shown, _TITLE, [_caption(one) for one in results])


def _first(result: Result, title: str) -> Panel | None:
    for table in result.tables:
        for panel in panels(result, table):
            if panel.title == title:
                series = [one for one in panel.series if one.name not in _LEFT_OUT]
                series.sort(key=lambda one: one.name not in _OURS)  # ours has one colour in both
                return replace(panel, series=[_plain(one) for one in series])
    return None


def _plain(one: Series) -> Series:
    """Without p50, which the title does not name."""
    return Series(_NAMES.get(one.name, one.name), one.values)


def _caption(result: Result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    where = ", ".join(filter(None, [described(result.machine), versions]))
    return f"{result.command}: measured {result.date[:10]} on {where}"
