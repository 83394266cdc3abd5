"""What `bench transfer` found: medians and ratios, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.bench.transfer_plan import Case, Plan

FLAT, IN_PIECES = "memcpy", "memcpy in blocks"

# Seconds of each repetition, by case and way.
Samples = dict[tuple[Case, str], list[float]]

_COLUMNS = (
    "way", "MB", "KiB", "at once", "ms", "best", "GB/s", "x memcpy", "x NIXL", "x NIXL tcp"
)  # fmt: skip


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the rows of a report, then what failed."""
    title = "Whole fetches, median of the repetitions; ratios of medians, above 1 is faster"
    table = Table(title=title, caption=_caption(report))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    last = None
    for row in report["rows"]:
        case = row["megabytes"], row["block_bytes"], row["fetches"]
        if last not in (None, case):
            table.add_section()
        last = case
        table.add_row(
            row["way"],
            str(row["megabytes"]),
            f"{row['block_bytes'] / 1024:g}",
            str(row["fetches"]),
            f"{row['ms']:.1f}",
            f"{row['best_ms']:.1f}",
            f"{row['gb_s']:.2f}",
            _times(row["over_memcpy"]),
            _times(row["over_nixl"]),
            _times(row["over_nixl_tcp"]),
        )
    Console(width=max(console.width, 120), highlight=False).print(table)
    for name, problem in report["problems"].items():
        console.print(f"{name}: left out: {problem}", markup=False)


def _caption(report: Mapping[str, Any]) -> str:
    load = report["load"][0]
    return (
        "memcpy: flat, by one thread, the reference. MB of each fetch, KiB of a block; "
        f"GB/s of all fetches together. x NIXL: the best of its settings. {report['device']}, "
        f"{report['cores']} cores, load {load:.1f} at the end"
    )


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def rows(
    plan: Plan, samples: Samples, peers: Collection[str], peers_over_tcp: Collection[str]
) -> list[dict[str, Any]]:
    """One row for each way of each case, with its ratios; peers are named."""
    found = []
    for case in plan.cases():
        taken = {name: seconds for (at, name), seconds in samples.items() if at == case and seconds}
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}

        def best(names: Collection[str], medians: dict[str, float] = medians) -> float | None:
            return min((medians[name] for name in names if name in medians), default=None)

        peer = best(peers)
        peer_tcp = best(peers_over_tcp)
        for name, median in medians.items():
            found.append(
                {
                    "way": name,
                    **case._asdict(),
                    "ms": round(median * 1000, 2),
                    "best_ms": round(min(taken[name]) * 1000, 2),
                    "gb_s": round(case.num_bytes / median / 1e9, 3),
                    "over_memcpy": _ratio(medians.get(FLAT), median),
                    "over_nixl": _ratio(peer, median),
                    "over_nixl_tcp": _ratio(peer_tcp, median),
                    "samples_ms": [round(seconds * 1000, 3) for seconds in taken[name]],
                }
            )
    return found


def _ratio(reference: float | None, median: float) -> float | None:
    return None if reference is None else round(reference / median, 3)
