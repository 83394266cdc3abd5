"""`disagg bench pages`: write the newest results into the benchmark pages.

A page is written by hand, except for what stands between two marks:

    <!-- results: router -->
    <!-- /results -->

There the tables of the newest results file of that command are written. `summary` is not a command:
it lists all targets with their verdicts. Running it twice changes nothing. It also writes the
picture at the top of README.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from disagg.bench import glance
from disagg.bench.results import Cell, Machine, Result, Row, Target, newest
from disagg.bench.shown import EXACT_DIGITS, cell, described, number, target_row
from disagg.errors import ConfigError

PAGES, RESULTS = Path("docs/benchmarks"), Path("benchmarks/results")
PICTURE = Path("docs/images/at-a-glance.svg")
SUMMARY = "summary"
_MISSED = "**missed**"
_MARKED = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- /results -->)", re.S)

Newest = Mapping[str, tuple[Path, Result]]


def run(pages: Path, results: Path, picture: Path, *, check: bool) -> int:
    """Write the pages, and the picture if there are results for it.

    `check`: write nothing; status 1 if one is out of date.
    """
    console = Console(highlight=False, soft_wrap=True)
    files = sorted(pages.glob("*.md"))
    if not files:
        raise ConfigError(f"--pages: {pages} has no page; run it from the root of a checkout")
    found, stale = newest(results), 0
    drawn = glance.drawn(found)
    for page, text in [*made(files, found), *([(picture, drawn)] if drawn else [])]:
        if page.exists() and text == page.read_text(encoding="utf-8"):
            continue
        stale += 1
        if not check:
            page.write_text(text, encoding="utf-8")
        console.print(f"{page}: {'out of date' if check else 'written'}", markup=False)
    console.print(f"{len(files)} pages, {len(found)} commands with results, {stale} changed")
    return int(check and stale > 0)


def made(files: Sequence[Path], found: Newest) -> Iterator[tuple[Path, str]]:
    """Each page with its new text. Raises `ConfigError` for a command without a place."""
    texts = {page: page.read_text(encoding="utf-8") for page in files}
    pages = {
        match["name"]: page for page, text in texts.items() for match in _MARKED.finditer(text)
    }
    if homeless := sorted(set(found) - set(pages)):
        raise ConfigError(
            f"results of {', '.join(homeless)}: no page has a place for them; add the lines "
            f"<!-- results: {homeless[0]} --> and <!-- /results --> to one"
        )
    for page, text in texts.items():

        def block(match: re.Match[str], page: Path = page) -> str:
            name = match["name"]
            inner = _summary(found, pages) if name == SUMMARY else _block(found.get(name), page)
            return f"{match[1]}\n{inner}\n{match[3]}"

        yield page, _MARKED.sub(block, text)


# ---- one command -------------------------------------------------------------------------------


def _block(file: tuple[Path, Result] | None, page: Path) -> str:
    if file is None:
        return "Not measured yet: there is no results file.\n"
    path, result = file
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    parts = [
        f"Measured {result.date.replace('T', ' ')} on {described(result.machine)} "
        f"([results file]({link}))."
    ]
    if result.versions:
        parts.append(f"Versions: {', '.join(f'{k} {v}' for k, v in result.versions.items())}.")
    if result.transcribed_from:
        parts.append(f"Transcribed from {result.transcribed_from}.")
    if result.note:
        parts.append(result.note)
    text = "\n".join(parts) + f"\n\n```\n{result.command_line}\n```\n"
    for table in result.tables:
        text += f"\n**{table.title}**\n\n{_table(table.rows)}\n"
    if result.targets:
        rows = [target_row(one, missed=_MISSED) for one in result.targets]
        text += f"\n**Targets**\n\n{_table(rows)}\n"
    return text


def _table(rows: Sequence[Row]) -> str:
    """A Markdown table; its columns are all keys of all rows, in their order."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [_line(columns), "|".join(["", *("---" for _ in columns), ""])]
    return "\n".join([*lines, *(_line([_cell(row.get(c)) for c in columns]) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Cell) -> str:
    return cell(value).replace("|", "\\|")


# ---- all commands ------------------------------------------------------------------------------


def _summary(found: Newest, pages: Mapping[str, Path]) -> str:
    rows: list[Row] = []
    for name in sorted(found, key=lambda one: (pages[one].name, one)):
        result, page = found[name][1], pages[name]
        where: Row = {
            "results": f"[{name}]({page.name})",
            "date": result.date[:10],
            "machine": _label(result.machine),
        }
        by_name: dict[str, list[Target]] = {}
        for one in result.targets:
            by_name.setdefault(one.name, []).append(one)
        for target, ones in by_name.items():
            limits = sorted({one.limit for one in ones})
            low, high = (f(one.measured for one in ones) for f in (min, max))
            shown = dict.fromkeys(number(one, EXACT_DIGITS) for one in (low, high))
            met = sum(one.met for one in ones)
            rows.append(
                where
                | {
                    "target": target,
                    "limit": limits[0] if len(limits) == 1 else "by size",
                    "measured": " to ".join(shown),
                    "verdict": f"{'met' if met == len(ones) else _MISSED}, {met} of {len(ones)}",
                }
            )
        if not by_name:
            rows.append(where | {"target": "none"})
    return _table(rows) + "\n"


def _label(machine: Machine) -> str:
    return ", ".join(machine.gpus) or machine.cpu


if __name__ == "__main__":
    raise SystemExit(run(PAGES, RESULTS, PICTURE, check=False))
