"""The options of `python -m disagg.bench.transfer`, for machines without typer.

They are the options of `disagg bench transfer`, whose help says more. A machine with GPUs has torch
and cupy, and often little else; typer 0.29 imports pydantic when it parses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from disagg.bench.html import writer
from disagg.bench.results import Output
from disagg.bench.transfer.plan import TransferPlan


class TransferOptions(NamedTuple):
    """What to run."""

    plan: TransferPlan
    with_peer: bool
    output: Output


def parse(arguments: Sequence[str]) -> TransferOptions:
    """Exits with status 2 for an unknown option. Raises `ConfigError` for a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m disagg.bench.transfer")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--transports", type=_names, help="comma-separated")
    for name in ("--sizes", "--block-bytes", "--concurrency"):
        parser.add_argument(name, type=_numbers, help="comma-separated")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--staging-mb", type=int, default=64)
    parser.add_argument("--storage-checksum", choices=["keyed", "fast"], default="keyed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--html", type=Path, help="a page; needs matplotlib")
    found = parser.parse_args(arguments)
    plan = TransferPlan.of(
        found.device,
        found.repeats,
        transports=found.transports,
        sizes=found.sizes,
        block_bytes=found.block_bytes,
        concurrency=found.concurrency,
        layers=found.layers,
        staging_bytes=found.staging_mb << 20,
        checksum=found.storage_checksum,
    )
    output = Output(found.json, found.results, writer(found.html))
    return TransferOptions(plan, found.peer, output)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
