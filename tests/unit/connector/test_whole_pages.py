"""Caches whose blocks have no heads and tokens in common, moved whole."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from disagg.connector import cache_fingerprint, kv_cache_layout, whole_pages
from disagg.errors import ConfigError
from disagg.transport.blocks import BlockCache, copy_all

BLOCKS = 6


def full(block: int, heads: int, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=8, dtype=torch.float16, **more
    )


def window(block: int, heads: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=8, dtype=torch.float16, sliding_window=64
    )


def cache_of(*specs: KVCacheSpec, layout: KVCacheLayout = KVCacheLayout.LBHNC) -> KVCacheConfig:
    """A group of two layers for each spec, all in the same memory."""
    page = specs[0].page_size_bytes
    outermost = layout.is_block_outermost
    layer, block = (page, 2 * page) if outermost else (BLOCKS * page, page)
    named = [[f"layer.{2 * number}", f"layer.{2 * number + 1}"] for number in range(len(specs))]
    tensors = [KVCacheTensor(2 * BLOCKS * page, names, layer, block) for names in named]
    groups = [KVCacheGroupSpec(names, spec) for names, spec in zip(named, specs, strict=True)]
    cache = KVCacheConfig(BLOCKS, tensors, groups)
    cache.kv_cache_layout = layout.name
    return cache


def config_of(**changed: Any) -> Any:
    values = {"speculative_config": None, "pipeline_parallel_size": 1, **changed}
    values["kv_transfer_config"] = SimpleNamespace()
    stages = values.pop("pipeline_parallel_size")
    return SimpleNamespace(
        model_config=SimpleNamespace(model="m", use_mla=False, enable_sleep_mode=False),
        cache_config=SimpleNamespace(
            block_size=16, enable_prefix_caching=True, prefix_match_unit=None
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, decode_context_parallel_size=1
        ),
        **values,
    )


def moved(
    cache: KVCacheConfig, layout: KVCacheLayout, kernels: list[int] | None = None
) -> BlockCache:
    """Block 1 to block 4, and compare vLLM's own views of them; returns our view of the cache."""
    caches = allocate_kv_cache(cache, torch.device("cpu"), layout, kernels)
    memory = torch.empty(0, dtype=torch.uint8).set_(next(iter(caches.values())).untyped_storage())
    memory.random_(0, 256)
    blocks = kv_cache_layout.registered_blocks(config_of(), cache, caches)
    pairs = zip(blocks.views(blocks.whole([4])), blocks.views(blocks.whole([1])), strict=True)
    copy_all([pair for to, source in pairs for pair in zip(to, source, strict=True)])
    for name, tensor in caches.items():
        of_vllm = group_kernel_blocks(tensor, BLOCKS).contiguous().view(torch.uint8)
        assert torch.equal(of_vllm[1], of_vllm[4]), name
        assert not torch.equal(of_vllm[1], of_vllm[3]), name
    return blocks


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_groups_of_blocks_of_other_sizes(layout: KVCacheLayout) -> None:
    if not layout.is_block_compact:
        pytest.skip("vLLM refuses it for such groups")
    cache = cache_of(window(32, 2), full(16, 4), layout=layout)
    assert whole_pages.are_mixed(cache)
    assert whole_pages.group_block_sizes(cache) == (32, 16)
    blocks = moved(cache, layout)
    assert blocks.block_size == whole_pages.block_size(cache) == 16
    assert blocks.heads is None, "no rank may slice them"
    assert len(blocks.regions) == (1 if layout.is_block_outermost else 2)
    kv_cache_layout.check_supported(config_of(), cache)


def test_groups_of_like_blocks_are_divided_as_ever() -> None:
    cache = cache_of(window(16, 4), full(16, 4))
    assert not whole_pages.are_mixed(cache)
    assert moved(cache, KVCacheLayout.LBHNC).heads == 4


def test_blocks_that_attention_splits_by_heads_move_whole() -> None:
    """128 tokens in two of 64, each with all its heads: as on GPUs with FlashInfer."""
    cache = cache_of(full(128, 4))
    blocks = moved(cache, KVCacheLayout.LBHNC, [64])
    assert (blocks.heads, blocks.block_size) == (None, 128)
    with pytest.raises(ValueError, match="move whole"):
        blocks.within([1], 64, [(0, 1)])


@pytest.mark.parametrize(("layout", "heads"), [(KVCacheLayout.LBNHC, 4), (KVCacheLayout.LBHNC, 1)])
def test_blocks_that_attention_splits_by_tokens_are_put_together(
    layout: KVCacheLayout, heads: int
) -> None:
    blocks = moved(cache_of(full(128, heads), layout=layout), layout, [32])
    assert (blocks.heads, blocks.block_size) == (heads, 128)
    blocks.within([1], 16, [(0, 1)])


@pytest.mark.parametrize("mode", KVQuantMode)
def test_formats_that_pack_scales_apart_move_whole(mode: KVQuantMode) -> None:
    plain = mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=64, dtype=torch.uint8, kv_quant_mode=mode
    )
    cache = cache_of(spec)
    assert whole_pages.are_packed(cache) is not plain
    blocks = moved(cache, KVCacheLayout.LBHNC)
    assert (blocks.heads is None) is not plain


# ---- what must not be exchanged ----------------------------------------------------------------


def texts(cache: KVCacheConfig, kernels: list[int] | None = None) -> tuple[object, ...]:
    """What two workers compare of their layers."""
    layout = KVCacheLayout[str(cache.kv_cache_layout)]
    caches = allocate_kv_cache(cache, torch.device("cpu"), layout, kernels)
    blocks = kv_cache_layout.registered_blocks(config_of(), cache, caches)
    groups = cache_fingerprint._groups(cache)
    return groups, cache_fingerprint.layers(cache, caches, blocks)


def test_pages_of_other_forms_do_not_fit() -> None:
    """As many bytes for a block, which mean other things."""
    found = [
        texts(cache_of(full(128, 4))),
        texts(cache_of(full(128, 4)), [64]),
        texts(cache_of(full(128, 4)), [32]),
        texts(cache_of(full(256, 4)), [64]),
        texts(cache_of(full(128, 8)), [64]),
        texts(cache_of(window(32, 2), full(16, 4))),
        texts(cache_of(window(16, 4), full(32, 2))),
        texts(cache_of(window(32, 2), full(16, 4), layout=KVCacheLayout.BLHNC)),
        texts(cache_of(window(16, 4), full(32, 2), layout=KVCacheLayout.BLHNC)),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_formats_of_latent_attention_stay_on_one_kind_of_gpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scales may differ where all sizes are equal."""
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=dtype)
    cache = cache_of(latent)
    assert whole_pages.packed_on(cache) == "", "on a CPU"
    hopper = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=9))
    monkeypatch.setattr(whole_pages, "current_platform", hopper)
    assert whole_pages.packed_on(cache) == ("sm9" if dtype == torch.uint8 else "")
    assert whole_pages.packed_on(cache_of(full(16, 4))) == ""
    (group,), (tensor,) = cache.kv_cache_groups, cache.kv_cache_tensors
    cache.kv_cache_tensors = [replace(tensor, layers=[name]) for name in group.layer_names]
    assert whole_pages.packed_on(cache) == "sm9", "an indexer beside it"


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: 2"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "speculative_config: mtp"),
    ],
)
def test_what_mixed_blocks_do_not_go_with(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said} — .*32/16 tokens"):
        kv_cache_layout.check_supported(config_of(**changed), cache_of(window(32, 2), full(16, 4)))
    kv_cache_layout.check_supported(config_of(**changed), cache_of(window(16, 4), full(16, 4)))


def test_kinds_that_are_not_moved() -> None:
    ring = CircularBufferSpec(block_size=8, num_kv_heads=8, head_size=8, dtype=torch.float16)
    with pytest.raises(ConfigError, match="CircularBufferSpec") as refused:
        kv_cache_layout.check_supported(config_of(), cache_of(ring, full(16, 4)))
    assert "belongs to no block of tokens" in str(refused.value)
    chunked = ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float16, attention_chunk_size=64
    )
    kv_cache_layout.check_supported(config_of(), cache_of(chunked, full(16, 4)))
