"""One page of HTML for results: command, machine, versions, targets, and each table with charts.

The page is one file. It names nothing outside itself, runs no script, and follows the reader's
light or dark. Whatever a results file says is escaped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from disagg.bench import drawing
from disagg.bench.charts import panels, with_derived
from disagg.bench.results import Cell, Result, Row, Table
from disagg.bench.shown import cell, described, target_row
from disagg.errors import ConfigError

_CSS = """
body { background: var(--back); color: var(--text); font: 16px/1.5 %(font)s; margin: 0; }
main { margin: 0 auto; max-width: 110rem; padding: 1rem; }
.results { display: grid; gap: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%%, 34rem), 1fr)); }
article { max-width: 64rem; min-width: 0; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2rem; }
h1, h2, h3, code, dd { overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 0; }
dl { display: grid; gap: .25rem 1rem; grid-template-columns: max-content 1fr; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%%, 26rem), 1fr)); }
figure { margin: 0 0 1rem; max-width: 44rem; }
figure svg { display: block; height: auto; width: 100%%; }
.scroll { overflow-x: auto; } .scroll:focus-visible { outline: 2px solid var(--c0); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { font-weight: 600; padding: .3rem 0; text-align: left; }
th, td { border-bottom: 1px solid var(--grid); padding: .3rem 1rem .3rem 0;
  text-align: left; vertical-align: top; }
.n { text-align: right; } .short { white-space: nowrap; } .missed { font-weight: 700; }
svg * { stroke-linecap: butt; stroke-linejoin: round; }
@media print { .scroll { overflow: visible; } }
"""
_SHORT = 24  # characters of a cell that stays one line
# It loads nothing, whatever is in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def writer(path: Path | None) -> Callable[[Result], None] | None:
    """What writes the page of one result to this file. None for no file.

    Raises `ConfigError` now, before anything is measured, if it could not be written then.
    """
    if path is None:
        return None
    _check(path)
    return lambda result: save([result], path)


def save(results: Sequence[Result], path: Path) -> None:
    """Write the page of these results. Raises `ConfigError`."""
    _check(path)
    path.write_text(page(results), encoding="utf-8")
    print(f"report: {path}", file=sys.stderr)  # standard output may be JSON


def _check(path: Path) -> None:
    drawing.require("--html")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--html: {path} — must be a file in a folder that exists")


def page(results: Sequence[Result]) -> str:
    """The page. Several results stand beside each other where there is room."""
    names = list(dict.fromkeys(_name(one) for one in results))
    title = ", ".join(names)
    style = drawing.css(":root") + _CSS % {"font": drawing.FONT}
    body = "\n".join(_article(one, f"r{n}") for n, one in enumerate(results))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n"
        f'<body><main><h1>{escape(title)}</h1>\n<div class="results">\n{body}\n</div>'
        "</main></body></html>\n"
    )


def _name(result: Result) -> str:
    return f"disagg {result.command}" if result.command == "plan" else result.command


def _article(result: Result, name: str) -> str:
    parts = [f'<article aria-label="{escape(_name(result))}, {escape(result.date)}">']
    parts.append(_head(result))
    if result.targets:
        rows = [target_row(one) for one in result.targets]
        parts.append(f"<h2>Targets</h2>\n{_table('Targets', rows)}")
    for number_, table in enumerate(with_derived(result.tables)):
        parts.append(_section(result, table, f"{name}t{number_}"))
    return "\n".join([*parts, "</article>"])


def _head(result: Result) -> str:
    facts = {
        "command": f"<code>{escape(result.command_line)}</code>",
        "date": escape(result.date.replace("T", " ")),
        "machine": escape(described(result.machine)),
        "versions": escape(", ".join(f"{k} {v}" for k, v in result.versions.items())),
        "from": escape(result.transcribed_from or ""),
        "note": escape(result.note),
    }
    shown = "\n".join(f"<dt>{key}</dt><dd>{text}</dd>" for key, text in facts.items() if text)
    return f"<dl>{shown}</dl>"


def _section(result: Result, table: Table, name: str) -> str:
    charts = [
        f"<figure><figcaption><h3>{escape(panel.title)}</h3></figcaption>\n"
        f"{drawing.svg(panel, f'{name}p{number_}')}</figure>"
        for number_, panel in enumerate(panels(result, table))
    ]
    drawn = f'<div class="charts">{"".join(charts)}</div>\n' if charts else ""
    heading = f"<h2>{escape(table.title)}</h2>"
    return f"<section>{heading}\n{drawn}{_table(table.title, table.rows)}</section>"


def _table(title: str, rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not rows:
        return "<p>No rows.</p>"
    head = "".join(f'<th scope="col"{_right(rows, c)}>{escape(c)}</th>' for c in columns)
    lines = "\n".join(
        f"<tr>{''.join(_cell(row.get(c), _right(rows, c)) for c in columns)}</tr>" for row in rows
    )
    # A table that is too wide scrolls, by the keyboard too.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )


def _right(rows: Sequence[Row], column: str) -> str:
    """Numbers stand on the right."""
    words = any(isinstance(row.get(column), str) for row in rows)
    return "" if words else ' class="n"'


def _cell(value: Cell, right: str) -> str:
    short = isinstance(value, str) and len(value) <= _SHORT
    look = ' class="missed"' if value == "missed" else ' class="short"' if short else right
    return f"<td{look}>{escape(cell(value))}</td>"
