"""Engines that guess tokens and check them: their drafts' caches are handed over and kept too, and
answers are those of an engine that guesses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import Fleet, beside, lengths, routed, running, tiers, transfer
from engine.fields import CHAT, COMPLETION, cases, differing, numbered, streamed, whole
from engine.followed import check_followed
from engine.resets import reset_caches

ENGINES = ("producer", "single")
Prompt = Callable[[int], list[int]]
BLOCK, TOKENS, GUESSED = 128, 120, 3
NGRAMS = {"method": "ngram", "num_speculative_tokens": GUESSED, "prompt_lookup_max": 3}


def write_eagle(model: Path, folder: Path) -> None:
    """An EAGLE-3 head of random weights: hardly a guess of it is right."""
    given = json.loads((model / "config.json").read_text())
    kept = ("hidden_size", "vocab_size", "head_dim", "max_position_embeddings")
    heads, kv_heads, inner = 2, 1, 512
    config = {key: given[key] for key in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "draft_vocab_size": given["vocab_size"],
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    hidden, width = given["hidden_size"], given["head_dim"]
    sizes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (given["vocab_size"], hidden),
        "midlayer.self_attn.q_proj": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * width, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * width),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm")
    draw, tensors = np.random.default_rng(1), dict[str, npt.NDArray[np.float32]]()
    for name, shape in sizes.items():
        values = draw.standard_normal(shape) / np.sqrt(shape[1])
        tensors[f"{name}.weight"] = values.astype(np.float32)
    for name in (*norms, "midlayer.post_attention_layernorm"):
        tensors[f"{name}.weight"] = np.ones(hidden, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Pair:
    """`is_right`: whether what the draft guesses is right, as it is the model itself."""

    first: VllmServer
    second: VllmServer
    is_right: bool


Start = Callable[..., VllmServer]


@pytest.fixture(scope="module")
def start(
    fleet: Fleet,
    model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Start:
    """An engine that shares its secret with the fleet."""
    place = tmp_path_factory.mktemp("speculative")

    def make(name: str, config: dict[str, object], guesses: dict[str, object]) -> VllmServer:
        args: tuple[str, ...] = ("--num-gpu-blocks-override", "256", "--max-model-len", "4096")
        args += ("--max-num-batched-tokens", "512", "--max-num-seqs", "16")
        args += ("--speculative-config", json.dumps(guesses))
        env = {"TMPDIR": str(fleet.storage.parents[1]), "VLLM_SERVER_DEV_MODE": "1"}
        return vllm_server(name, model, place / f"{name}.log", config, args, env=env)

    return make


@pytest.fixture(scope="module", params=["model", pytest.param("eagle", marks=pytest.mark.slow)])
def pair(
    request: pytest.FixtureRequest,
    fleet: Fleet,
    start: Start,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    fleet.wake(*ENGINES)
    folder, is_right = tmp_path_factory.mktemp("drafts"), request.param == "model"
    if is_right:
        guesses: dict[str, object] = {"method": "draft_model", "model": str(model)}
    else:
        write_eagle(model, folder / "eagle")
        guesses = {"method": "eagle3", "model": str(folder / "eagle")}
    guesses["num_speculative_tokens"] = GUESSED
    kept = {"directory": str(folder / "tier"), "reset_keeps_files": True}
    tier = tiers(host_bytes=1 << 24, **kept)
    first = start(f"first-{request.param}", transfer("kv_producer"), guesses)
    second = start(f"second-{request.param}", beside(transfer("kv_consumer"), tier), guesses)
    with running([first, second]):
        yield Pair(first, second, is_right)


def answer(server: VllmServer, ids: list[int], **more: object) -> list[int]:
    (tokens,) = token_ids(server.complete(ids, max_tokens=TOKENS, **more))
    return tokens


def guessed(server: VllmServer) -> tuple[float, float]:
    """How many tokens, and how many of them were right."""
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    return drafted, server.metric("vllm:spec_decode_num_accepted_tokens_total")


def check_guesses(pair: Pair, before: tuple[float, float]) -> None:
    drafted, accepted = (now - then for now, then in zip(guessed(pair.second), before, strict=True))
    assert drafted > TOKENS / 2
    if pair.is_right:
        assert accepted > 0.9 * drafted, "the draft's own cache did not come along"


@lengths(5, 129, long=[128, 1000])
def test_the_drafts_cache_is_handed_over(
    pair: Pair, fleet: Fleet, prompt: Prompt, length: int
) -> None:
    ids = prompt(length)
    right, params = answer(fleet.single, ids), pair.first.prefill(ids)
    loaded, before = pair.second.metric("disagg_handoffs_total", **LOADED), guessed(pair.second)
    assert answer(pair.second, ids, kv_transfer_params=params) == right
    assert pair.second.metric("disagg_handoffs_total", **LOADED) == loaded + 1
    check_guesses(pair, before)


@lengths(129, long=[2000])
def test_followed(pair: Pair, fleet: Fleet, prompt: Prompt, length: int) -> None:
    before = guessed(pair.second)

    def right(ids: list[int]) -> list[list[int]]:
        return [answer(fleet.single, ids)]

    check_followed(pair.first, pair.second, lambda: prompt(length), right, max_tokens=TOKENS)
    check_guesses(pair, before)


LOADED = {"outcome": "loaded", "transport": "process_memory"}


def test_tiers_keep_it(pair: Pair, fleet: Fleet, prompt: Prompt) -> None:
    """Prompt and answer, out of host memory and out of files."""
    ids = prompt(700)
    name = "disagg_tier_stored_total"
    stored = pair.second.metric(name, tier="directory")
    ids += answer(pair.second, ids)
    blocks = (len(ids) - 1) // BLOCK
    assert eventually(lambda: pair.second.metric(name, tier="directory") - stored >= blocks)
    right = answer(fleet.single, ids)
    for host in (False, True):
        reset_caches(pair.second, host=host)
        read, before = loads(pair.second), guessed(pair.second)
        assert answer(pair.second, ids) == right
        assert loads(pair.second) > read
        check_guesses(pair, before)


def loads(server: VllmServer) -> float:
    return server.metric("vllm:kv_offload_total_bytes_total", transfer_type="CPU_to_GPU")


def test_a_draft_on_one_side_alone(pair: Pair, fleet: Fleet, prompt: Prompt) -> None:
    """Its layers are not there: refused by name, and computed."""
    ids = prompt(300)
    right, params = answer(fleet.single, ids), fleet.producer.prefill(ids)
    assert answer(pair.second, ids, kv_transfer_params=params) == right
    assert "draft" in pair.second.tail(200)


@pytest.mark.slow
def test_guesses_out_of_the_prompt(fleet: Fleet, start: Start, prompt: Prompt) -> None:
    """These have no cache, so that prefill need not guess at all."""
    guesses = start("ngrams", transfer("kv_consumer"), NGRAMS)
    with running([guesses]):
        for length, more in ((5, {}), (300, {}), (700, {"allowed_token_ids": [300]})):
            ids = prompt(length)
            right, params = answer(fleet.single, ids, **more), fleet.producer.prefill(ids)
            before = guessed(guesses)
            assert answer(guesses, ids, kv_transfer_params=params, **more) == right
            assert not more or guessed(guesses)[1] > before[1]
        assert guesses.metric("disagg_handoffs_total", **LOADED) == 3

        def alone(ids: list[int]) -> list[list[int]]:
            return token_ids(fleet.single.complete(ids))

        check_followed(fleet.producer, guesses, lambda: prompt(300), alone)


@pytest.mark.parametrize(
    ("first_token", "ask", "path"),
    [
        pytest.param("decode", whole, COMPLETION, marks=pytest.mark.slow),
        ("prefill", streamed, COMPLETION),
        pytest.param("decode", streamed, CHAT, marks=pytest.mark.slow),
        pytest.param("prefill", streamed, CHAT, marks=pytest.mark.slow),
    ],
)
def test_whatever_is_asked_is_answered_as_by_one_engine(
    pair: Pair, first_token: str, ask: Callable[..., Any], path: str
) -> None:
    """Seeds, penalties, grammars, log-probabilities: of one engine that guesses as well."""
    wrong: list[str] = []
    pairing = {"first_token": first_token, "local_prefill_tokens": 0}
    with routed([pair.first], [pair.second], pairing=pairing) as url:

        def compare(more: dict[str, Any]) -> None:
            body = numbered(path, more)
            got = ask(url, path, body)
            # Its own prefix cache would leave one token, as a handoff must not.
            expected = ask(pair.first.url, path, {"cache_salt": "alone", **body})
            found = (f"{str(more)[:300]}\n  {each[:500]}" for each in differing(got, expected))
            wrong.extend(found)

        # Beside one of these, a step with guesses ends vLLM 0.32.
        alone = [more for more in cases(path) if "logprob_token_ids" in more]
        with ThreadPoolExecutor(4) as pool:
            [*pool.map(compare, [more for more in cases(path) if more not in alone])]
        [*map(compare, alone)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_greedy_answer_beside_sampled_ones(pair: Pair, fleet: Fleet, prompt: Prompt) -> None:
    """In one batch: each keeps its own temperature."""
    ids = prompt(300)
    right, sampled = answer(fleet.single, ids), {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
    for server in (pair.first, pair.second):
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(answer, server, prompt(200), **sampled) for _ in range(2)]
            assert pool.submit(answer, server, ids).result() == right
            [other.result() for other in others]
