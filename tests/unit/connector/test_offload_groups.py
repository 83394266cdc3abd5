"""Tiers of models with several KV cache groups, or with windows: what a load needs, and no more.

As `test_offload_modelless.py`, whose fixtures these are: no model, and every byte is compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.connector.modelless import BLOCK, Layers
from unit.connector.test_offload_modelless import (
    Start,
    any_order,
    ask,
    check,
    computed,
    forget,
    half,
    prompt_of,
    start,
)

pytestmark = pytest.mark.usefixtures("distributed")
__all__ = ["start"]

FULL = Layers()
CACHES = {
    "full and sliding": (FULL, Layers(window=2 * BLOCK)),
    "two sliding and full": (Layers(window=70), Layers(window=3), FULL),
    "full and local": (FULL, Layers(local=3 * BLOCK)),
    "sliding": (Layers(window=3 * BLOCK + 1),),
    "two full and sliding": (FULL, FULL, Layers(window=BLOCK + 1)),
}


def blocks_moved(engine, medium: str) -> int:
    """Since the last call."""
    data = half(engine).take_stats().data
    return sum(size for size, _ in data.get("moved", {}).get(medium, ())) // engine_block(engine)


def engine_block(engine) -> int:
    return int(engine.lifecycle.connector.worker.cache.block_bytes)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("source", ["host", "files"])
@pytest.mark.parametrize("name", CACHES)
def test_what_was_computed_is_loaded(
    start: Start, tmp_path: Path, name: str, source: str, per_chunk: int, layout: str
) -> None:
    extra = {"directory": str(tmp_path)} if source == "files" else {}
    engine = start(layout=layout, blocks_per_chunk=per_chunk, groups=CACHES[name], **extra)
    for length in (7 * BLOCK + 5, 6 * BLOCK, 6 * BLOCK + 1):
        prompt = prompt_of(length, seed=length)
        ask(engine, prompt)
        forget(engine, host=source == "files")
        since = len(engine.scheduled)
        ask(engine, prompt)
        there = (length - 1) // BLOCK // per_chunk * per_chunk * BLOCK
        assert computed(engine, since) == length - there + 2


@pytest.mark.parametrize(
    ("seed", "eviction"), [(0, "lru"), (1, "arc"), (2, "arc"), (3, "lru"), (4, "lru"), (5, "arc")]
)
@pytest.mark.parametrize("name", CACHES)
def test_any_order(start: Start, tmp_path: Path, name: str, seed: int, eviction: str) -> None:
    any_order(start, tmp_path, seed, eviction, CACHES[name], slots=14, blocks=44)
