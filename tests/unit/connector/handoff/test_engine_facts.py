"""What a scheduler half reads of its engine's configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.connector.handoff.test_consumer_scheduler import FACTS
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from disagg.connector.handoff.engine_facts import _late_groups

SHAPE: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.float32,
}
KINDS: dict[str, KVCacheSpec] = {
    "full": FullAttentionSpec(**SHAPE),
    "latent": MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1}),
    "window": SlidingWindowSpec(**SHAPE, sliding_window=40),
    "local": ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32),
    "state": MambaSpec(block_size=16, shapes=((2, 8),), dtypes=(torch.float32,)),
}


def test_which_groups_keep_what_while_a_prompt_is_computed() -> None:
    groups = [KVCacheGroupSpec([name], spec) for name, spec in KINDS.items()]
    found = _late_groups(KVCacheConfig(8, [], groups))
    assert found == {2: 40, 3: 0, 4: 0}


@pytest.mark.parametrize("size", [16, 32])
def test_a_block_is_final_early_if_no_later_step_frees_it(size: int) -> None:
    """vLLM frees the blocks whose tokens are all more than a window behind the next token."""
    for window in (1, 16, 40, 100):
        facts = replace(FACTS, block_size=size, late_groups={1: window, 2: 0})
        for tokens in range(1, 300):
            first = facts.final_from(1, tokens)
            assert first is not None
            steps = range(tokens + 1)
            freed = max((max(0, computed - window + 1) // size for computed in steps), default=0)
            assert freed <= first <= freed + 1
            assert facts.final_from(0, tokens) == 0
            assert facts.final_from(2, tokens) is None
