"""Tables in a terminal: no line is longer than 100 characters, unless the terminal is wider.

A wider table becomes several, one above the other. Each repeats the columns that name its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Column, Table

LIMIT = 100
_AROUND = 3  # a cell's padding and one border
_ENDLESS = 10_000
_FOLDED = 28  # a longer cell is a sentence or a path, which may fold


def show(table: Table, *, keys: int = 1) -> None:
    """Print a table to standard output. `keys`: how many of its first columns name a row."""
    console = Console(highlight=False)
    wide = Console(width=max(console.width, LIMIT), highlight=False)
    for part in parts(table, wide, keys=keys):
        wide.print(part)


def parts(table: Table, console: Console, *, keys: int = 1) -> Iterator[Table]:
    """The table as one or more, each of which fits the console. Headings fold, figures do not."""
    names, rest = table.columns[:keys], table.columns[keys:]
    title = True
    while rest:
        taken = 1
        while taken < len(rest) and _slack([*names, *rest[: taken + 1]], console) >= 0:
            taken += 1
        part = _of(table, [*names, *rest[:taken]], console)
        rest = rest[taken:]
        part.title = table.title if title else None
        part.caption = None if rest else table.caption
        title = False
        yield part


def _of(table: Table, columns: Sequence[Column], console: Console) -> Table:
    """A table of some columns of another, without title and caption."""
    part = Table(box=table.box, header_style=table.header_style, title_justify=table.title_justify)
    slack = max(0, _slack(columns, console))
    for column in columns:
        least, most = _widths(column, console)
        more = min(slack, most - least)
        slack -= more
        part.add_column(
            column.header,
            justify=column.justify,
            style=column.style,
            overflow="fold",  # rich's own choice cuts off long words
            width=least + more,
        )
    cells = zip(*(column.cells for column in columns), strict=True)
    for row, line in zip(table.rows, cells, strict=True):
        part.add_row(*line, style=row.style, end_section=row.end_section)
    return part


def _slack(columns: Sequence[Column], console: Console) -> int:
    """Characters that are left of a line; below 0, the columns do not fit."""
    least = sum(_widths(column, console)[0] for column in columns)
    return console.width - 1 - _AROUND * len(columns) - least


def _widths(column: Column, console: Console) -> tuple[int, int]:
    """Of a column: the least that cuts off no figure, and what folds nothing."""
    free = console.options.update(width=_ENDLESS)  # by itself rich measures no wider than a line
    cells = [console.measure(cell, options=free).maximum for cell in column.cells]
    head = console.measure(column.header, options=free)
    widest = max(cells, default=0)
    return max(head.minimum, min(widest, _FOLDED)), max(head.maximum, widest)
