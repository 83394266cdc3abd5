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
from disagg.connector.whole_pages import are_mixed, are_packed, group_block_sizes
from disagg.vllm_compat.kv_cache import hash_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class EngineFacts:
    """One engine, as its producer and its consumer part both need it.

    block_size: tokens per block. group_block_sizes: by KV cache group, where they differ, else
    empty; block_size is then the smallest. whole_blocks: ranks cannot slice the blocks.
    hash_block_size: tokens per block hash of vLLM's. world_size: tensor parallel ranks. kv_heads:
    of the whole model. windows: some layers have a sliding window. state_groups: KV cache group ->
    tokens per page, for groups of recurrent state. splits_blocks: a part of a block's tokens is a
    part of its bytes, so the two engines' block sizes may differ. speculates: it guesses tokens,
    with a draft model or without.
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
    group_block_sizes: tuple[int, ...] = ()
    whole_blocks: bool = False

    def tokens_of(self, group: int) -> int:
        """Tokens per block in a KV cache group."""
        return self.group_block_sizes[group] if self.group_block_sizes else self.block_size

    @classmethod
    def of(cls, config: VllmConfig, kv_cache: KVCacheConfig) -> EngineFacts:
        """Read them from vLLM's configuration."""
        assert config.kv_transfer_config is not None
        hashed = hash_block_size(config, kv_cache)
        mixed, states = are_mixed(kv_cache), state_groups(kv_cache)
        return cls(
            engine_id=str(config.kv_transfer_config.engine_id),
            block_size=config.cache_config.block_size,
            hash_block_size=hashed,
            world_size=config.parallel_config.tensor_parallel_size,
            kv_heads=kv_heads(config),
            windows=has_windows(kv_cache),
            state_groups=states,
            splits_blocks=splits_blocks(config),
            speculates=config.speculative_config is not None,
            digests=PromptDigests(hashed, config.cache_config.prefix_caching_hash_algo),
            group_block_sizes=group_block_sizes(kv_cache) if mixed else (),
            whole_blocks=mixed or bool(states) or are_packed(kv_cache),
        )
