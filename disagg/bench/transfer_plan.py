"""What `bench transfer` measures: the combinations of sizes, and which blocks each one moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg.bench import nixl_peer
from disagg.bench.transfer_memory import LAYERS, PIECE, scattered
from disagg.errors import ConfigError
from disagg.transport.names import PREFERENCE

_MB = 1_000_000

# Block ids of each fetch of a case.
Ids = list[list[int]]


class Case(NamedTuple):
    """`fetches` at once, of `megabytes` each, in blocks of `block_bytes` in each of 8 layers."""

    megabytes: int
    block_bytes: int
    fetches: int

    @property
    def blocks(self) -> int:
        """Blocks of one fetch."""
        return max(1, round(self.megabytes * _MB / (LAYERS * self.block_bytes)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all its fetches."""
        return self.fetches * self.blocks * LAYERS * self.block_bytes


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    transports: Sequence[str]
    sizes: Sequence[int]
    block_bytes: Sequence[int]
    concurrency: Sequence[int]
    device: str
    repeats: int

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be measured."""
        problems = [f"{t}: no such transport" for t in self.transports if t not in PREFERENCE]
        problems += [
            f"blocks of {size} bytes: must be multiples of {PIECE}, one token of one layer"
            for size in self.block_bytes
            if size < PIECE or size % PIECE
        ]
        if self.device not in nixl_peer.SETTINGS:
            problems.append(f"device {self.device}: must be one of {list(nixl_peer.SETTINGS)}")
        if min([*self.sizes, *self.concurrency, self.repeats], default=0) < 1:
            problems.append("sizes, concurrency and repeats must be at least 1")
        if problems:
            raise ConfigError(problems)

    def cases(self) -> list[Case]:
        """All combinations, less those of several fetches that pass the largest single one."""
        most = max(self.sizes)
        return [
            Case(size, block, fetches)
            for block in self.block_bytes
            for fetches in self.concurrency
            for size in self.sizes
            if fetches == min(self.concurrency) or size * fetches <= most
        ]

    def ids(self, case: Case, generator: np.random.Generator) -> Ids:
        """Blocks for each fetch of a case, no block twice."""
        total = self.cache_bytes() // LAYERS // case.block_bytes
        ids = scattered(total, case.blocks * case.fetches, generator)
        return [ids[i : i + case.blocks] for i in range(0, len(ids), case.blocks)]

    def cache_bytes(self) -> int:
        """Memory of one end: whole blocks of every size, enough for every case."""
        need = max(case.num_bytes for case in self.cases())
        step = LAYERS * int(np.lcm.reduce(np.array(self.block_bytes)))
        return -(-need // step) * step
