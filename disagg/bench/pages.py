"""The pages in `docs/benchmarks/`: prose by hand, and the newest results of each command.

The part between a page's markers is made of the newest results file of its command. All else is
left as it is, so a page can be made again at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from disagg.testing.results import Aim, Result, ResultTable, load

BEGIN, END = "<!-- results: {} -->", "<!-- end of results -->"
_OVERVIEW = "overview"


def update(results: Path, pages: Path) -> list[Path]:
    """Make all pages again. Returns those that changed. Raises `ConfigError`."""
    newest = {result.command: result for result in load(results)}  # the last of a name is newest
    changed = []
    for page in sorted(pages.glob("*.md")):
        text = page.read_text()
        made = made_again(text, newest, page)
        if made != text:
            page.write_text(made)
            changed.append(page)
    return changed


def made_again(text: str, newest: dict[str, Result], page: Path) -> str:
    """The text of a page with current results between its markers."""
    for command in (_OVERVIEW, *newest):
        begin = BEGIN.format(command)
        if begin not in text:
            continue
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(END)
        if not found:
            raise ConfigError(f"{page.name}: {begin} has no {END} behind it")
        shown = overview(newest) if command == _OVERVIEW else section(newest[command])
        text = f"{before}{begin}\n{shown}\n{END}{after}"
    return text


def section(result: Result) -> str:
    """One command's results: command, machine, aims, tables, notes."""
    machine = result.machine
    where = [machine.cpu, f"{machine.cores} cores"]
    where += [f"{machine.memory_gib} GiB"] if machine.memory_gib else []
    where += [f"Linux {machine.kernel}"] if machine.kernel else []
    where += [machine.gpu or "no GPU"]
    lines = ["", "```", result.command_line, "```", "", f"{result.date}, {', '.join(where)}."]
    if result.versions:
        known = (f"{name} {number}" for name, number in result.versions.items())
        lines.append(f"{', '.join(known)}.")
    if result.aims:
        lines += ["", *_aims(result.aims)]
    for table in result.tables:
        lines += ["", *_table(table)]
    lines += [line for note in result.notes for line in ("", note)]
    return "\n".join([*lines, ""])


def overview(newest: dict[str, Result]) -> str:
    """A row for each command and aim."""
    rows = [
        [result.command, result.date, aim.what, aim.asked, aim.measured, _verdict(aim)]
        for _, result in sorted(newest.items())
        for aim in result.aims
    ]
    return "\n".join(["", *_rows(["command", "date", "aim", "asked", "measured", ""], rows), ""])


def _aims(aims: Sequence[Aim]) -> list[str]:
    rows = [[aim.what, aim.asked, aim.measured, _verdict(aim)] for aim in aims]
    return _rows(["aim", "asked", "measured", ""], rows)


def _verdict(aim: Aim) -> str:
    return "met" if aim.met else "**not met**"


def _table(table: ResultTable) -> list[str]:
    title = [f"{table.title}:", ""] if table.title else []
    return [*title, *_rows(table.columns, table.rows)]


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]
