"""What a scheduler half knows about its own engine. Fixed from the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg.connector.handoff.block_digests import PromptDigests
from disagg.connector.kv_cache_layout import (
    has_windows,
    kv_heads,
    splits_blocks,
)
from disagg.connector.recurrent_state import state_groups
from disagg.vllm_compat.kv_cache import hash_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class EngineFacts:
    """One engine, as its producer and its consumer part both need it.

    block_size: tokens per block. hash_block_size: tokens per block hash of vLLM's. world_size:
    tensor parallel ranks. kv_heads: of the whole model. windows: some layers have a sliding window.
    state_groups: KV cache group -> tokens per page, for groups of recurrent state. splits_blocks:
    a part of a block's tokens is a part of its bytes, so the two engines' block sizes may differ.
    speculates: it guesses tokens, with a draft model or without.
    """

    engine_id: str
    block_size: int
    hash_block_size: int
    world_size: int
    kv_heads: int
    windows: bool
    state_groups: Mapping[int, int]
    splits_blocks: bool
    speculates: bool
    digests: PromptDigests

    @classmethod
    def of(cls, config: VllmConfig, kv_cache: KVCacheConfig) -> EngineFacts:
        """Read them from vLLM's configuration."""
        assert config.kv_transfer_config is not None
        hashed = hash_block_size(config, kv_cache)
        return cls(
            engine_id=str(config.kv_transfer_config.engine_id),
            block_size=config.cache_config.block_size,
            hash_block_size=hashed,
            world_size=config.parallel_config.tensor_parallel_size,
            kv_heads=kv_heads(config),
            windows=has_windows(kv_cache),
            state_groups=state_groups(kv_cache),
            splits_blocks=splits_blocks(config),
            speculates=config.speculative_config is not None,
            digests=PromptDigests(hashed, config.cache_config.prefix_caching_hash_algo),
        )
