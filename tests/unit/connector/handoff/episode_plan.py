"""What the seed of an episode draws before anything happens: engines, settings, rates of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from unit.connector.handoff.places import EnginePlan
from unit.connector.modelless import BLOCK, PLAIN, Layers

TRANSPORTS = ("process_memory", "tcp", "shared_storage")
_DEPLOYMENTS = (
    ("kv_producer", "kv_consumer"),
    ("kv_producer", "kv_producer", "kv_consumer"),
    ("kv_producer", "kv_consumer", "kv_consumer"),
    ("kv_both", "kv_both"),
    ("kv_both", "kv_both", "kv_both"),
    ("kv_producer", "kv_both", "kv_consumer"),
)
_GROUPS = (
    PLAIN,
    (Layers(window=2 * BLOCK), Layers()),
    (Layers(state=True), Layers()),
    (Layers(window=70), Layers(block=2 * BLOCK)),
)


@dataclass(frozen=True)
class EpisodePlan:
    """What a seed draws before anything happens. longest: tokens of a prompt. wild: how often
    faults happen, from 0. holds, fails, spoils: see `Points`. at_once: requests under way."""

    seed: int
    engines: tuple[EnginePlan, ...]
    longest: int
    wild: float
    holds: float
    fails: float
    spoils: float
    at_once: int
    handoffs: int

    @classmethod
    def of(cls, seed: int, storage: Path) -> EpisodePlan:
        rng = random.Random(seed)
        groups = rng.choices(_GROUPS, (14, 3, 1.5, 1.5))[0]
        roles = rng.choice(_DEPLOYMENTS)
        # Every prompt and answer of up to `longest` tokens fits into the smallest pool.
        smallest = rng.randrange(5, 17)
        layout = rng.choice(("LBHNC", "BLHNC"))
        shared = rng.sample(TRANSPORTS, rng.randrange(1, 4))
        drawn = _Drawing(rng, storage, groups, smallest, layout, shared)
        wild = rng.choice((0.0, 0.3, 1.0, 1.0, 2.0))
        return cls(
            seed,
            tuple(drawn.engine(role) for role in roles),
            longest=(smallest - 2) * BLOCK,
            wild=wild,
            holds=wild and rng.choice((0.0, 0.05, 0.2)),
            fails=wild and rng.choice((0.0, 0.0, 0.03)),
            spoils=wild and rng.choice((0.0, 0.05)),
            at_once=rng.choice((4, 8, 16)),
            handoffs=rng.randrange(100, 301),
        )


@dataclass(frozen=True)
class _Drawing:
    """Draws the engines of one deployment. smallest: blocks that a pool has at least."""

    rng: random.Random
    storage: Path
    groups: tuple[Layers, ...]
    smallest: int
    layout: str
    shared: list[str]

    def engine(self, role: str) -> EnginePlan:
        rng = self.rng
        transports = self.shared
        if rng.random() < 0.2:  # its own order, or none that the others have
            transports = rng.sample(TRANSPORTS, rng.randrange(1, 4))
        extra = {
            "transports": transports,
            "storage_path": str(self.storage),
            "storage_max_bytes": rng.choice((8 << 30, 8 << 30, 20_000)),
            "storage_checksum": "keyed",
            "lease_s": rng.choice((0.2, 2.0, 20.0)),
            "lease_limit_s": rng.choice((5.0, 60.0, 600.0)),
            "load_deadline_s": rng.choice((0.3, 10.0, 10.0, 10.0)),
            "load_threads": rng.choice((1, 2, 8)),
            "strict": rng.random() < 0.15,
        }
        blocks = 1 + len(self.groups) * self.smallest + rng.choice((0, 2, 5, 20, 60))
        layout = self.layout if rng.random() > 0.02 else "BHLNC"  # does not fit the others
        return EnginePlan(
            role,
            blocks,
            layout if len(self.groups) == 1 else "LBHNC",
            prefix_caching=rng.random() < 0.8 or self.groups[0].state,
            max_seqs=rng.choice((2, 4, 8)),
            groups=self.groups,
            extra=extra,
        )
