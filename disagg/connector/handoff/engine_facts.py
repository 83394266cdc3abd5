"""What a scheduler half knows about its own engine. Fixed from the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from disagg.connector.handoff.block_digests import PromptDigests
from disagg.connector.kv_cache_layout import (
    has_windows,
    kv_heads,
    splits_blocks,
)
from disagg.connector.recurrent_state import state_groups
from disagg.connector.whole_pages import (
    are_mixed,
    are_packed,
    group_block_sizes,
    layer_specs,
)
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
    tokens per page, for groups of recurrent state. late_groups: KV cache group -> how many of a
    prompt's last tokens keep their blocks while it is computed (0: blocks may change until then);
    all other groups keep the blocks of all tokens. splits_blocks: a part of a block's tokens is a
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
    late_groups: Mapping[int, int] = field(default_factory=dict)
    groups: int = 1
    """How many KV cache groups there are."""
    step_tokens: int = 0
    """How many tokens of a prompt are computed in one step at most."""

    def final_from(self, group: int, tokens: int) -> int | None:
        """The first block of a prompt of so many tokens that is final as soon as it is computed.
        The ones before it, or all if None, are not before the whole prompt is."""
        window = self.late_groups.get(group)
        if window is None:
            return 0
        # One token more than the window: vLLM frees a block when the step after it begins.
        return -(-max(0, tokens - window + 1) // self.tokens_of(group)) if window else None

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
            late_groups=_late_groups(kv_cache),
            groups=len(kv_cache.kv_cache_groups),
            step_tokens=config.scheduler_config.max_num_batched_tokens,
        )


def _late_groups(kv_cache: KVCacheConfig) -> dict[int, int]:
    """See `EngineFacts`. Kinds of attention that are not known here go last as a whole."""
    found = {}
    for number, group in enumerate(kv_cache.kv_cache_groups):
        specs = layer_specs(group)
        if {type(spec) for spec in specs} <= {FullAttentionSpec, MLAAttentionSpec}:
            continue
        first = specs[0] if len(set(specs)) == 1 else None
        found[number] = first.sliding_window if type(first) is SlidingWindowSpec else 0
    return found
