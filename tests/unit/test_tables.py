"""Tables in a terminal: nothing is cut off, and nothing is longer than a line."""

import io
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

import disagg
from disagg.tables import LIMIT, parts, show

PACKAGE = Path(disagg.__file__).parent


def _table(columns: int, cell: str = "1,234 / 5,678") -> Table:
    table = Table(title="Many figures", caption="All of them")
    table.add_column("load")
    table.add_column("way")
    for number in range(columns):
        table.add_column(f"a figure with a long name, {number}", justify="right", no_wrap=True)
    for row in range(3):
        table.add_row(f"{row}/s", "apart", *(f"{cell}{number}" for number in range(columns)))
    return table


def _printed(table: Table, keys: int = 2) -> list[str]:
    console = Console(width=LIMIT, file=io.StringIO())
    for part in parts(table, console, keys=keys):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_narrow_table_stays_one() -> None:
    lines = _printed(_table(3))
    assert sum("load" in line for line in lines) == 1
    assert all(f"1,234 / 5,678{number}" in "\n".join(lines) for number in range(3))


@pytest.mark.parametrize("columns", [6, 12, 40])
def test_a_wide_table_loses_nothing(columns: int) -> None:
    lines = _printed(_table(columns))
    assert max(map(len, lines)) <= LIMIT
    text = "\n".join(lines)
    for number in range(columns):
        assert text.count(f"1,234 / 5,678{number} ") == 3  # whole, once a row
    heads = [at for at, line in enumerate(lines) if "load" in line]
    assert len(heads) > 1
    # The rows are named in each part.
    for begin, end in pairwise([*heads, len(lines)]):
        assert sum("2/s" in line and "apart" in line for line in lines[begin:end]) == 1
    assert text.count("Many figures") == text.count("All of them") == 1


def test_a_sentence_in_a_cell_folds() -> None:
    lines = _printed(_table(1, "a sentence that says why something was left out, at length; " * 3))
    assert max(map(len, lines)) <= LIMIT


def test_a_table_that_just_does_not_fit() -> None:
    """One long cell folds before a column moves to the next part, and nothing is cut off."""
    table = Table()
    table.add_column("way", no_wrap=True)
    heads = ["MB", "KiB", "at once", "ms", "best", "GB/s", "x memcpy", "x NIXL", "x NIXL tcp"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_row("nixl posix,sysv,cma,self +no errors", *(f"{n}234.5" for n in range(len(heads))))
    lines = _printed(table, keys=1)
    assert max(map(len, lines)) <= LIMIT
    text = "\n".join(lines)
    assert all(line.endswith(("┃", "│")) for line in lines if line.startswith(("┃", "│")))
    assert all(f" {n}234.5 " in text for n in range(len(heads)))


def test_the_usual_width_is_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    show(_table(8), keys=2)
    assert 60 < max(map(len, capsys.readouterr().out.splitlines())) <= LIMIT


def test_benches_print_their_tables_here() -> None:
    """Nobody widens a console of their own, which is how lines became too long."""
    own = {path.name for path in PACKAGE.rglob("*.py") if "Console(width" in path.read_text()}
    assert own == {"tables.py"}


def test_a_word_that_is_longer_than_its_column_is_folded() -> None:
    table, words = Table("used", "where"), [("a.name_" * 12, "a/path/" * 12), ("short", "here")]
    for row in words:
        table.add_row(*row)
    lines = _printed(table, keys=1)
    assert max(map(len, lines)) <= LIMIT
    cells = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    found = ["".join(cell.strip() for cell in column) for column in zip(*cells, strict=True)]
    assert found == ["".join(column) for column in zip(*words, strict=True)]
