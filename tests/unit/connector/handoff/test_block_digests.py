"""A prompt's digests: equal for equal prompts in any engine, and for no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from disagg.connector.handoff.block_digests import (
    PromptDigests,
    digests,
    hashable,
    shared_tokens,
)
from disagg.transport.control.ticket import DIGEST

BLOCK, LENGTH = 16, 40
SHA = get_hash_fn_by_name("sha256")
PROMPT = list(range(100, 100 + LENGTH))


def image(identifier: str) -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=2, length=4)
    return [MultiModalFeatureSpec(None, "image", identifier, place)]


def request(tokens: list[int] | None = None, block: int = BLOCK, **more: Any) -> Request:
    init_none_hash(SHA)
    hasher = get_request_block_hasher(block, SHA)
    tokens = PROMPT if tokens is None else tokens
    return Request("r", list(tokens), SamplingParams(), None, block_hasher=hasher, **more)


def of(asked: Request, block: int = BLOCK, num_tokens: int = LENGTH, own: int = BLOCK) -> bytes:
    return PromptDigests(own, "sha256").of(asked, block, num_tokens)


def test_a_digest_for_each_whole_block_and_one_for_the_rest() -> None:
    for tokens in (1, 15, 16, 17, 32, 39, 40):
        assert len(of(request(), num_tokens=tokens)) == (tokens // BLOCK + 1) * DIGEST
    assert of(request()) == of(request())


@pytest.mark.parametrize("at", [0, 15, 16, 31, 32, 39])
def test_a_token_changes_its_block_and_all_behind_it(at: int) -> None:
    other = [*PROMPT]
    other[at] = 7
    ours, theirs = of(request()), of(request(other))
    same = at // BLOCK
    assert ours[: same * DIGEST] == theirs[: same * DIGEST]
    for block in range(same, 3):
        assert ours[block * DIGEST :][:DIGEST] != theirs[block * DIGEST :][:DIGEST]


@pytest.mark.parametrize("length", [10, LENGTH])  # without whole blocks, and with some
@pytest.mark.parametrize(
    "change",
    [
        lambda: {"cache_salt": "salt"},
        lambda: {"mm_features": image("a")},
    ],
    ids=["salt", "image"],
)
def test_salt_and_images_are_part_of_the_rest_too(
    change: Callable[[], dict[str, Any]], length: int
) -> None:
    """vLLM hashes whole blocks; a prompt may have none."""
    plain, changed = request(PROMPT[:length]), request(PROMPT[:length], **change())
    assert of(changed, num_tokens=length) == of(
        request(PROMPT[:length], **change()), num_tokens=length
    )
    ours, theirs = (of(asked, num_tokens=length) for asked in (plain, changed))
    assert ours[-DIGEST:] != theirs[-DIGEST:]
    assert shared_tokens(ours, theirs, length, BLOCK) == 0


def test_another_image_is_another_prompt() -> None:
    one, other = (of(request(PROMPT[:10], mm_features=image(i)), num_tokens=10) for i in "ab")
    assert one != other


def test_the_rest_follows_its_blocks() -> None:
    """The same last tokens behind other blocks, with hashes of vLLM's that would be equal."""
    asked = request()
    first = digests(asked, [b"1" * 32, b"2" * 32], BLOCK, LENGTH)
    other = digests(asked, [b"1" * 32, b"3" * 32], BLOCK, LENGTH)
    assert first[-DIGEST:] != other[-DIGEST:]


def test_an_adapters_weights_are_part_of_every_digest() -> None:
    """Name and path may be equal on two hosts, or stay while the weights change."""
    short = request(PROMPT[:10])  # without a whole block
    assert len({digests(short, [], BLOCK, 10, adapter) for adapter in (b"", b"one", b"other")}) == 3
    asked = request()
    hashes = asked.block_hashes
    plain, one, other = (digests(asked, hashes, BLOCK, LENGTH, a) for a in (b"", b"one", b"other"))
    for block in range(3):
        parts = {of_prompt[block * DIGEST :][:DIGEST] for of_prompt in (plain, one, other)}
        assert len(parts) == 3
    assert digests(asked, hashes, BLOCK, LENGTH, b"one") == one


def test_the_adapter_of_a_request_is_read(tmp_path: Path) -> None:
    found = []
    for content in (b"a", b"b"):
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
        lora = LoRARequest("adapter", 1, str(tmp_path))
        found.append(of(request(lora_request=lora)))
    assert found[0] != found[1]


@pytest.mark.parametrize("block", [8, 32])
def test_in_blocks_of_the_producers_size(block: int) -> None:
    """As an engine of that block size computes them."""
    assert of(request(), block) == of(request(block=block), block, own=block)
    asked = request()
    before = [*asked.block_hashes]
    of(asked, block)
    assert asked.block_hashes == before


def test_shared_tokens() -> None:
    one, rest = of(request()), [*range(900, 960)]
    assert shared_tokens(one, one, LENGTH, BLOCK) == LENGTH
    for same in range(LENGTH):
        other = of(request([*PROMPT[:same], *rest[: LENGTH - same]]))
        assert shared_tokens(one, other, LENGTH, BLOCK) == same // BLOCK * BLOCK
    # Of prompts of two lengths, whole blocks are shared, but no rest.
    longer = of(request([*PROMPT, *rest]), num_tokens=100)
    assert shared_tokens(one, longer, 100, BLOCK) == 32
    assert shared_tokens(longer, one, LENGTH, BLOCK) == 32


def test_prompts_of_embeddings_are_not_handed_off() -> None:
    assert hashable(request())
    asked = request()
    asked.prompt_embeds = torch.zeros(LENGTH, 2)
    assert not hashable(asked)
    asked = request()
    asked.prompt_token_ids = None
    assert not hashable(asked)
