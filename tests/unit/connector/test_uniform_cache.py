"""One buffer for all layers: when there is one, and where each byte of it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.connector.spy import Spy, spy_config
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from disagg.connector.kv_cache_layout import block_cache
from disagg.connector.uniform_cache import allocate_uniform, uniform_layout
from disagg.vllm_compat.differences import NO_STRIDE_ALIGNMENT
from disagg.vllm_compat.kv_cache import config_of_groups

BLOCKS, LAYERS = 7, 3
CPU = torch.device("cpu")
NAMES = [f"layer.{i}" for i in range(LAYERS)]
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
SPECS = {
    "full": FULL,
    "float32": replace(FULL, dtype=torch.float32),
    "one head": replace(FULL, num_kv_heads=1),
    "window": SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=32
    ),
    "mla": MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16),
}
UNIFORM = [layout for layout in KVCacheLayout if layout.is_block_outermost]
OTHER = [layout for layout in KVCacheLayout if not layout.is_block_outermost]


class AnyLayout(CPUAttentionBackend):
    """Kernels that read every layout."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return None


class BlocksFirst(CPUAttentionBackend):
    """Kernels that read two layouts, and like the one across layers better."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLNHC, KVCacheLayout.LBNHC)

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(8)]


class SmallBlocks(AnyLayout):
    """Kernels that read blocks of eight tokens alone."""

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [8]


class Indifferent(Spy):
    """Asks for no layout."""


class Asks(Spy):
    """Asks for a layout, as connectors do since vLLM 0.32."""

    layout = "BLHNC"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return cls.layout


class AsksForPlain(Asks):
    layout = "LBHNC"


class Prefers(Spy):
    """Asks for one buffer, as connectors did before."""

    prefer_cross_layer_blocks = True


def config_of(
    spec: KVCacheSpec, layout: KVCacheLayout = KVCacheLayout.LBHNC, groups: int = 1
) -> KVCacheConfig:
    """What vLLM plans for these layers, split over groups."""
    config = spy_config()
    config.cache_config.kv_cache_layout = layout.name
    split = [KVCacheGroupSpec(NAMES[i::groups], spec) for i in range(groups)]
    memory = BLOCKS * spec.page_size_bytes * LAYERS
    return config_of_groups(config, split, memory)


# ---- where the bytes lie -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", UNIFORM, ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_views_as_vllms_own(spec: AttentionSpec, layout: KVCacheLayout) -> None:
    """Same shape, strides, type and place as in vLLM's allocation for that layout."""
    ours = allocate_uniform(config_of(spec), layout, CPU)
    planned = config_of(spec, layout)
    theirs = allocate_kv_cache(planned, CPU, layout)
    assert list(ours.layers) == list(theirs)
    for name, view in ours.layers.items():
        assert view.shape == theirs[name].shape
        assert view.dtype == theirs[name].dtype
        assert view.storage_offset() == theirs[name].storage_offset()
        # vLLM leaves the stride of an axis of one element as it comes.
        real = [axis for axis, size in enumerate(view.shape) if size > 1]
        assert [view.stride(a) for a in real] == [theirs[name].stride(a) for a in real]
    assert ours.config.kv_cache_tensors == planned.kv_cache_tensors
    assert ours.config.kv_cache_layout == layout.name
    assert not ours.whole.any()


@pytest.mark.parametrize("layout", UNIFORM, ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_blocks_land_in_the_right_place(spec: AttentionSpec, layout: KVCacheLayout) -> None:
    """What our transports write as a layer's block is that block of that layer in the buffer."""
    uniform = allocate_uniform(config_of(spec), layout, CPU)
    cache = block_cache(uniform.layers)
    assert cache.num_blocks == BLOCKS
    assert [region.name for region in cache.regions] == NAMES
    # [L, B, ...], whatever the layout; as bytes.
    by_layer = uniform.whole.view(torch.uint8).permute(
        [layout.stride_order.index(axis) for axis in range(5)]
    )
    marks = torch.arange(1, LAYERS * BLOCKS + 1, dtype=torch.uint8).view(LAYERS, BLOCKS)
    for index in range(LAYERS):
        for block in range(BLOCKS):
            for view in list(cache.views(cache.whole([block])))[index]:
                view[:] = marks[index, block].item()
    assert torch.equal(by_layer, marks[:, :, None, None, None].expand(by_layer.shape))


def test_a_block_of_all_layers_is_one_run() -> None:
    uniform = allocate_uniform(config_of(FULL), KVCacheLayout.BLHNC, CPU)
    assert list(uniform.whole.shape) == [BLOCKS, LAYERS, 2, 16, 16]
    assert uniform.whole.is_contiguous()
    for layer in uniform.layers.values():
        layer[4] = 1
    touched = uniform.whole.view(-1).nonzero().flatten()
    assert len(touched) == LAYERS * 2 * 16 * 16
    assert touched[-1] - touched[0] + 1 == len(touched)


def test_layers_without_a_cache_read_anothers() -> None:
    uniform = allocate_uniform(
        config_of(FULL), KVCacheLayout.BLHNC, CPU, shared_layers={"layer.9": "layer.1"}
    )
    assert uniform.layers["layer.9"] is uniform.layers["layer.1"]
    assert len(block_cache(uniform.layers).regions) == LAYERS


# ---- when there is one -------------------------------------------------------------------------

Backends = Sequence[type[AttentionBackend]]
WISHES: dict[str, tuple[type[Spy], Backends, str | None]] = {
    "asked for and readable": (Asks, [AnyLayout], "BLHNC"),
    "asked for, not readable": (Asks, [CPUAttentionBackend], None),
    "asked for, one backend cannot": (Asks, [AnyLayout, CPUAttentionBackend], None),
    "asked for, another one readable": (Asks, [BlocksFirst], None),
    "asked for otherwise": (AsksForPlain, [AnyLayout], None),
    "not asked for": (Indifferent, [AnyLayout], None),
    "preferred, the backend chooses": (Prefers, [BlocksFirst], "BLNHC"),
    "preferred, nothing readable": (Prefers, [CPUAttentionBackend], None),
    "blocks in pieces": (Asks, [SmallBlocks], None),
}
WIDE = replace(FULL, block_size=32)


@pytest.mark.parametrize(("connector", "backends", "name"), WISHES.values(), ids=WISHES)
def test_the_connector_and_the_layout_decide(
    connector: type[Spy], backends: Backends, name: str | None
) -> None:
    config = spy_config()
    layout = uniform_layout(connector(config), config, config_of(WIDE), backends)
    assert layout == (KVCacheLayout[name] if name else None)


@pytest.mark.parametrize("connector", [Asks, AsksForPlain, Indifferent])
@pytest.mark.parametrize("backend", [AnyLayout, CPUAttentionBackend, BlocksFirst])
def test_never_another_layout_than_vllms(
    connector: type[Spy], backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we choose, vLLM's resolution chooses as well."""
    config = spy_config()
    ours = uniform_layout(connector(config), config, config_of(WIDE), [backend])
    monkeypatch.setattr(
        "vllm.v1.attention.backends.utils.get_kv_connector_cache_layout",
        connector.get_required_kvcache_layout,
    )
    readable = backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)
    theirs = resolve_kv_cache_layout(config, [[layout.name for layout in readable]], [WIDE])
    assert ours is None or ours is theirs


def test_a_layout_that_vllm_resolved_stays() -> None:
    config = spy_config()
    config.cache_config.kv_cache_layout = "BLNHC"
    assert uniform_layout(Asks(config), config, config_of(WIDE), [AnyLayout]) is None
    layout = uniform_layout(Prefers(config), config, config_of(WIDE), [AnyLayout])
    assert layout is KVCacheLayout.BLNHC


MAMBA = MambaSpec(block_size=32, shapes=((4, 8),), dtypes=(torch.float32,))
MIXED = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=dict.fromkeys(NAMES, WIDE))
UNFIT = {
    "two groups": config_of(WIDE, groups=3),
    "recurrent state": config_of(MAMBA),
    "pages of their own": replace(
        config_of(WIDE), kv_cache_groups=[KVCacheGroupSpec(NAMES, MIXED)]
    ),
    "padded pages": config_of(replace(WIDE, page_size_padded=8192)),
    "no layers": KVCacheConfig(BLOCKS, [], []),
}
if not NO_STRIDE_ALIGNMENT.here:
    aligned = replace(WIDE, block_stride_alignment=1 << 20)
    UNFIT["blocks that must be aligned"] = config_of(aligned)


@pytest.mark.parametrize("cache", UNFIT.values(), ids=UNFIT)
def test_only_one_group_with_pages_of_one_size(cache: KVCacheConfig) -> None:
    config = spy_config()
    assert uniform_layout(Asks(config), config, cache, [AnyLayout]) is None
    with pytest.raises(ValueError, match="cannot be laid out"):
        allocate_uniform(cache, KVCacheLayout.BLHNC, CPU)


@pytest.mark.parametrize("layout", OTHER, ids=lambda layout: layout.name)
def test_only_with_blocks_outermost(layout: KVCacheLayout) -> None:
    with pytest.raises(ValueError, match=layout.name):
        allocate_uniform(config_of(FULL), layout, CPU)
