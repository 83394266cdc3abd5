"""The figures of `bench transfer`: medians, ratios, targets, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from disagg.bench.results import Row, Target, target
from disagg.bench.results import Table as ResultTable
from disagg.bench.transfer.plan import TransferCase, TransferPlan
from disagg.tables import show as show_table
from disagg.transport.names import TRANSPORTS

FLAT, IN_PIECES = "memcpy", "memcpy in blocks"
DEVICE_COPY, NCCL_BARE, PCIE, SOCKETS_BARE = "device copy", "NCCL bare", "PCIe", "sockets bare"
BLOCK_COPIES, BLOCK_NCCL = "copy per block", "NCCL per block"

# Seconds of each repetition, by case and way.
Samples = dict[tuple[TransferCase, str], list[float]]


class Ceiling(NamedTuple):
    """The upper bound of a way: the slowest of these ways. `aim`: the target ratio to it."""

    of: tuple[str, ...]
    aim: float | None = None


CEILINGS = {
    "cuda_ipc": Ceiling((DEVICE_COPY,), 0.8),
    "nccl": Ceiling((NCCL_BARE,), 0.9),
    "tcp": Ceiling((PCIE, SOCKETS_BARE), 0.8),
    BLOCK_COPIES: Ceiling((DEVICE_COPY,)),
    BLOCK_NCCL: Ceiling((NCCL_BARE,)),
}

_RATIOS = {
    "over_memcpy": "memcpy",
    "over_ceiling": "its ceiling",
    "over_nixl": "NIXL, its best setting",
    "over_nixl_tcp": "NIXL over TCP",
}
_SIZES = "way", "MB", "KiB", "at once", "ms", "best", "GB/s"
_COLUMNS = {
    "cpu": (*_SIZES, "x memcpy", "x NIXL", "x NIXL tcp"),
    "cuda": (*_SIZES, "x ceiling", "aim", "ceiling", "x NIXL", "x NIXL tcp"),
}


# Targets of fetches between host memories, one at a time, in blocks of this size.
_AIMS = {
    "process_memory": (("memcpy", "over_memcpy", 0.8), ("NIXL", "over_nixl", 1.5)),
    "nixl": (("NIXL", "over_nixl", 0.95),),
    "tcp": (("NIXL over TCP", "over_nixl_tcp", 1.0),),
}
_AIMED_BLOCK, _AIMED_MB = 65536, 33  # a smaller prompt is computed by decode


def tables(report: Mapping[str, Any]) -> list[ResultTable]:
    """For the results file: times of all ways by size, then the ratios of ours."""
    found: list[ResultTable] = []
    cases = dict.fromkeys((row["block_bytes"], row["fetches"]) for row in report["rows"])
    for case in cases:
        rows = [r for r in report["rows"] if (r["block_bytes"], r["fetches"]) == case]
        where = f"blocks of {case[0] >> 10} KiB in {report['layers']} layers, {case[1]} at once"
        found.append(ResultTable(f"Median ms, {where}", _by_size(rows, "ms")))
        ratios: list[Row] = []
        for key, name in _RATIOS.items():
            # Other ways are references, but those that have a ceiling.
            ours = [r for r in rows if r["way"] in TRANSPORTS or key == "over_ceiling"]
            if key == "over_nixl_tcp":
                ours = [r for r in ours if r["way"] == "tcp"]
            for ratio in _by_size([r for r in ours if r[key] is not None], key):
                ratios.append({"way": ratio["way"], "speed, ratio to": name, **ratio})
        found.append(ResultTable(f"Ratios of medians, above 1 is faster, {where}", ratios))
    return found


def _by_size(rows: Sequence[Mapping[str, Any]], key: str) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        shown = found.setdefault(row["way"], {"way": row["way"]})
        shown[f"{row['megabytes']:,} MB"] = row[key]
    return list(found.values())


def targets(report: Mapping[str, Any]) -> list[Target | None]:
    """Of each transport with an aim, by size."""
    found: list[Target | None] = []
    for row in report["rows"]:
        way, at = row["way"], f"{row['megabytes']:,} MB"
        if row["aim"] is not None:
            name = f"speed of {way}, ratio to its ceiling"
            found.append(target(name, row["over_ceiling"], at=at, at_least=row["aim"]))
        if report["device"] != "cpu" or row["fetches"] > 1 or row["megabytes"] < _AIMED_MB:
            continue
        if row["block_bytes"] == _AIMED_BLOCK:
            for reference, key, aim in _AIMS.get(way, ()):
                name = f"speed of {way}, ratio to {reference}"
                found.append(target(name, row[key], at=at, at_least=aim))
    return found


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the rows of a report, then notes and failures."""
    title = "Whole fetches, median of the repetitions; ratios of medians, above 1 is faster"
    table = Table(title=title, caption=_caption(report))
    for column in _COLUMNS[report["device"]]:
        left = column in ("way", "ceiling")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
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
            f"{row['ms']:.{1 if row['ms'] >= 10 else 2}f}",
            f"{row['best_ms']:.{1 if row['best_ms'] >= 10 else 2}f}",
            f"{row['gb_s']:.2f}",
            *_references(report["device"], row),
            _times(row["over_nixl"]),
            _times(row["over_nixl_tcp"]),
        )
    show_table(table)
    for note in report["notes"]:
        console.print(note, markup=False)
    for name, problem in report["problems"].items():
        console.print(f"{name}: left out: {problem}", markup=False)


def _references(device: str, row: Mapping[str, Any]) -> list[str]:
    if device == "cpu":
        return [_times(row["over_memcpy"])]
    return [_times(row["over_ceiling"]), _times(row["aim"]), row["ceiling"] or "-"]


def _caption(report: Mapping[str, Any]) -> str:
    of_device = {
        "cpu": "memcpy: flat, by one thread, the reference.",
        "cuda": "Ceilings move as many bytes in one piece, without leases or checksums; PCIe: its "
        "slower direction. Of two ceilings the slower counts.",
    }
    return (
        f"{of_device[report['device']]} MB of each fetch, KiB of a block in each of "
        f"{report['layers']} layers; GB/s of all fetches together. x NIXL: the best of its "
        f"settings. {', '.join(report['gpus']) or report['device']}, {report['cores']} cores, "
        f"load {report['load'][0]:.1f} at the end"
    )


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def rows(
    plan: TransferPlan, samples: Samples, peers: Collection[str], peers_over_tcp: Collection[str]
) -> list[dict[str, Any]]:
    """One row for each way of each case, with its ratios. `peers`: names of NIXL's ways."""
    found = []
    for case in plan.cases():
        taken = {name: seconds for (at, name), seconds in samples.items() if at == case and seconds}
        medians = {name: statistics.median(seconds) for name, seconds in taken.items()}

        def best(names: Collection[str], medians: dict[str, float] = medians) -> float | None:
            return min((medians[name] for name in names if name in medians), default=None)

        peer = best(peers)
        peer_tcp = best(peers_over_tcp)
        for name, median in medians.items():
            ceiling, aim = _ceiling(name, medians)
            found.append(
                {
                    "way": name,
                    **case._asdict(),
                    "ms": round(median * 1000, 3),
                    "best_ms": round(min(taken[name]) * 1000, 3),
                    "gb_s": round(case.num_bytes / median / 1e9, 3),
                    "over_memcpy": _ratio(medians.get(FLAT), median),
                    "ceiling": ceiling,
                    "over_ceiling": _ratio(medians[ceiling], median) if ceiling else None,
                    "aim": aim,
                    "over_nixl": _ratio(peer, median),
                    "over_nixl_tcp": _ratio(peer_tcp, median),
                    "samples_ms": [round(seconds * 1000, 3) for seconds in taken[name]],
                }
            )
    return found


def _ceiling(name: str, medians: Mapping[str, float]) -> tuple[str | None, float | None]:
    """The ceiling of a way and its target; None unless all its ceilings were measured."""
    known = CEILINGS.get(name)
    if known is None or not all(one in medians for one in known.of):
        return None, None
    return max(known.of, key=lambda one: medians[one]), known.aim


def _ratio(reference: float | None, median: float) -> float | None:
    return None if reference is None else round(reference / median, 3)
