"""Describes vLLM's KV cache tensors as plain block regions, and as the fingerprint peers compare.

Refuses at start what our connectors cannot move, naming the setting to change. Legend for
shapes: B blocks, H KV heads of this rank, N tokens of a block, C content (K and V of one head
and token).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg.connector import recurrent_state, whole_pages
from disagg.connector.whole_pages import DTYPES, first_spec
from disagg.errors import ConfigError
from disagg.transport.blocks import BlockCache, Region
from disagg.vllm_compat.kv_cache import hash_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# vLLM's algorithms whose hashes are equal in every process; the others use a random seed.
_SAME_EVERYWHERE = ("sha256", "sha256_cbor")
_SEED = "PYTHONHASHSEED"
HANDED_OFF = "that is handed off"
NULL_BLOCK = 0
"""vLLM's placeholder for blocks that were freed. It never holds a request's data."""


def check_supported(config: VllmConfig, kv_cache: KVCacheConfig) -> None:
    """Raise `ConfigError` for engines whose blocks this connector cannot move."""
    problems = []
    if whole_pages.are_mixed(kv_cache):
        problems += whole_pages.problems(config, kv_cache)
    elif len(kv_cache.kv_cache_groups) > 1:
        problems += _problems_of_groups(kv_cache)
    problems += recurrent_state.problems(config, kv_cache)
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        problems.append(
            f"decode_context_parallel_size: {parallel.decode_context_parallel_size} — "
            "handoffs need 1"
        )
    block_size = whole_pages.block_size(kv_cache)
    hashed = hash_block_size(config, kv_cache)
    if hashed != block_size and not recurrent_state.are_one_page(kv_cache):
        problems.append(
            f"block_size: {block_size} — prefix hashes cover {hashed} tokens; both must be the same"
        )
    if config.model_config.enable_sleep_mode:
        problems.append(
            "enable_sleep_mode: True — a sleeping engine gives up the memory of its KV cache, "
            "which transfers may still read; unset it"
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


def _problems_of_groups(kv_cache: KVCacheConfig) -> list[str]:
    moved = {
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
        MambaSpec,
    }
    return [
        f"model: layer {next(iter(group.layer_names), '')} keeps its cache as "
        f"{type(group.kv_cache_spec).__name__}, which is not handed off together with other kinds"
        for group in kv_cache.kv_cache_groups
        if type(group.kv_cache_spec) not in moved
    ]


def has_windows(kv_cache: KVCacheConfig) -> bool:
    """Whether blocks may be freed while their request runs, as with sliding windows.

    Also true for several groups of any kind.
    """
    groups = kv_cache.kv_cache_groups
    windowed = (ChunkedLocalAttentionSpec, SlidingWindowSpec)
    return len(groups) > 1 or any(isinstance(first_spec(g), windowed) for g in groups)


def registered_blocks(
    config: VllmConfig, kv_cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> BlockCache:
    """The tensors that vLLM registers, as blocks to move. Raises `ConfigError`."""
    blocks = kv_cache.num_blocks
    whole = (
        bool(recurrent_state.state_groups(kv_cache))
        or whole_pages.are_mixed(kv_cache)
        or whole_pages.are_packed(kv_cache)
        or any(len(cache) != blocks and not _is_divided(cache) for cache in kv_caches.values())
    )
    if whole:
        return block_cache(kv_caches, whole_pages.pages_of(kv_cache, kv_caches))
    merged = {name: _merged(cache, blocks) for name, cache in kv_caches.items()}
    cache = block_cache(merged)
    check_block_size(kv_cache, cache)
    return cache


def block_cache(
    kv_caches: dict[str, torch.Tensor], pages: Mapping[str, whole_pages.Page] | None = None
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
        region = whole_pages.region(name, cache, pages[name]) if pages else _region(name, cache)
        known = regions.setdefault(cache.data_ptr(), region)
        if _geometry(known) != _geometry(region):
            raise ConfigError(
                f"disable_hybrid_kv_cache_manager: False — layer {name} has blocks of another "
                "shape than the layer it shares memory with; set it to True"
            )
        if region.form not in known.form:
            regions[cache.data_ptr()] = replace(known, form=f"{known.form}, {region.form}")
    return BlockCache(list(regions.values()))


def _geometry(region: Region) -> tuple[object, ...]:
    return (*region.memory.shape, *region.memory.stride())


def check_block_size(kv_cache: KVCacheConfig, cache: BlockCache) -> None:
    """Raise `ConfigError` if the tensors' blocks are not vLLM's: its block ids would name wrong
    bytes."""
    block_size = kv_cache.kv_cache_groups[0].kv_cache_spec.block_size
    if cache.block_size != block_size:
        raise ConfigError(
            f"block_size: {block_size} — the attention backend keeps blocks of {cache.block_size} "
            f"tokens; set block_size to {cache.block_size}, or choose another backend"
        )


def _is_divided(cache: torch.Tensor) -> bool:
    """Whether tokens follow each other evenly, also from one of the backend's blocks to the next:
    then several of its blocks are one of vLLM's."""
    tokens, each = cache.shape[-2], cache.stride(-2)
    return cache.stride(0) == tokens * each


def _merged(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """The attention backend's blocks as vLLM's, which are some of them each."""
    pieces = len(cache) // blocks
    if pieces * blocks != len(cache) or pieces == 1:
        return cache
    shape, strides = list(cache.shape), list(cache.stride())
    shape[0], shape[-2], strides[0] = blocks, pieces * shape[-2], pieces * strides[0]
    return cache.as_strided(shape, strides)


def _region(name: str, cache: torch.Tensor) -> Region:
    """cache: vLLM's logical [B, H, N, C] with the layout's strides; [B, N, C] with MLA."""
    if cache.dim() == 3:
        cache = cache.unsqueeze(1)
    if cache.dim() != 4 or cache.stride(3) != 1:
        raise ConfigError(
            f"attention_backend: layer {name} keeps its cache as {list(cache.shape)} with strides "
            f"{list(cache.stride())}, which is not moved; choose another backend"
        )
    return Region(name, cache.view(torch.uint8), DTYPES[cache.dtype])


def kv_heads(config: VllmConfig) -> int:
    """KV heads of the whole model, divided among the tensor parallel ranks; 1 with MLA."""
    model = config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def required_layout(config: VllmConfig) -> str | None:
    """The layout to ask vLLM for, which keeps its own choice if an attention backend lacks it.

    On GPUs vLLM chooses by the attention backend, and two GPU models would not exchange blocks.
    Every backend of NVIDIA's has this one. Latent attention has one head: all layouts are alike.
    """
    if not splits_blocks(config) or config.model_config.use_mla:
        return None
    return KVCacheLayout.LBHNC.name


def splits_blocks(config: VllmConfig) -> bool:
    """Whether a part of a block's tokens is a part of its bytes."""
    return str(config.device_config.device_type) != "cpu"
