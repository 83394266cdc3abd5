"""Recurrent state: which page has it, and prompts that stop before their last token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllm.v1.request import Request

from disagg.connector import cache_fingerprint, kv_cache_layout, recurrent_state, whole_pages
from disagg.errors import ConfigError
from disagg.vllm_compat.differences import HASHES_BY_CONFIG

BLOCK, SHA = 16, get_hash_fn_by_name("sha256")
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
PAGE = FULL.page_size_bytes
MODE: dict[str, Any] = {"shapes": ((3, 8), (2, 4, 4)), "dtypes": (torch.float32, torch.float32)}
ALIGNED = MambaSpec(
    block_size=BLOCK, mamba_cache_mode="align", page_size_padded=FULL.page_size_bytes, **MODE
)
ONE_PAGE = MambaSpec(block_size=4096, page_size_padded=FULL.page_size_bytes, **MODE)


def cache_of(*specs: KVCacheSpec, blocks: int = 4) -> KVCacheConfig:
    """A group of one layer for each of them, all in the same memory."""
    names = [f"layer.{number}" for number in range(len(specs))]
    size = blocks * PAGE
    tensors = [KVCacheTensor(size, [name], layer_stride=size, block_stride=PAGE) for name in names]
    groups = [KVCacheGroupSpec([n], spec) for n, spec in zip(names, specs, strict=True)]
    return KVCacheConfig(blocks, tensors, groups)


def config_of(**changed: Any) -> Any:
    cache = SimpleNamespace(block_size=BLOCK, mamba_cache_mode="align", use_replayssm=False)
    cache.enable_prefix_caching, cache.prefix_match_unit = True, None
    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    for name, value in changed.items():
        for part in (cache, parallel):
            if hasattr(part, name):
                setattr(part, name, value)
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(),
        model_config=SimpleNamespace(model="m", use_mla=False, enable_sleep_mode=False),
        cache_config=cache,
        parallel_config=parallel,
        speculative_config=changed.get("speculative_config"),
    )


def request(tokens: int, **params: Any) -> Request:
    """A prefill leg's."""
    init_none_hash(SHA)
    sent = {"do_remote_decode": True, **params}
    sampling = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": sent})
    hasher = get_request_block_hasher(BLOCK, SHA)
    return Request("r", list(range(tokens)), sampling, None, block_hasher=hasher)


# ---- requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [2, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_prefill_stops_before_the_last_token(tokens: int) -> None:
    """As if that token had never been there, but for a token of its own."""
    asked, shorter = request(tokens), request(tokens - 1)
    prompt = asked.prompt_token_ids
    assert recurrent_state.leave_last_token(asked, BLOCK)
    for name in ("prompt_token_ids", "num_prompt_tokens", "num_tokens", "block_hashes"):
        assert getattr(asked, name) == getattr(shorter, name), name
    assert list(asked.all_token_ids) == list(range(tokens - 1))
    assert asked.max_tokens == 1
    assert prompt == list(range(tokens)), "others have this list too"


def of_an_image(asked: Request) -> None:
    place = PlaceholderRange(offset=asked.num_prompt_tokens - 4, length=4)
    asked.mm_features = [MultiModalFeatureSpec(None, "image", "i", place)]


def of_embeddings(asked: Request) -> None:
    asked.prompt_embeds = torch.zeros(asked.num_prompt_tokens, 2)


def of_logprobs(asked: Request) -> None:
    asked.skip_reading_prefix_cache = True


def of_no_leg(asked: Request) -> None:
    asked.kv_transfer_params = None


@pytest.mark.parametrize("change", [of_an_image, of_embeddings, of_logprobs, of_no_leg])
def test_prompts_that_are_computed_whole(change: Any) -> None:
    asked = request(40)
    change(asked)
    assert not recurrent_state.leave_last_token(asked, BLOCK)
    assert (asked.num_prompt_tokens, asked.max_tokens) == (40, 5)


def test_a_token_that_is_wanted_or_alone() -> None:
    for asked in (request(40, **{recurrent_state.KEEPS_TOKEN: True}), request(1)):
        assert not recurrent_state.leave_last_token(asked, BLOCK)


def test_which_page_has_the_state() -> None:
    blocks = [0, 0, 7, 9]
    assert [recurrent_state.page(blocks, tokens, BLOCK) for tokens in (33, 48, 49)] == [7, 7, 9]
    assert recurrent_state.page([5], 3000, 4096) == 5


# ---- the cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [ALIGNED, ONE_PAGE])
def test_layers_of_all_kinds_are_the_same_pages(state: MambaSpec) -> None:
    """vLLM views one memory in the shape of each; whatever a block has, it is moved whole."""
    cache = cache_of(state, FULL)
    raw = torch.arange(cache.num_blocks * PAGE, dtype=torch.int64).to(torch.int8)
    attention = raw.view(torch.float32).view(cache.num_blocks, 2, BLOCK, 16)
    kept = raw.view(torch.float32).as_strided((cache.num_blocks, 1, 1, 56), (PAGE // 4, 56, 56, 1))
    views = {"layer.0": kept, "layer.1": attention}
    pages = whole_pages.pages_of(cache, views)
    found = kv_cache_layout.block_cache(views, pages)
    assert len(found.regions) == 1
    (view,) = found.views(found.whole([2]))
    assert b"".join(part.tobytes() for part in view) == raw[2 * PAGE : 3 * PAGE].numpy().tobytes()
    (name,) = cache_fingerprint.layers(cache, views, found)
    assert name == f"layer.0@0+layer.1@1 U8[{PAGE // BLOCK}]"


def test_pages_that_blocks_cannot_share() -> None:
    page = whole_pages.Page(blocks=4, stride=PAGE, size=PAGE - 8, tokens=BLOCK)
    with pytest.raises(ConfigError, match=r"block_size: 16 — layer a has blocks of \d+ bytes"):
        whole_pages.region("a", torch.zeros(4 * PAGE, dtype=torch.int8), page)


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: 2"),
        ({"use_replayssm": True}, "use_replayssm: True"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "speculative_config: mtp"),
    ],
)
def test_what_states_do_not_go_with(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said} — .*(unset it|set 1)$"):
        kv_cache_layout.check_supported(config_of(**changed), cache_of(ALIGNED, FULL))
    kv_cache_layout.check_supported(config_of(**changed), cache_of(FULL))


def test_states_that_are_not_moved() -> None:
    every = MambaSpec(block_size=BLOCK, mamba_cache_mode="all", **MODE)
    with pytest.raises(ConfigError, match="mamba_cache_mode: all — handoffs need align"):
        kv_cache_layout.check_supported(config_of(mamba_cache_mode="all"), cache_of(every, FULL))
    with pytest.raises(ConfigError, match="model: m has only recurrent state"):
        kv_cache_layout.check_supported(config_of(), cache_of(ALIGNED))


def test_one_page_needs_no_hashes_of_vllms() -> None:
    """Without prefix caching these cover as many tokens as the page does; ours are compared."""
    cache = cache_of(ONE_PAGE, FULL)
    if not HASHES_BY_CONFIG.here:
        cache.hash_block_size = 4096
    kv_cache_layout.check_supported(config_of(), cache)
    assert recurrent_state.state_groups(cache) == {0: 4096}
    if HASHES_BY_CONFIG.here:
        return
    cache = cache_of(FULL, FULL)
    cache.hash_block_size = 4096
    with pytest.raises(ConfigError, match="prefix hashes cover 4096 tokens"):
        kv_cache_layout.check_supported(config_of(), cache)
