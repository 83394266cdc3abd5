"""Tiers under vLLM's second model runner, which writes blocks before it calls the connector.

It zeroes and copies the blocks of a step before `handle_preemptions`. A chunk whose block a store
has not copied by then must fail: no chunk may be kept under its key with other bytes. With blocks
to spare, nothing is lost (`test_what_was_computed_is_loaded`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from unit.connector import modelless
from unit.connector.modelless import BLOCK, PLAIN, Engine, Layers
from unit.connector.offload.test_groups import test_what_was_computed_is_loaded
from unit.connector.offload.test_modelless import (
    Start,
    any_order,
    half,
    pair,
    start,
    three_turns,
)
from vllm.config import VllmConfig

from disagg.connector.offload.messages import OffloadWork, Store
from disagg.connector.offload.settings import OffloadSettings
from disagg.connector.offload.worker import OffloadWorker
from disagg.store.base import Slot
from disagg.transport.blocks import BlockCache, Region

pytestmark = pytest.mark.usefixtures("distributed")
__all__ = ["pair", "start", "test_what_was_computed_is_loaded"]

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
FULL, STATE = Layers(), Layers(state=True)
CACHES = {
    "plain": PLAIN,
    "full and sliding": (FULL, Layers(window=2 * BLOCK)),
    "states and full": (STATE, FULL, STATE),
    "blocks of two sizes": (Layers(block=2 * BLOCK), Layers(window=70)),
    "full, sliding and states": (FULL, Layers(window=2 * BLOCK), STATE),
}


@pytest.fixture(autouse=True)
def second_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's schedulers and our halves see a config with the second runner. vLLM refuses to make
    one without Triton, so it is switched on afterwards."""
    make = modelless._engine_config

    def with_second_runner(*args: Any) -> VllmConfig:
        monkeypatch.delenv(SWITCH, raising=False)
        config = make(*args)
        monkeypatch.setenv(SWITCH, "1")
        return config

    monkeypatch.setattr(modelless, "_engine_config", with_second_runner)


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_order(start: Start, tmp_path: Path, name: str, seed: int) -> None:
    """A chunk with wrong bytes is found by the request that loads it."""
    eviction, groups = ["lru", "arc", "turns"][seed % 3], CACHES[name]
    engine = any_order(start, tmp_path, seed, eviction, groups, slots=14, blocks=44)
    assert engine.config.use_v2_model_runner
    assert half(engine)._host.stats.stored


def test_beside_the_handoff(pair: tuple[Engine, Engine]) -> None:
    three_turns(pair)
    assert all(engine.config.use_v2_model_runner for engine in pair)


@pytest.mark.parametrize("reported", [False, True])
def test_in_host_memory_only_a_reported_store_is_kept(reported: bool) -> None:
    """There is no stream whose position would show which came first."""
    memory = torch.full((4, 2, 4, 8), 7, dtype=torch.uint8)
    worker = OffloadWorker(
        OffloadSettings(), 2, lambda cache, on_evicted: None, blocks_written_first=True
    )
    worker.register(BlockCache([Region("layer", memory, "U8")]))
    worker.before_step(OffloadWork(stores=[Store(1, [Slot(b"k", 0)], [3])]))
    worker.after_step()
    worker._storing[1].future.result(timeout=10)
    if reported:
        worker.finished()
    memory[3] = 0
    worker.before_step(OffloadWork(overwritten={1: {3}}))
    worker.finished()
    report = worker.take_report()
    worker.shutdown()
    assert report is not None
    assert [(done.reason, bool(done.failed)) for done in report.done] == [
        ("", False) if reported else ("overwritten", True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("seed", range(100, 160))
def test_any_order_often(start: Start, tmp_path: Path, name: str, seed: int) -> None:
    """What goes wrong once in some hundred times is found here."""
    test_any_order(start, tmp_path, name, seed)
