"""What two engines compare before they exchange a block: settings, groups, bytes of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from disagg.connector import kv_cache_layout, whole_pages
from disagg.connector.whole_pages import DTYPES, first_spec
from disagg.identity.model import kv_cache_dtype as dtype_of_cache
from disagg.identity.model import model_fields
from disagg.transport.blocks import BlockCache
from disagg.vllm_compat import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def kv_cache_dtype(config: VllmConfig) -> str:
    """As `identity.model` has it, with the variant of fp8."""
    name = dtype_of_cache(config)
    return name + fp8_variant(name)


def fp8_variant(name: str) -> str:
    """AMD's fp8 has the same names on some GPUs, and other values for the same bytes."""
    variant = str(current_platform.fp8_dtype())
    return " fnuz" if name.startswith("fp8") and variant.endswith("fnuz") else ""


def fingerprint(config: VllmConfig, kv_cache: KVCacheConfig) -> dict[str, str]:
    """The fields that must be equal before two workers exchange a block.

    Tensor and pipeline parallelism are not among them: ranks slice and merge heads, and `layers`
    are compared only where one stage reads another.
    """
    model, caching = config.model_config, config.cache_config
    # vLLM's CPU kernels pack the tokens of a block together, so a block cannot be divided.
    block_size = str(caching.block_size) if not kv_cache_layout.splits_blocks(config) else "any"
    return {
        "vllm": versions.blocks_of(),
        **model_fields(config),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_cache_dtype": kv_cache_dtype(config),
        "prefix_caching_hash_algo": str(caching.prefix_caching_hash_algo),
        "hash_seed": kv_cache_layout.hash_seed(config, kv_cache_layout.HANDED_OFF),
        "block_size": block_size,
        "kv_cache_layout": str(kv_cache.kv_cache_layout),
        "kv_heads": str(kv_cache_layout.kv_heads(config)),
        "kv_cache_groups": _groups(kv_cache),
        "packed_on": whole_pages.packed_on(kv_cache),
    }


def layers(
    kv_cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor], cache: BlockCache
) -> tuple[str, ...]:
    """Per region: its layers, each with its group, and the bytes of one head and token."""
    groups = enumerate(kv_cache.kv_cache_groups)
    group_of = {name: str(number) for number, group in groups for name in group.layer_names}
    names: dict[int, list[str]] = {}
    known = {region.memory.data_ptr() for region in cache.regions}
    for name, tensor in kv_caches.items():
        if tensor.data_ptr() in known:  # else its place is in the region's form
            layer = f"{name}@{group_of.get(name, '')}"
            names.setdefault(tensor.data_ptr(), []).append(layer)
    return tuple(
        f"{'+'.join(of_region)} {region.dtype}[{region.memory.shape[3]}] {region.form}".rstrip()
        for of_region, region in zip(names.values(), cache.regions, strict=True)
    )


def _groups(kv_cache: KVCacheConfig) -> str:
    """A description of each group, in order: blocks are matched by group."""
    described, mixed = [], whole_pages.are_mixed(kv_cache)
    for group in kv_cache.kv_cache_groups:
        spec = first_spec(group)
        window = getattr(spec, "sliding_window", None)
        kind = type(spec).__name__.removesuffix("Spec")
        if isinstance(spec, MambaSpec):
            kind = f"{spec.mamba_type.name} of {state_of(spec)}"
        blocks = f" in blocks of {spec.block_size}" if mixed else ""
        described.append(kind + (f" of {window}" if window else "") + blocks)
    return ", ".join(described)


def state_of(spec: MambaSpec) -> str:
    """Shapes and types of a layer's state; equal on all ranks."""
    parts = zip(spec.shapes, spec.dtypes, strict=True)
    return " and ".join(f"{'x'.join(map(str, shape))} {DTYPES[dtype]}" for shape, dtype in parts)
