"""A model that sees: what it made of a picture is handed over, and never for another picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.blip import BlipImageProcessorPil
from transformers.models.blip_2 import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
)
from transformers.models.llama import LlamaConfig

from disagg.router.api.bodies import REMOTE_DECODE
from disagg.testing.http import client
from disagg.testing.tokenizer import write_tokenizer
from disagg.testing.vllm_server import VllmServer
from disagg.testing.waiting import eventually
from engine.conftest import beside, routed, running, tiers, transfer
from engine.resets import reset_caches
from engine.windows import SIZES, VOCABULARY

SIDE, SEEN = 56, 144  # pixels, and tokens that stand for a picture: more than a block
LONG = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LOADED = "vllm:kv_offload_total_bytes_total"


def make_seeing(folder: Path) -> None:
    """A checkpoint of random weights, in whose answers every picture shows."""
    folder.mkdir()
    write_tokenizer(folder, VOCABULARY, 8192)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 4}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**small, image_size=SIDE, patch_size=14).to_dict(),
        qformer_config=Blip2QFormerConfig(
            **small, encoder_hidden_size=64, vocab_size=100
        ).to_dict(),
        text_config=LlamaConfig(**text, num_key_value_heads=2, head_dim=64).to_dict(),
        num_query_tokens=SEEN,
        image_text_hidden_size=64,
        image_token_index=tokenizer.vocab["<image>"],
        dtype="float32",
    )
    torch.manual_seed(1)
    model = Blip2ForConditionalGeneration(config).float()
    for name, weights in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(weights, std=0.5)
        elif "query_tokens" in name:
            torch.nn.init.normal_(weights)
        elif weights.dim() == 2:
            torch.nn.init.normal_(weights, std=1.28 / weights.shape[1] ** 0.5)
    model.save_pretrained(folder)
    pixels = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Blip2Processor(pixels, tokenizer, num_query_tokens=SEEN).save_pretrained(folder)


def picture(seed: int) -> dict[str, Any]:
    squares = np.random.default_rng(seed).integers(0, 255, (6, 6, 3))
    file = io.BytesIO()
    Image.fromarray(np.kron(squares, np.ones((40, 40, 1))).astype(np.uint8)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True)
class Pair:
    """url: of a router before both."""

    first: VllmServer
    second: VllmServer
    url: str


@pytest.fixture(scope="module")
def pair(
    vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    place = tmp_path_factory.mktemp("images")
    make_seeing(place / "model")
    args = ("--num-gpu-blocks-override", "256", "--max-model-len", "4096")
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp")), "VLLM_SERVER_DEV_MODE": "1"}
    tier = tiers(host_bytes=1 << 24, directory=str(place / "tier"))

    def server(name: str, config: dict[str, object]) -> VllmServer:
        return vllm_server(name, place / "model", place / f"{name}.log", config, args, env=env)

    first = server("first", transfer("kv_producer"))
    second = server("second", beside(transfer("kv_consumer"), tier))
    pairing = {"local_prefill_tokens": 0, "first_token": "prefill"}
    with running([first, second]), routed([first], [second], pairing=pairing) as url:
        yield Pair(first, second, url)


def answer(url: str, *parts: dict[str, Any]) -> list[int]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": [*parts]}], **LONG}
    got = client().post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert got.status_code == 200, got.text
    tokens: list[int] = got.json()["choices"][0]["token_ids"]
    return tokens


def moved(pair: Pair) -> float:
    return pair.second.metric("disagg_handoff_bytes_total", transport="process_memory")


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_pictures_are_handed_over(pair: Pair) -> None:
    """Which one it was shows in the answer, whatever the words."""
    answers = []
    for words in ("What is it?", "Once more: what do you see here? " * 20):
        for seed in (1, 2):
            before = moved(pair)
            got = answer(pair.url, picture(seed), text(words))
            assert got == answer(pair.first.url, picture(seed), text(words))
            assert moved(pair) > before
            answers.append(tuple(got))
    assert len({*answers}) == 4
    assert answer(pair.url, text("What is it?")) == answer(pair.first.url, text("What is it?"))
    assert sum(pair.second.metrics("disagg_kv_load_failures_total").values()) == 0


def test_a_picture_is_not_taken_for_another(pair: Pair, prompt: Callable[[int], list[int]]) -> None:
    """By a router that mixes them up: the tokens are the same."""
    words = text(" ".join(map(str, prompt(60))))
    body = {"messages": [{"role": "user", "content": [picture(3), words]}], "max_tokens": 1}
    asked = {**body, "kv_transfer_params": REMOTE_DECODE}
    params = pair.first.post("/v1/chat/completions", asked).json()["kv_transfer_params"]
    body["messages"] = [{"role": "user", "content": [picture(4), words]}]
    right = pair.first.post("/v1/chat/completions", {**body, **LONG}).json()
    got = pair.second.post(
        "/v1/chat/completions", {**body, **LONG, "kv_transfer_params": params}
    ).json()
    assert got["choices"][0]["token_ids"] == right["choices"][0]["token_ids"]


def test_tiers_tell_pictures_apart(pair: Pair) -> None:
    words, name = text("And now, out of a tier, what is it? " * 12), "disagg_tier_stored_total"
    stored = pair.second.metric(name, tier="host")
    answer(pair.second.url, picture(5), words)
    assert eventually(lambda: pair.second.metric(name, tier="host") - stored >= 2)
    reset_caches(pair.second)
    for seed, is_known in ((6, False), (5, True)):
        before = pair.second.metric(LOADED, transfer_type="CPU_to_GPU")
        right = answer(pair.first.url, picture(seed), words)
        assert answer(pair.second.url, picture(seed), words) == right
        assert (pair.second.metric(LOADED, transfer_type="CPU_to_GPU") > before) == is_known
