"""Which worker rank this is, and what its cache looks like to transfers."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.transport.blocks import BlockCache
from disagg.transport.device.staging import Staging


@dataclass(frozen=True)
class WorkerRank:
    """One rank of an engine. name: the engine's, in logs. rank, world_size: tensor parallel.
    stage, stages: pipeline parallel. kv_heads: of the whole model. data_parallel_rank: the
    engine's, among those that one `vllm serve` runs."""

    name: str
    rank: int
    world_size: int
    stage: int
    stages: int
    kv_heads: int
    data_parallel_rank: int = 0

    @property
    def number(self) -> int:
        """This rank among all of its engine's, one pipeline stage after the other."""
        return self.stage * self.world_size + self.rank

    @property
    def count(self) -> int:
        """All ranks of the engine."""
        return self.world_size * self.stages

    @property
    def port_offset(self) -> int:
        """Its control channel's distance to the first one's, over all data parallel ranks."""
        return self.data_parallel_rank * self.count + self.number


@dataclass(frozen=True)
class RankCache:
    """A rank's KV cache. layers: what each region holds. fingerprint: what must be equal on both
    sides of a handoff. staging: device memory for transfers; None on a CPU."""

    blocks: BlockCache
    layers: tuple[str, ...]
    fingerprint: dict[str, str]
    staging: Staging | None
