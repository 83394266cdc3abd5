"""Recurrent state: what Mamba, linear attention and short convolutions keep of a prompt.

It is one page of each such layer's KV cache group, as it stands behind some token, and cannot be
taken back by one. Decode computes a prompt's last token itself, so prefill has to stop before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from disagg.errors import ConfigError
from disagg.transport.blocks import Region

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

KEEPS_TOKEN = "first_token"
"""In the params of a prefill leg: its token is wanted, so its whole prompt is to be computed."""


def state_groups(kv_cache: KVCacheConfig) -> dict[int, int]:
    """The KV cache groups that keep state: index -> tokens that each of its pages stands for."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    return {i: spec.block_size for i, spec in enumerate(specs) if isinstance(spec, MambaSpec)}


class Page(NamedTuple):
    """One layer's blocks as bytes: how many, from one to the next, of each, and its tokens."""

    blocks: int
    stride: int
    size: int
    tokens: int


def problems(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    """Of handing over what layers keep as state, each with the setting to change."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    kept = [spec for spec in specs if isinstance(spec, MambaSpec)]
    found = []
    if kept and len(kept) == len(specs):
        found.append(
            f"model: {config.model_config.model} keeps recurrent state alone, without attention, "
            "which is not handed over; serve it without a KV connector"
        )
    if any(spec.mamba_cache_mode not in ("none", "align") for spec in kept):
        found.append(
            f"mamba_cache_mode: {config.cache_config.mamba_cache_mode} — handoffs need align"
        )
    if kept and config.speculative_config is not None:
        found.append(
            f"speculative_config: {config.speculative_config.method} — not handed over beside "
            "recurrent state; unset it"
        )
    stages = config.parallel_config.pipeline_parallel_size
    if kept and stages > 1:
        found.append(
            f"pipeline_parallel_size: {stages} — not handed over beside recurrent state; set 1"
        )
    if kept and config.cache_config.use_replayssm:
        found.append("use_replayssm: True — its state is not handed over; unset it")
    return found


def are_one_page(kv_cache: KVCacheConfig) -> bool:
    """Whether a request has one page of state, and vLLM no hashes of its blocks therefore."""
    specs = (group.kv_cache_spec for group in kv_cache.kv_cache_groups)
    return any(isinstance(s, MambaSpec) and s.mamba_cache_mode == "none" for s in specs)


def beside_full_attention(kv_cache: KVCacheConfig) -> bool:
    """Whether there is nothing else: then a load, which brings the state in any case, may begin
    behind all blocks that attention has in the engine's own cache, whatever state is there."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    others = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    first = next(iter(others), None)
    full = isinstance(first, FullAttentionSpec) and others.count(first) == len(others)
    return full and len(others) < len(specs)


def pages_of(config: VllmConfig, kv_cache: KVCacheConfig) -> dict[str, Page]:
    """Of each layer with memory of its own, where some keep state, which has no heads or tokens."""
    if not state_groups(kv_cache):
        return {}
    tokens, groups = config.cache_config.block_size, kv_cache.kv_cache_groups
    sizes = {n: int(g.kv_cache_spec.page_size_bytes) for g in groups for n in g.layer_names}
    return {
        name: Page(kv_cache.num_blocks, tensor.block_stride, sizes[name], tokens)
        for tensor in kv_cache.kv_cache_tensors
        for name in tensor.layers
    }


def region(name: str, cache: torch.Tensor, page: Page) -> Region:
    """Regions are cut by tokens, so a page is said to have as many as a block, of equal size."""
    if page.size % page.tokens:
        raise ConfigError(
            f"block_size: {page.tokens} — layer {name} has blocks of {page.size} bytes, which is "
            "no multiple of it; choose another"
        )
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    begin = cache.data_ptr() - whole.data_ptr()
    each = page.size // page.tokens
    shape, strides = (page.blocks, 1, page.tokens, each), (page.stride, page.size, each, 1)
    return Region(name, whole.as_strided(shape, strides, begin), "U8")


# ---- of each request ----------------------------------------------------------------------


def page(block_ids: Sequence[int], tokens: int, page_tokens: int) -> int:
    """Of a group's blocks, in prompt order: the one with the state behind that many tokens."""
    return block_ids[(tokens - 1) // page_tokens]


def leave_last_token(request: Request, hash_block_size: int) -> bool:
    """Have a prefill end one token early, with a token of its own that is of no use to anybody.

    Once for each request, before it is scheduled. False, and nothing done, where its token is
    wanted, and for prompts whose last token cannot be left out.
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
    """Not the only one, none of an image, and only of a prompt that is made of tokens."""
    tokens = request.num_prompt_tokens - 1
    ends = (f.mm_position.offset + f.mm_position.length for f in request.mm_features)
    return (
        tokens > 0
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.skip_reading_prefix_cache  # prompt logprobs: decode computes it all
        and max(ends, default=0) <= tokens
    )
