"""Models whose KV cache is not one of plain attention: layers with a sliding window.

The two engines are these tests' own. The first computes the prompt, which is the reference, and
hands it over to the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers.models.phi3 import Phi3Config

from disagg.testing.vllm_server import VllmServer, token_ids
from engine.conftest import lengths, running, transfer
from engine.windows import BLOCK, GROUP_BYTES, SIZES, WINDOW, make, make_windows

Prompt = Callable[[int], list[int]]
LEASE_S = 3.0


@dataclass(frozen=True)
class Pair:
    first: VllmServer
    second: VllmServer

    def moved(self) -> float:
        return self.second.metric("disagg_handoff_bytes_total", transport="process_memory")

    def failed(self, reason: str) -> float:
        return self.second.metric("disagg_kv_load_failures_total", reason=reason)


@pytest.fixture(scope="module")
def pair(
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Three KV cache groups: two of sliding layers, one of full ones."""
    model = tmp_path_factory.mktemp("model") / "windows"
    make_windows(model)
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))}
    logs = tmp_path_factory.mktemp("logs")
    args = ("--max-model-len", "4096", "--num-gpu-blocks-override", "512")
    servers = [
        vllm_server(name, model, logs / name, transfer("kv_both", lease_s=LEASE_S), args, env=env)
        for name in ("first", "second")
    ]
    with running(servers):
        yield Pair(*servers)


@lengths(5, 257, 1000, long=[128, 384, 3000])
def test_only_the_window_of_sliding_layers_moves(pair: Pair, prompt: Prompt, length: int) -> None:
    ids = prompt(length)
    before = pair.moved()
    answer = pair.second.complete(ids, kv_transfer_params=pair.first.prefill(ids))
    assert token_ids(answer) == token_ids(pair.first.complete(ids))
    known = length - 1  # the last token is computed by decode
    full = -(-known // BLOCK)
    sliding = full - max(0, known - WINDOW + 1) // BLOCK
    assert pair.moved() - before == (full + 2 * sliding) * GROUP_BYTES


@pytest.mark.parametrize("length", [WINDOW + BLOCK - 1, WINDOW + 6 * BLOCK - 1])
def test_a_window_that_begins_with_a_block(pair: Pair, prompt: Prompt, length: int) -> None:
    """vLLM gives back the block before it, which the last token still needs. To take all of the
    prompt as computed would read what is not there, and answer wrong tokens."""
    ids = prompt(length)
    before = pair.failed("window")
    answer = pair.second.complete(ids, kv_transfer_params=pair.first.prefill(ids))
    assert token_ids(answer) == token_ids(pair.first.complete(ids))
    assert pair.failed("window") == before + 1


def test_the_next_turn(pair: Pair, prompt: Prompt) -> None:
    """Both caches hold the first turn; what is handed over continues it."""
    ids = prompt(900)
    pair.second.complete(ids, kv_transfer_params=pair.first.prefill(ids))
    longer, before = [*ids, *prompt(400)], pair.moved()
    answer = pair.second.complete(longer, kv_transfer_params=pair.first.prefill(longer))
    assert token_ids(answer) == token_ids(pair.first.complete(longer))
    assert 0 < pair.moved() - before <= 3 * 4 * GROUP_BYTES


def test_a_load_that_fails_after_a_local_hit(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(900)
    pair.second.complete(ids)
    longer = [*ids, *prompt(400)]
    params = pair.first.prefill(longer)
    time.sleep(LEASE_S + 1)
    before = pair.failed("lease_gone")
    answer = pair.second.complete(longer, kv_transfer_params=params)
    assert token_ids(answer) == token_ids(pair.first.complete(longer))
    assert pair.failed("lease_gone") == before + 1


def test_a_part_of_a_prompt_is_computed(pair: Pair, prompt: Prompt) -> None:
    """The window's blocks are those of the prompt's end: they serve no shorter one."""
    ids = prompt(1000)
    params = pair.first.prefill(ids)
    before = pair.failed("prompt_mismatch")
    other = [*ids[:600], *prompt(200)]
    answer = pair.second.complete(other, kv_transfer_params=params)
    assert token_ids(answer) == token_ids(pair.first.complete(other))
    assert pair.failed("prompt_mismatch") == before + 1


@pytest.mark.slow
def test_a_context_that_changes_the_model(
    vllm_server: Callable[..., VllmServer], prompt: Prompt, tmp_path: Path
) -> None:
    """Phi's rotations are others for all prompts where `max_model_len` is above some limit: two
    engines on different sides of it have nothing to hand over."""
    width, limit = SIZES["hidden_size"] // SIZES["num_attention_heads"], 2048
    rope = {"rope_type": "longrope", "original_max_position_embeddings": limit}
    rope |= {"rope_theta": 10000.0, "short_factor": [1.0] * (width // 2)}
    rope |= {"long_factor": [1 + n / 2 for n in range(width // 2)]}
    config = Phi3Config(
        **SIZES,
        num_hidden_layers=4,
        num_key_value_heads=2,
        original_max_position_embeddings=limit,
        rope_parameters=rope,
        pad_token_id=0,
    )
    make(config, tmp_path / "model")
    env, ids = {"TMPDIR": str(tmp_path)}, prompt(700)
    servers = []
    for name, role, length in (("short", "kv_producer", 2048), ("long", "kv_consumer", 4096)):
        args = ("--num-gpu-blocks-override", "64", "--max-model-len", str(length))
        place = tmp_path / "model", tmp_path / f"{name}.log"
        servers.append(vllm_server(name, *place, transfer(role), args, env=env))
    with running(servers):
        short, long = servers
        params, right = short.prefill(ids), token_ids(long.complete(ids, cache_salt="alone"))
        assert token_ids(long.complete(ids, kv_transfer_params=params)) == right
        assert token_ids(short.complete(ids)) != right
        assert long.metric("disagg_kv_load_failures_total", reason="refused") == 1
        assert "long_context differs: 'max_model_len up to 2048' here" in long.tail(100)
