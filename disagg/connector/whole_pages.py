"""Caches whose blocks are moved whole, each layer's part as a page of bytes.

They have no heads and tokens that all layers share: recurrent state; KV cache groups whose blocks
differ in tokens, heads or content; formats that pack a block's values and scales apart; and blocks
that the attention backend keeps as smaller ones, each with all its heads. Such pages cannot be
sliced, so both sides of a handoff need the same block size and tensor parallel size, and pages of
the same form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg.errors import ConfigError
from disagg.transport.blocks import Region

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    # safetensors has no names for AMD's.
    torch.float8_e4m3fnuz: "U8",
    torch.float8_e5m2fnuz: "U8",
}
"""Of vLLM's tensors, in safetensors' terms."""

_MOVED = frozenset(
    {
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        SlidingWindowMLASpec,
        ChunkedLocalAttentionSpec,
    }
)


class Page(NamedTuple):
    """One layer's blocks: their number, the bytes between two, the bytes and the tokens of one.

    form: what the bytes are, where they differ from engine to engine with one layout.
    """

    blocks: int
    stride: int
    size: int
    tokens: int
    form: str = ""


# ---- the groups --------------------------------------------------------------------------------


def layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """The spec of each layer: vLLM puts layers that differ only in size into one group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec] * len(group.layer_names)


def first_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """A group's first layer's spec: the one that vLLM's scheduler has for the whole group."""
    return next(iter(layer_specs(group)), group.kv_cache_spec)


def block_size(kv_cache: KVCacheConfig) -> int:
    """Tokens of a block, by vLLM's own rule. A worker's `cache_config` need not know it."""
    kept = kv_cache.kv_cache_groups
    cacheable = [g.kv_cache_spec.block_size for g in kept if first_spec(g).prefix_cacheable]
    return int(min(cacheable or [group.kv_cache_spec.block_size for group in kept]))


def group_block_sizes(kv_cache: KVCacheConfig) -> tuple[int, ...]:
    """Tokens of a block in each group. States count as blocks of the others' size."""
    usual = block_size(kv_cache)
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    return tuple(usual if isinstance(s, MambaSpec) else int(s.block_size) for s in specs)


def are_mixed(kv_cache: KVCacheConfig) -> bool:
    """Whether groups with attention have blocks that differ, though they share memory."""
    specs = [first_spec(group) for group in kv_cache.kv_cache_groups]
    shapes = {
        (spec.block_size, spec.num_heads, spec.num_states, spec.page_size_bytes)
        for spec in specs
        if not isinstance(spec, MambaSpec)
    }
    groups = kv_cache.kv_cache_groups
    several = any(isinstance(g.kv_cache_spec, UniformTypeKVCacheSpecs) for g in groups)
    return len(groups) > 1 and (len(shapes) > 1 or several)


def are_packed(kv_cache: KVCacheConfig) -> bool:
    """Whether a block's bytes are in an order of the format's own, as NVFP4's: first all values,
    then all scales. No part of its tokens or heads is then a part of its bytes."""
    specs = (spec for group in kv_cache.kv_cache_groups for spec in layer_specs(group))
    modes = (getattr(spec, "kv_quant_mode", KVQuantMode.NONE) for spec in specs)
    return any(mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR) for mode in modes)


def packed_on(kv_cache: KVCacheConfig) -> str:
    """The GPU generation, where latent attention or its indexer keeps bytes in a format of its own.

    Which scales these hold may differ between GPUs though all sizes are equal. Empty otherwise.
    """
    latent = (MLAAttentionSpec, SlidingWindowMLASpec)
    packed = any(
        isinstance(spec, latent)
        and (getattr(spec, "dtype", None) == torch.uint8 or _kinds(kv_cache, group) > 1)
        for group in kv_cache.kv_cache_groups
        for spec in [first_spec(group)]
    )
    capability = current_platform.get_device_capability() if packed else None
    return f"sm{capability.major}" if capability is not None else ""


def _kinds(kv_cache: KVCacheConfig, group: KVCacheGroupSpec) -> int:
    """How many kinds of layers a group has: vLLM places those of one spec together."""
    names = set(group.layer_names)
    return sum(not names.isdisjoint(tensor.layers) for tensor in kv_cache.kv_cache_tensors)


def problems(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    """Why groups whose blocks differ cannot be moved here, each with the setting to change."""
    if not are_mixed(kv_cache):
        return []
    found, sizes = [], "/".join(map(str, dict.fromkeys(group_block_sizes(kv_cache))))
    kinds = {type(s) for group in kv_cache.kv_cache_groups for s in layer_specs(group)}
    alone = kinds - _MOVED
    if alone:
        names = ", ".join(sorted(kind.__name__ for kind in alone))
        found.append(
            f"model: {config.model_config.model} has layers of {names} beside blocks of {sizes} "
            "tokens, which are not moved together; serve it without a KV connector"
        )
    if not all(first_spec(group).prefix_cacheable for group in kv_cache.kv_cache_groups):
        found.append(
            f"model: {config.model_config.model} keeps a part of its cache that belongs to no "
            "block of tokens, which is not moved; serve it without a KV connector"
        )
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        found.append(
            f"pipeline_parallel_size: {stages} — not handed off with blocks of {sizes} tokens; "
            "set 1"
        )
    if config.speculative_config is not None:
        found.append(
            f"speculative_config: {config.speculative_config.method} — not handed off with blocks "
            f"of {sizes} tokens; unset it"
        )
    return found


# ---- their memory ------------------------------------------------------------------------------


def pages_of(kv_cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Page]:
    """The page of each layer with its own memory."""
    if are_mixed(kv_cache) and _blocks_are_outermost(kv_cache):
        return _packed(kv_cache, kv_caches)
    tokens, groups = block_size(kv_cache), kv_cache.kv_cache_groups
    specs = {n: s for g in groups for n, s in zip(g.layer_names, layer_specs(g), strict=True)}
    named = are_mixed(kv_cache) or are_packed(kv_cache)
    return {
        name: Page(
            kv_cache.num_blocks,
            tensor.block_stride,
            int(specs[name].page_size_bytes),
            tokens,
            _form(kv_caches[name], kv_cache.num_blocks, named),
        )
        for tensor in kv_cache.kv_cache_tensors
        for name in tensor.layers
    }


def _blocks_are_outermost(kv_cache: KVCacheConfig) -> bool:
    name = kv_cache.kv_cache_layout
    return name is not None and KVCacheLayout[name].is_block_outermost


def _packed(kv_cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Page]:
    """One page for all layers: here each block's bytes are in one piece. Groups place their layers
    within it differently, so the form names all places."""
    placed = sorted(kv_cache.kv_cache_tensors, key=lambda tensor: tensor.offset)
    strides = {tensor.block_stride for tensor in placed}
    if len(strides) != 1 or placed[0].offset:
        raise ConfigError(
            f"attention_backend: blocks of {sorted(strides)} bytes in one memory are not moved; "
            "choose another backend"
        )
    places = [
        (tensor.offset, tensor.layer_stride, name, _shape(kv_caches[name]))
        for tensor in placed
        for name in tensor.layers
    ]
    digest = hashlib.sha256(repr(places).encode()).hexdigest()[:16]
    stride = strides.pop()
    page = Page(kv_cache.num_blocks, stride, stride, block_size(kv_cache), f"packed {digest}")
    return {placed[0].layers[0]: page}


def _form(cache: torch.Tensor, blocks: int, named: bool) -> str:
    """Empty where the layout alone says what a block's bytes are."""
    pieces = len(cache) // blocks
    return f"{pieces}x{_shape(cache)}" if named or pieces > 1 else ""


def _shape(cache: torch.Tensor) -> str:
    return "x".join(map(str, cache.shape[1:])) + f" {cache.dtype}".replace("torch.", "")


def region(name: str, cache: torch.Tensor, page: Page) -> Region:
    """Regions are divided by tokens, so a page is divided into as many equal parts as a block."""
    if page.size % page.tokens:
        raise ConfigError(
            f"block_size: {page.tokens} — layer {name} has blocks of {page.size} bytes, not "
            "a multiple of it; choose another"
        )
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    begin = cache.data_ptr() - whole.data_ptr()
    each = page.size // page.tokens
    shape, strides = (page.blocks, 1, page.tokens, each), (page.stride, page.size, each, 1)
    return Region(name, whole.as_strided(shape, strides, begin), "U8", whole=True, form=page.form)
