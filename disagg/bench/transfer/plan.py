"""The plan of `bench transfer`: combinations of sizes, and the blocks that each one moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np

from disagg.bench.transfer import nixl
from disagg.bench.transfer.memory import LAYERS, PIECE, scattered
from disagg.checksums import ChecksumName
from disagg.errors import ConfigError
from disagg.transport.names import TRANSPORTS
from disagg.transport.nixl.settings import is_installed

_MB = 1_000_000
STAGING_BYTES = 64 << 20
_OF_GPUS = "cuda_ipc", "nccl"

# Block ids of each fetch of a case.
Ids = list[list[int]]


class TransferCase(NamedTuple):
    """`fetches` at once, of `megabytes` each, in blocks of `block_bytes` in each layer."""

    megabytes: int
    block_bytes: int
    fetches: int
    layers: int = LAYERS

    @property
    def blocks(self) -> int:
        """Blocks of one fetch."""
        return max(1, round(self.megabytes * _MB / (self.layers * self.block_bytes)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all its fetches."""
        return self.fetches * self.blocks * self.layers * self.block_bytes


class Defaults(NamedTuple):
    """The default plan of a device."""

    transports: Sequence[str]
    sizes: Sequence[int]
    block_bytes: Sequence[int]
    concurrency: Sequence[int]
    layers: int


DEFAULTS = {
    "cpu": Defaults(
        ("process_memory", "nixl", "tcp", "shared_storage"),
        (33, 131, 262),
        (65536, 1048576),
        (1, 4),
        LAYERS,
    ),
    # 1k, 8k and 64k tokens of a model of 8B: 32 layers, blocks of 16 tokens.
    "cuda": Defaults((*_OF_GPUS, "tcp", "shared_storage"), (131, 1074, 8590), (65536,), (1,), 32),
}


@dataclass(frozen=True)
class TransferPlan:
    """What to measure. `staging_bytes`: per end, for caches on a device. `checksum`: of
    shared_storage's files."""

    transports: Sequence[str]
    sizes: Sequence[int]
    block_bytes: Sequence[int]
    concurrency: Sequence[int]
    device: str
    repeats: int
    layers: int = LAYERS
    staging_bytes: int = STAGING_BYTES
    checksum: ChecksumName = "keyed"

    @classmethod
    def of(cls, device: str, repeats: int, **chosen: Any) -> TransferPlan:
        """The defaults of the device, with the chosen values that are not None."""
        values: dict[str, Any] = DEFAULTS.get(device, DEFAULTS["cpu"])._asdict()
        if not is_installed():
            values["transports"] = tuple(t for t in values["transports"] if t != "nixl")
        values |= {name: value for name, value in chosen.items() if value is not None}
        return cls(device=device, repeats=repeats, **values)

    def check(self) -> None:
        """Raise `ConfigError` for a plan that cannot be measured."""
        problems = [f"{t}: no such transport" for t in self.transports if t not in TRANSPORTS]
        problems += [
            f"{t}: moves between GPUs only; use --device cuda"
            for t in self.transports
            if t in _OF_GPUS and self.device == "cpu"
        ]
        problems += [
            f"blocks of {size} bytes: must be multiples of {PIECE}, one token of one layer"
            for size in self.block_bytes
            if size < PIECE or size % PIECE
        ]
        if self.checksum not in get_args(ChecksumName):
            problems.append(f"storage checksum {self.checksum!r}: must be keyed or fast")
        if self.device not in nixl.SETTINGS:
            problems.append(f"device {self.device}: must be one of {list(nixl.SETTINGS)}")
        counts = *self.sizes, *self.concurrency, self.repeats, self.layers, self.staging_bytes
        if min(counts, default=0) < 1:
            problems.append("sizes, concurrency, repeats, layers and staging must be at least 1")
        if problems:
            raise ConfigError(problems)

    def cases(self) -> list[TransferCase]:
        """All combinations, without several fetches whose sum exceeds the largest size."""
        most = max(self.sizes)
        return [
            TransferCase(size, block, fetches, self.layers)
            for block in self.block_bytes
            for fetches in self.concurrency
            for size in self.sizes
            if fetches == min(self.concurrency) or size * fetches <= most
        ]

    def ids(self, case: TransferCase, generator: np.random.Generator) -> Ids:
        """Block ids for each fetch of a case; no block twice."""
        ids = scattered(self.blocks(case.block_bytes), case.blocks * case.fetches, generator)
        return [ids[i : i + case.blocks] for i in range(0, len(ids), case.blocks)]

    def blocks(self, block_bytes: int) -> int:
        """Blocks of one end's cache."""
        return self.cache_bytes() // self.layers // block_bytes

    def cache_bytes(self) -> int:
        """Memory of one end: whole blocks of every size, enough for every case."""
        need = max(case.num_bytes for case in self.cases())
        step = self.layers * int(np.lcm.reduce(np.array(self.block_bytes)))
        return -(-need // step) * step
