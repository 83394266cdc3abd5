"""Recurrent state: what Mamba, linear attention and short convolution layers keep of a prompt.

Each such layer's KV cache group keeps it as one page: the state after some token. It cannot be
rolled back by a token. Decode computes a prompt's last token itself, so prefill stops before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

KEEPS_TOKEN = "first_token"
"""In a prefill leg's params: the router wants its token, so compute the whole prompt."""


def state_groups(kv_cache: KVCacheConfig) -> dict[int, int]:
    """The KV cache groups with recurrent state: index -> tokens per page."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    return {i: spec.block_size for i, spec in enumerate(specs) if isinstance(spec, MambaSpec)}


def problems(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    """Why recurrent state cannot be handed off here, each with the setting to change."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    kept = [spec for spec in specs if isinstance(spec, MambaSpec)]
    found = []
    if kept and len(kept) == len(specs):
        found.append(
            f"model: {config.model_config.model} has only recurrent state and no attention, "
            "which is not handed off; serve it without a KV connector"
        )
    if any(spec.mamba_cache_mode not in ("none", "align") for spec in kept):
        found.append(
            f"mamba_cache_mode: {config.cache_config.mamba_cache_mode} — handoffs need align"
        )
    if kept and config.speculative_config is not None:
        found.append(
            f"speculative_config: {config.speculative_config.method} — not handed off with "
            "recurrent state; unset it"
        )
    stages = config.parallel_config.pipeline_parallel_size
    if kept and stages > 1:
        found.append(
            f"pipeline_parallel_size: {stages} — not handed off with recurrent state; set 1"
        )
    if kept and config.cache_config.use_replayssm:
        found.append("use_replayssm: True — its state is not handed off; unset it")
    return found


def are_one_page(kv_cache: KVCacheConfig) -> bool:
    """Whether a request has a single page of state, so that vLLM does not hash its blocks."""
    specs = (group.kv_cache_spec for group in kv_cache.kv_cache_groups)
    return any(isinstance(s, MambaSpec) and s.mamba_cache_mode == "none" for s in specs)


def rest_is_full_attention(kv_cache: KVCacheConfig) -> bool:
    """Whether all other layers have full attention. A load brings the state in any case, so it may
    then begin after all attention blocks in the engine's own cache, whatever state is cached."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    others = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    first = next(iter(others), None)
    full = isinstance(first, FullAttentionSpec) and others.count(first) == len(others)
    return full and len(others) < len(specs)


# ---- of each request ----------------------------------------------------------------------


def page(block_ids: Sequence[int], tokens: int, page_tokens: int) -> int:
    """Of a group's blocks, in prompt order: the one with the state after that many tokens."""
    return block_ids[(tokens - 1) // page_tokens]


def leave_last_token(request: Request, hash_block_size: int) -> bool:
    """Let a prefill stop one token early; the token that it then samples is discarded.

    Once per request, before it is scheduled. Returns False and changes nothing if the router wants
    the prefill's token, or the prompt's last token cannot be left out.
    """
    params, tokens = request.kv_transfer_params, request.num_prompt_tokens - 1
    if not params or params.get(KEEPS_TOKEN) or not _may_leave_last_token(request):
        return False
    assert request.prompt_token_ids is not None
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[tokens:]
    del request.block_hashes[tokens // hash_block_size :]
    request.num_prompt_tokens = tokens
    request.max_tokens = 1
    return True


def _may_leave_last_token(request: Request) -> bool:
    """Not the only token, not part of an image, and only in a prompt that consists of tokens."""
    tokens = request.num_prompt_tokens - 1
    ends = (f.mm_position.offset + f.mm_position.length for f in request.mm_features)
    return (
        tokens > 0
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.skip_reading_prefix_cache  # prompt logprobs: decode computes it all
        and max(ends, default=0) <= tokens
    )
