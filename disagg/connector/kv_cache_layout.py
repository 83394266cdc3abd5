"""Describes vLLM's KV cache tensors as plain block regions, and as the fingerprint peers compare.

Refuses at start what our connectors cannot move, naming the setting to change. Legend for
shapes: B blocks, H KV heads of this rank, N tokens of a block, C content (K and V of one head
and token).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from disagg.connector import recurrent_state
from disagg.errors import ConfigError
from disagg.identity.model import model_fields
from disagg.transport.blocks import BlockCache, Region
from disagg.vllm_compat import versions
from disagg.vllm_compat.kv_cache import hash_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# vLLM's algorithms whose hashes are equal in every process; the others use a random seed.
_SAME_EVERYWHERE = ("sha256", "sha256_cbor")
_SEED = "PYTHONHASHSEED"
HANDED_OFF = "that is handed off"
NULL_BLOCK = 0
"""vLLM's placeholder for blocks that were freed. It never holds a request's data."""


def check_supported(config: VllmConfig, kv_cache: KVCacheConfig) -> None:
    """Raise `ConfigError` for engines whose blocks this connector cannot move."""
    problems = []
    if len(kv_cache.kv_cache_groups) > 1:
        problems += _problems_of_groups(config, kv_cache)
    problems += recurrent_state.problems(config, kv_cache)
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        problems.append(
            f"decode_context_parallel_size: {parallel.decode_context_parallel_size} — "
            "handoffs need 1"
        )
    block_size = config.cache_config.block_size
    hashed = hash_block_size(config, kv_cache)
    if hashed != block_size and not recurrent_state.are_one_page(kv_cache):
        problems.append(
            f"block_size: {block_size} — prefix hashes cover {hashed} tokens; both must be the same"
        )
    draft = config.speculative_config
    if draft is not None and draft.method == "extract_hidden_states":
        problems.append(
            "speculative_config.method: extract_hidden_states — hidden states have a connector of "
            "their own and are not handed off; unset it"
        )
    if problems:
        raise ConfigError(problems)


def hash_seed(config: VllmConfig, found: str) -> str:
    """The seed of vLLM's block hashes: a digest of it, if one was given.

    Raises `ConfigError` if each engine would use another one. found: what the hashes identify, for
    the message.
    """
    algorithm, seed = config.cache_config.prefix_caching_hash_algo, os.environ.get(_SEED)
    if seed is not None:
        return hashlib.sha256(seed.encode()).hexdigest()[:16]
    if algorithm not in _SAME_EVERYWHERE:
        raise ConfigError(
            f"prefix_caching_hash_algo: {algorithm} — with a random seed in each engine, no block "
            f"{found} would ever be found; use sha256, or set {_SEED} for all engines"
        )
    return "vllm's own"


def _problems_of_groups(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    moved = {FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec}
    block_size, problems = config.cache_config.block_size, []
    for group in kv_cache.kv_cache_groups:
        spec, first = group.kv_cache_spec, next(iter(group.layer_names), "")
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none":
            continue  # one page for a whole request
        if type(spec) not in moved | {MambaSpec}:
            problems.append(
                f"model: layer {first} keeps its cache as {type(spec).__name__}, which is not "
                "handed off together with other kinds"
            )
        elif spec.block_size != block_size:
            problems.append(
                f"disable_hybrid_kv_cache_manager: False — layer {first} has blocks of "
                f"{spec.block_size} tokens and others of {block_size}; set it to True"
            )
    return problems


def layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """The spec of each layer: vLLM puts layers that differ only in size into one group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec] * len(group.layer_names)


def _one_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The spec of one layer; the group's own if this pipeline stage has none of its layers."""
    return next(iter(layer_specs(group)), group.kv_cache_spec)


def has_windows(kv_cache: KVCacheConfig) -> bool:
    """Whether blocks may be freed while their request runs, as with sliding windows.

    Also true for several groups of any kind.
    """
    groups = kv_cache.kv_cache_groups
    windowed = (ChunkedLocalAttentionSpec, SlidingWindowSpec)
    return len(groups) > 1 or any(isinstance(_one_spec(g), windowed) for g in groups)


def block_cache(
    kv_caches: dict[str, torch.Tensor], pages: Mapping[str, recurrent_state.Page] | None = None
) -> BlockCache:
    """Regions of all layers, in layer order.

    Layers that share memory count once. Within one group they share the content; across groups each
    block belongs to one group at a time, and is moved whatever its content. With `pages`, blocks
    move whole, and ranks cannot slice them.
    """
    regions: dict[int, Region] = {}
    for name, cache in kv_caches.items():
        if pages and name not in pages:
            continue  # it uses another layer's memory
        region = recurrent_state.region(name, cache, pages[name]) if pages else _region(name, cache)
        known = regions.setdefault(cache.data_ptr(), region).memory
        if (known.shape, known.stride()) != (region.memory.shape, region.memory.stride()):
            raise ConfigError(
                f"disable_hybrid_kv_cache_manager: False — layer {name} has blocks of another "
                "shape than the layer it shares memory with; set it to True"
            )
    return BlockCache(list(regions.values()))


def check_block_size(kv_cache: KVCacheConfig, cache: BlockCache) -> None:
    """Raise `ConfigError` if the attention backend's blocks are smaller than vLLM's.

    Its block ids then differ (one block of 128 tokens is two of 64), and would name wrong bytes.
    """
    block_size = kv_cache.kv_cache_groups[0].kv_cache_spec.block_size
    if cache.block_size != block_size:
        raise ConfigError(
            f"block_size: {block_size} — the attention backend keeps blocks of {cache.block_size} "
            f"tokens; set block_size to {cache.block_size}, or choose another backend"
        )


def _region(name: str, cache: torch.Tensor) -> Region:
    """cache: vLLM's logical [B, H, N, C] with the layout's strides; [B, N, C] with MLA."""
    if cache.dim() == 3:
        cache = cache.unsqueeze(1)
    if cache.dim() != 4 or cache.stride(3) != 1:
        raise ConfigError(
            f"attention_backend: layer {name} keeps its cache as {list(cache.shape)} with strides "
            f"{list(cache.stride())}, which is not moved; choose another backend"
        )
    return Region(name, cache.view(torch.uint8), _DTYPES[cache.dtype])


def kv_heads(config: VllmConfig) -> int:
    """KV heads of the whole model, divided among the tensor parallel ranks; 1 with MLA."""
    model = config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def splits_blocks(config: VllmConfig) -> bool:
    """Whether a part of a block's tokens is a part of its bytes."""
    return str(config.device_config.device_type) != "cpu"


def fingerprint(config: VllmConfig, kv_cache: KVCacheConfig) -> dict[str, str]:
    """The fields that must be equal before two workers exchange a block.

    Tensor and pipeline parallelism are not among them: ranks slice and merge heads, and `layers`
    are compared only where one stage reads another.
    """
    model, caching = config.model_config, config.cache_config
    # vLLM's CPU kernels pack the tokens of a block together, so a block cannot be divided.
    block_size = str(caching.block_size) if not splits_blocks(config) else "any"
    return {
        "vllm": versions.blocks_of(),
        **model_fields(config),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(caching.cache_dtype),
        "prefix_caching_hash_algo": str(caching.prefix_caching_hash_algo),
        "hash_seed": hash_seed(config, HANDED_OFF),
        "block_size": block_size,
        "kv_cache_layout": str(kv_cache.kv_cache_layout),
        "kv_heads": str(kv_heads(config)),
        "kv_cache_groups": _groups(kv_cache),
    }


def layers(
    kv_cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor], cache: BlockCache
) -> tuple[str, ...]:
    """Per region: its layers, each with its group, and the bytes of one head and token."""
    groups = enumerate(kv_cache.kv_cache_groups)
    group_of = {name: str(number) for number, group in groups for name in group.layer_names}
    names: dict[int, list[str]] = {}
    for name, tensor in kv_caches.items():
        layer = f"{name}@{group_of.get(name, '')}"
        names.setdefault(tensor.data_ptr(), []).append(layer)
    return tuple(
        f"{'+'.join(of_region)} {region.dtype}[{region.memory.shape[3]}]"
        for of_region, region in zip(names.values(), cache.regions, strict=True)
    )


def _groups(kv_cache: KVCacheConfig) -> str:
    """A description of each group, in order: blocks are matched by group."""
    described = []
    for group in kv_cache.kv_cache_groups:
        spec = _one_spec(group)
        window = getattr(spec, "sliding_window", None)
        kind = type(spec).__name__.removesuffix("Spec")
        if isinstance(spec, MambaSpec):
            kind = f"{spec.mamba_type.name} of {state_of(spec)}"
        described.append(kind + (f" of {window}" if window else ""))
    return ", ".join(described)


def state_of(spec: MambaSpec) -> str:
    """Shapes and types of a layer's state; equal on all ranks."""
    parts = zip(spec.shapes, spec.dtypes, strict=True)
    return " and ".join(f"{'x'.join(map(str, shape))} {_DTYPES[dtype]}" for shape, dtype in parts)
