"""The tables of `disagg bench serve`, and notes on their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.bench.charts import FIRST_TOKEN
from disagg.bench.results import Row, Target, target
from disagg.bench.results import Table as ResultTable
from disagg.bench.serve.score import FIRST_AIM, GAP_AIM, GOOD_SHARE
from disagg.bench.serve.ways import APART
from disagg.tables import show as show_table

_ABOUT_TOKENS = (
    "A load is conversations that begin per second. Computed: prompt tokens that engines ran "
    "through the model, by vLLM's prompt_tokens_by_source. Unavoidable: those that one engine with "
    "an endless cache would compute. Good requests/s: those that met both targets, the mean gap.\n"
)
_MEASURES = {"on_average": "mean gap", "throughout": "every gap"}
_CONVERSATIONS = "The same conversations on each way to serve"
_COMPUTED = "Prompt tokens that the engines computed, over all engines"
_PARTS = {
    "router_queue": "router's queue",
    "prefill_queue": "prefill's queue",
    "prefill": "prefill",
    "handoff": "handoff",
    "decode_step": "decode's first step",
}
_MOST_LENGTHS = 2  # more prompt lengths get no columns of their own


def line(row: Mapping[str, Any]) -> str:
    """A line about one run."""
    failed = f", {row['failed']} failed" if row["failed"] else ""
    return (
        f"{_rate(row)}, {row['way']}: {row['requests']} requests{failed} in {row['seconds']:g} s, "
        f"{row['handed_over']} handed off; first token p99 {_ms(row['ttft_ms']['p99'])} ms, "
        f"between tokens p99 {_ms(row['itl_ms']['p99'])} ms{_over(row)}"
    )


def _over(row: Mapping[str, Any]) -> str:
    tokens = row["tokens"]
    return "" if tokens is None else f"; computed {tokens['over']:.2f} times the unavoidable tokens"


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print all tables, then the notes."""
    shown = [_runs(report["rows"]), _ratios(report["ratios"]), _goodput(report)]
    if _are_conversations(report):
        shown[2:] = [_computed(report["rows"])]
    for table in shown:
        if table.row_count:
            show_table(table, keys=2)
    console.print("\n" + _notes(report))


# ---- the results file ------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> list[ResultTable]:
    """The runs, then goodput; of conversations, the runs and the tokens that were computed. Last,
    what first tokens that were handed off were made of."""
    parts = [_parts(row) for row in report["rows"] if row["parts_ms"] is not None]
    added = [ResultTable(f"{FIRST_TOKEN}, where it was handed off", parts)] if parts else []
    if _are_conversations(report):
        return [
            ResultTable(_CONVERSATIONS, [_shown(row) for row in report["rows"]]),
            ResultTable(_COMPUTED, [_tokens(row) for row in report["rows"]]),
            *added,
        ]
    goodput: list[Row] = [
        {"way": way, **{f"{name}, requests/s": values[key] for key, name in _MEASURES.items()}}
        for way, values in report["goodput"].items()
    ]
    targets = report["targets"]
    title = (
        f"Goodput: the highest rate up to which {GOOD_SHARE:.0%} of the requests had their first "
        f"token within {targets['ttft_s']:g} s and the others every {targets['itl_s'] * 1000:g} ms"
    )
    runs = [_shown(row) for row in report["rows"]]
    return [
        ResultTable("The same load on each way to serve", runs),
        ResultTable(title, goodput),
        *added,
    ]


def _are_conversations(report: Mapping[str, Any]) -> bool:
    return any(row["tokens"] is not None for row in report["rows"])


def _tokens(row: Mapping[str, Any]) -> Row:
    tokens = row["tokens"]
    return {
        "load": _rate(row),
        "way": row["way"],
        "prompt tokens sent": tokens["sent"],
        "computed": tokens["computed"],
        "from the engine's own cache": tokens["cached"],
        "moved from another engine": tokens["moved"],
        "unavoidable": tokens["unavoidable"],
        "computed / unavoidable": round(tokens["over"], 3),
        "good requests/s": row["good_rate"]["on_average"],
    }


def _parts(row: Mapping[str, Any]) -> Row:
    shown = {f"{_PARTS[name]}, ms": ms for name, ms in row["parts_ms"].items()}
    return {"load": _rate(row), "way": row["way"], **shown}


def _shown(row: Mapping[str, Any]) -> Row:
    shown: Row = {"load": _rate(row), "way": row["way"], "requests": row["requests"]}
    shown |= {"failed": row["failed"], "handed off": row["handed_over"]}
    times = {"first token": row["ttft_ms"]}
    times |= {
        f"first token of {length:,} prompt tokens": spread
        for length, spread in row["ttft_ms_by_prompt"].items()
        if 1 < len(row["ttft_ms_by_prompt"]) <= _MOST_LENGTHS
    }
    times["between tokens"] = row["itl_ms"]
    shown |= {f"{name} p50 / p99, ms": _pair(spread) for name, spread in times.items()}
    shown["longest gap, ms"] = row["itl_ms"]["longest"]
    met = " / ".join(f"{row['met'][measure]:.0%}" for measure in _MEASURES)
    return shown | {f"targets met ({' / '.join(_MEASURES.values())})": met}


def targets(report: Mapping[str, Any]) -> list[Target | None]:
    """p99 of `apart` against `colocated`, at each load; of conversations none."""
    found: list[Target | None] = []
    if _are_conversations(report):
        return found  # these aims are of an open load
    for one in report["ratios"]:
        if one["way"] == APART:
            at, gap, first = _rate(one), one["itl_p99"], one["ttft_p99"]
            name = "between tokens p99, colocated / apart"
            found.append(target(name, gap, at=at, at_least=GAP_AIM))
            name = "first token p99, apart / colocated"
            found.append(target(name, first, at=at, at_most=FIRST_AIM))
    return found


# ---- tables on the terminal ------------------------------------------------------------------


def _runs(rows: Sequence[Mapping[str, Any]]) -> Table:
    lengths = sorted({length for row in rows for length in row["ttft_ms_by_prompt"]})
    shown = lengths if 1 < len(lengths) <= _MOST_LENGTHS else []
    table = _table("The same load on each way to serve; times in ms, p50 / p99")
    columns = ["requests", "failed", "handed off", "first token", *(f"at {n:,}" for n in shown)]
    columns += ["between tokens", "longest", "met"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for row in rows:
        if last not in (None, row["rate"]):
            table.add_section()
        last = row["rate"]
        cells = [str(row["requests"]), str(row["failed"]), str(row["handed_over"])]
        cells.append(_pair(row["ttft_ms"]))
        cells += [_pair(row["ttft_ms_by_prompt"].get(length)) for length in shown]
        cells += [_pair(row["itl_ms"]), _ms(row["itl_ms"]["longest"])]
        cells.append(" / ".join(f"{row['met'][measure]:.0%}" for measure in _MEASURES))
        table.add_row(_rate(row), row["way"], *cells)
    return table


def _ratios(ratios: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "p99 apart and colocated; targets: between tokens at least "
        f"{GAP_AIM:g}, first token at most {FIRST_AIM:g}"
    )
    table.add_column("between tokens, colocated/apart", justify="right")
    table.add_column("first token, apart/colocated", justify="right")
    for one in ratios:
        shown = (one[key] for key in ("itl_p99", "ttft_p99"))
        table.add_row(
            _rate(one), one["way"], *("-" if value is None else f"{value:.2f}" for value in shown)
        )
    return table


def _goodput(report: Mapping[str, Any]) -> Table:
    targets = report["targets"]
    table = Table(
        title="Goodput, requests/s, first token within "
        f"{targets['ttft_s']:g} s and the others every {targets['itl_s'] * 1000:g} ms",
        title_justify="left",
    )
    table.add_column("way")
    for name in _MEASURES.values():
        table.add_column(f"{GOOD_SHARE:.0%} met, {name}", justify="right")
    for way, values in report["goodput"].items():
        table.add_row(way, *(f"{values[measure]:.2f}" for measure in _MEASURES))
    return table


def _computed(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The same as in the results file."""
    found = [_tokens(row) for row in rows]
    table = Table(*found[0], title=_COMPUTED, title_justify="left")
    for one in found:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:,}" for cell in one.values()))
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("load", no_wrap=True)
    table.add_column("way", no_wrap=True)
    return table


def _notes(report: Mapping[str, Any]) -> str:
    rows = report["rows"]
    late = max(row["load"]["late_p99_ms"] for row in rows)
    share = max(row["load"]["cpu_share"] for row in rows)
    chunk = max(row["tokens_per_chunk"] for row in rows)
    said = "" if not _are_conversations(report) else _ABOUT_TOKENS
    return (
        f"{said}Between tokens: gaps between the chunks of an answer that carry tokens. One read "
        f"is one chunk and one gap, however many tokens it has (here up to {chunk:g} on average). "
        "Mean gap: from the first token to the last, over the tokens between. Met: both targets, "
        "with the mean gap / with every gap. First tokens count from the time a request was due. "
        "Goodput: the highest rate up to which the targets were met, 0 if at none.\n"
        f"Requests were at most {late:.1f} ms late (p99); the load took {share:.1%} of a core. "
        f"{report['cores']} cores, load average {report['load_before']:.1f} before, "
        f"{report['minutes']:g} minutes."
    )


def _rate(row: Mapping[str, Any]) -> str:
    return "trace" if row["rate"] is None else f"{row['rate']:g}/s"


def _pair(spread: Mapping[str, float | None] | None) -> str:
    return "" if spread is None else f"{_ms(spread['p50'])} / {_ms(spread['p99'])}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
