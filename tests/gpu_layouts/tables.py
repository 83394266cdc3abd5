"""The rows of the report as tables of docs/gpu_layouts.md."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_BEGIN, _END = "<!-- {}: written by tests/unit/connector/test_gpu_layouts.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Row:
    """One model on one GPU with one KV cache dtype.

    built: why vLLM did not build it, else empty. blocks: tokens per block of vLLM's groups, and of
    the kernels where they differ. handoff, tiers: `right`, or in which words refused. identity:
    what two workers compare before they exchange a block.
    """

    gpu: str
    model: str
    dtype: str
    built: str = ""
    backends: str = ""
    blocks: str = ""
    layout: str = ""
    handoff: str = ""
    tiers: str = ""
    identity: str = ""


def read(line: str) -> Row:
    """A line that the report printed."""
    return Row(**json.loads(line))


def table(rows: Sequence[Row]) -> str:
    """Models whose rows are equal for all dtypes take one line."""
    lines = [
        "| model | KV cache dtype | attention backends | block / kernel block | layout | handoff "
        "| tiers |",
        "|---|---|---|---|---|---|---|",
    ]
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        key = (row.model, row.backends, row.blocks, row.layout, row.handoff, row.tiers)
        merged.setdefault(key, []).append(row.dtype)
    lines += [
        f"| {model} | {', '.join(dtypes)} | {' | '.join(rest)} |"
        for (model, *rest), dtypes in merged.items()
    ]
    return "\n".join(lines)


def exchanges(*of_gpus: Sequence[Row]) -> str:
    """Which models two pools on different GPUs exchange blocks of."""
    first, second = ({(row.model, row.dtype): row.identity for row in rows} for rows in of_gpus)
    fit: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
    for model, dtype in first:
        same = first[model, dtype] == second.get((model, dtype))
        fit[same].setdefault(model, []).append(dtype)
    texts = {
        same: ", ".join(f"{model} ({', '.join(dtypes)})" for model, dtypes in found.items())
        for same, found in fit.items()
    }
    lines = f"- exchanged: {texts[True]}", f"- computed by decode: {texts[False]}"
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)


def rewritten(page: str, *of_gpus: Sequence[Row]) -> str:
    """The page with all its generated blocks anew."""
    blocks = {rows[0].gpu: table(rows) for rows in of_gpus}
    blocks["both"] = exchanges(*of_gpus)
    for name, text in blocks.items():
        before, _, after = _parts(page, name)
        page = f"{before}{text}\n{after}"
    return page


def block(page: str, name: str) -> str:
    """A generated block of the page: of a GPU, or `both`."""
    return _parts(page, name)[1].strip()


def _parts(page: str, name: str) -> tuple[str, str, str]:
    """Before a block, with the line that begins it; the block; and after it, with its end."""
    begin = _BEGIN.format(name) + "\n"
    start = page.index(begin) + len(begin)
    stop = page.index(_END, start)
    return page[:start], page[start:stop], page[stop:]
