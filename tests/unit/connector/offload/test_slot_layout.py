"""Both halves of the tiers count the same slots, bytes and files, whatever layers a model has.

The configurations are vLLM's own: a worker's, and the one that the scheduler gets, which has only
the first layer's spec of each group.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.connector import modelless
from unit.connector.modelless import BLOCK
from unit.connector.offload.test_modelless import tiers
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from disagg.connector.offload import setup, slot_layout
from disagg.connector.offload.connector import DisaggOffloadConnector
from disagg.connector.offload.messages import Filling, OffloadWork, Store, TierLoad
from disagg.connector.offload.settings import OffloadSettings, read_settings
from disagg.errors import ConfigError
from disagg.store.base import Slot
from disagg.vllm_compat.differences import PLANNING_MOVED

if PLANNING_MOVED.here:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

    def plan(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> list[KVCacheConfig]:
        groups = get_global_kv_cache_groups(config, [specs])
        return get_kv_cache_configs(config, [specs], [1 << 24], groups)

else:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    def plan(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> list[KVCacheConfig]:
        return get_kv_cache_configs(config, [specs], [1 << 24])


pytestmark = pytest.mark.usefixtures("distributed")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DS = "fp8_ds_mla"
HOST_BYTES = 1 << 22


def full(heads: int = 2, dtype: torch.dtype = BF16) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=heads,
        head_size=8,
        dtype=dtype,
        kv_quant_mode=get_kv_quant_mode("fp8" if dtype is FP8 else "auto"),
    )


def mla(size: int, dtype: torch.dtype, cache_dtype: str | None = None) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=size,
        dtype=dtype,
        cache_dtype_str=cache_dtype,
        kv_quant_mode=get_kv_quant_mode(cache_dtype or "auto"),
    )


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=BF16, sliding_window=2 * BLOCK
    )


def local() -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=BF16, attention_chunk_size=3 * BLOCK
    )


def state() -> MambaSpec:
    return MambaSpec(
        block_size=BLOCK,
        shapes=((3, 16), (2, 8, 8)),
        dtypes=(BF16, torch.float32),
        page_size_padded=full().page_size_bytes,
        mamba_cache_mode="align",
    )


# Each: the layers that repeat, and the field that describes them in the fingerprint.
MODELS: dict[str, tuple[list[KVCacheSpec], str]] = {
    "full": ([full()], "4 FullAttentionSpec 2048"),
    "fp8": ([full(dtype=FP8)], "4 FullAttentionSpec 1024"),
    "latent": ([mla(576, BF16)], "4 MLAAttentionSpec 36864"),
    "a draft with fewer heads": (
        [full(8), full(8), full(8), full(2)],
        "16 FullAttentionSpec 12x8192+4x2048",
    ),
    "a draft with more heads": ([full(2), full(4)], "8 FullAttentionSpec 4x2048+4x4096"),
    "an indexer before latent": (
        [mla(132, torch.uint8), mla(576, BF16)],
        "8 MLAAttentionSpec 4x4224+4x36864",
    ),
    "latent before an indexer": (
        [mla(576, BF16), mla(132, torch.uint8)],
        "8 MLAAttentionSpec 4x36864+4x4224",
    ),
    "fp8 latent": ([mla(576, torch.uint8, DS)], "4 MLAAttentionSpec 18432"),
    "fp8 latent and an indexer": (
        [mla(576, torch.uint8, DS), mla(132, torch.uint8)],
        "8 MLAAttentionSpec 4x18432+4x4224",
    ),
    "windows": (
        [window(), full()],
        "4 FullAttentionSpec 2048 0 0, 4 SlidingWindowSpec 2048 64 0",
    ),
    "local": (
        [local(), full()],
        "4 FullAttentionSpec 2048 0 0, 4 ChunkedLocalAttentionSpec 2048 0 96",
    ),
    "states": (
        [state(), state(), full()],
        "4 FullAttentionSpec 2048 0 0, 4 MambaSpec 2048 0 0, 4 MambaSpec 2048 0 0",
    ),
}


@pytest.fixture(params=["LBHNC", "BLHNC"])
def layout(request: pytest.FixtureRequest) -> KVCacheLayout:
    return KVCacheLayout[request.param]


@pytest.fixture
def config(model: Path, tmp_path: Path, layout: KVCacheLayout) -> VllmConfig:
    extra = {"host_bytes": HOST_BYTES, "directory": str(tmp_path / "files")}
    made = modelless._engine_config(model, tiers(1, **extra), 8, True)
    record_kv_cache_layout(made.cache_config, layout.name)
    made.cache_config.mamba_cache_mode = "align"
    return made


def caches(config: VllmConfig, layers: list[KVCacheSpec]) -> tuple[KVCacheConfig, KVCacheConfig]:
    """The scheduler's and a worker's, in vLLM's way."""
    specs = {
        f"model.layers.{number}.{kind}": spec
        for number in range(4)
        for kind, spec in enumerate(layers)
    }
    (worker,) = plan(config, specs)
    worker.kv_cache_layout = config.cache_config.kv_cache_layout
    scheduler = generate_scheduler_kv_cache_config([worker])
    worker.hash_block_size = scheduler.hash_block_size = BLOCK
    return scheduler, worker


@pytest.mark.parametrize("name", MODELS)
def test_both_halves_agree(config: VllmConfig, layout: KVCacheLayout, name: str) -> None:
    layers, described = MODELS[name]
    scheduler, worker = caches(config, layers)
    transfer = config.kv_transfer_config
    assert transfer is not None
    settings = read_settings(transfer.kv_connector_extra_config)
    counted = setup.layout(settings, config, scheduler)
    assert counted.slots == HOST_BYTES // counted.slot_bytes
    shared = setup.fingerprint(settings, config, scheduler)
    assert shared.namespace == counted.namespace
    # A worker's attention layers replace the setting while the model is loaded.
    seen = DS if name.startswith("fp8 latent") else "fp8" if name == "fp8" else "auto"
    of_worker: Any = copy.copy(config)
    of_worker.cache_config = copy.copy(config.cache_config)
    of_worker.cache_config.cache_dtype = seen
    assert setup.layout(settings, of_worker, worker) == counted
    assert setup.fingerprint(settings, of_worker, worker) == shared
    fields = shared.fields
    assert sorted(fields.get("groups", fields.get("group", "")).split(", ")) == sorted(
        described.split(", ")
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_kept_where_the_scheduler_says(
    config: VllmConfig, layout: KVCacheLayout, name: str
) -> None:
    """The last slot is inside of the pool, and has each layer's bytes of a block."""
    scheduler_cache, worker_cache = caches(config, MODELS[name][0])
    scheduler = DisaggOffloadConnector(config, KVConnectorRole.SCHEDULER, scheduler_cache)
    connector = DisaggOffloadConnector(config, KVConnectorRole.WORKER, worker_cache)
    worker = connector.worker
    try:
        layers = allocate_kv_cache(worker_cache, torch.device("cpu"), layout)
        connector.register_kv_caches(layers)
        for layer in layers.values():
            layer.view(torch.uint8)[1].random_(0, 255)
        assert worker._pool is not None
        assert worker._pool.nbytes <= HOST_BYTES
        slot = Slot(b"k" * 32, scheduler.scheduler._host.stats.capacity - 1)
        first = OffloadWork(stores=[Store(0, [slot], [1], complete=True)])
        first.layout = scheduler.scheduler._work.layout
        worker.before_step(first)
        wait_for(worker.finished, worker._storing)
        worker.start(OffloadWork(loads=[TierLoad(1, "r", [Filling([slot], 0, [2])])]))
        wait_for(worker.finished, worker._loads)
        report = worker.take_report()
        assert report is not None
        assert [done.reason for done in report.done] == ["", ""]
        for layer in layers.values():
            assert layer.view(torch.uint8)[2].equal(layer.view(torch.uint8)[1])
            assert not layer.view(torch.uint8)[3].any()
    finally:
        scheduler.shutdown()
        connector.shutdown()


def wait_for(step: Callable[[], Any], jobs: dict[int, Any]) -> None:
    deadline = time.monotonic() + 10
    while jobs:
        assert time.monotonic() < deadline, "it did not end"
        step()
        time.sleep(0.001)


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC])
def test_the_first_step_tells_if_the_halves_do_not_agree(
    config: VllmConfig, layout: KVCacheLayout
) -> None:
    _, cache = caches(config, [full()])
    connector = DisaggOffloadConnector(config, KVConnectorRole.WORKER, cache)
    try:
        other = replace(slot_layout.SlotLayout(9, 16, "other"), slots=7)
        with pytest.raises(ConfigError, match="counts 7 slots of 16 bytes, files in other, and"):
            connector.worker.before_step(OffloadWork(layout=str(other)))
    finally:
        connector.shutdown()


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC])
def test_stages_are_refused_where_layers_differ(config: VllmConfig, layout: KVCacheLayout) -> None:
    """By the scheduler half too, though it sees one spec alone."""
    for cache in caches(config, [full(2), full(4)]):
        assert not slot_layout.are_alike(cache, 8)
    for cache in caches(config, [full(2)]):
        assert slot_layout.are_alike(cache, 4)
        assert not slot_layout.are_alike(cache, 5)


def test_a_pool_without_a_slot() -> None:
    with pytest.raises(ConfigError, match="host_bytes: 100 — a chunk of 1 blocks takes 101 bytes"):
        slot_layout.slots_of(OffloadSettings(host_bytes=100), 101)
