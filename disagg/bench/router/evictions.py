"""`disagg bench evictions`: what a host tier keeps of a public trace, by its eviction policy.

The tier's index is the real one (`store/host_index.py`), of many sizes; no bytes move, and the
requests come one after another. The engine above it has no cache of its own, so each prompt asks
the tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from disagg.bench.results import Output, Row
from disagg.bench.results import Table as ResultTable
from disagg.bench.router import reuse_trace
from disagg.errors import ConfigError
from disagg.store import policies
from disagg.store.host_index import HostIndex
from disagg.tables import show

_KEY_BYTES = 8


@dataclass(frozen=True)
class EvictionsPlan:
    """What to replay. `blocks`: sizes of the tier. `policies`: names."""

    trace: Path
    blocks: Sequence[int]
    policies: Sequence[str]

    def check(self) -> None:
        """Raise `ConfigError` for a plan that cannot be measured."""
        problems = [
            f"--policies: {name} — choose from {', '.join(policies.POLICIES)}"
            for name in self.policies
            if name not in policies.POLICIES
        ]
        if not self.policies:
            problems.append("--policies: name at least one")
        if not self.blocks or min(self.blocks) < 1:
            problems.append("--blocks: each number must be at least 1")
        if problems:
            raise ConfigError(problems)


def run(plan: EvictionsPlan, output: Output) -> int:
    """Replay the trace with each size and policy, and print. Returns the exit status."""
    plan.check()
    load = reuse_trace.read(plan.trace)
    best = reuse_trace.ideal(load)
    console = Console(highlight=False, soft_wrap=True)
    rows: list[Row] = []
    for size in plan.blocks:
        kept: Row = {"blocks": size, "share of all blocks, %": round(100 * size / best.blocks, 1)}
        for name in plan.policies:
            told = track(load, f"{size:,} blocks, {name}", console=console, transient=True)
            reuse = 1 - reuse_trace.computed(told, Tier(size, name)) / best.tokens
            kept[f"reuse, %: {name}"] = round(100 * reuse, 2)
        rows.append(kept)
    endless = round(100 * best.reuse, 2)
    title = f"{plan.trace.stem}: {best.requests:,} requests, {best.blocks:,} blocks; "
    title += f"an endless tier: {endless} %"
    table = Table(*map(str, rows[0]), title=title)
    for row in rows:
        table.add_row(*(f"{value:,}" for value in row.values()))
    show(table)
    figures = {"trace": plan.trace.name, "endless_reuse": endless, "rows": rows}
    name = reuse_trace.results_name("evictions", plan.trace)
    output.write(name, figures, [ResultTable(title, rows)], [])
    return 0


class Tier:
    """A host tier of so many blocks. See `reuse_trace.Cache`."""

    def __init__(self, blocks: int, policy: str) -> None:
        self._index = HostIndex(blocks, policy, events=False)

    def depth(self, blocks: Sequence[int]) -> int:
        """Loads what the tier has of the prompt, and counts it."""
        loaded = self._index.begin_load(_keys(blocks))
        self._index.end_load(loaded, True)
        return len(loaded)

    def keep(self, blocks: Sequence[int]) -> None:
        """Stores what the tier lacks of the prompt."""
        keys = _keys(blocks)
        slots = self._index.prepare_store(keys)
        self._index.complete_store(slots, True)
        self._index.refresh(keys)


def _keys(blocks: Sequence[int]) -> list[bytes]:
    return [block.to_bytes(_KEY_BYTES, "little") for block in blocks]
