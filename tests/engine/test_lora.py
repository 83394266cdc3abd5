"""LoRA adapters: handed over and kept in tiers like the model itself, and never taken for another
one that has the same name and place, but other weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import AS_OPERATOR, beside, routed, running, tiers, transfer
from engine.followed import check_followed

Prompt = Callable[[int], list[int]]
RANK, BLOCK = 8, 128
LOADED = {"outcome": "loaded", "transport": "process_memory"}


def write_adapter(model: Path, folder: Path, seed: int) -> None:
    """Random weights in PEFT's format, far from those of other seeds."""
    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    of_queries, of_keys = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = {
        "q_proj": (hidden, of_queries * width),
        "k_proj": (hidden, of_keys * width),
        "v_proj": (hidden, of_keys * width),
    }
    draw, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (given, made) in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for side, shape in (("A", (RANK, given)), ("B", (made, RANK))):
                values = draw.standard_normal(shape) / np.sqrt(shape[1])
                tensors[f"{at}.lora_{side}.weight"] = values.astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "task_type": "CAUSAL_LM"}
    described |= {"target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))


@dataclass(frozen=True)
class Engines:
    """`later` starts when adapter `a` has other weights; the others keep the old ones. It shares
    `second`'s directory."""

    first: VllmServer
    second: VllmServer
    later: VllmServer


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `a` and `b`."""
    place = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b")):
        write_adapter(model, place / name, seed)
    return place


@pytest.fixture(scope="module")
def engines(
    model: Path,
    adapters: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    place = tmp_path_factory.mktemp("lora")
    args: tuple[str, ...] = (
        "--num-gpu-blocks-override",
        "256",
        "--max-model-len",
        "4096",
        "--enable-lora",
    )
    args += ("--middleware", "disagg.engine.routes.Routes")
    args += ("--max-num-batched-tokens", "512", "--max-num-seqs", "16")
    args += ("--max-lora-rank", str(RANK), "--max-loras", "2", "--lora-modules")
    args += tuple(f"{name}={adapters / name}" for name in ("a", "b"))
    (place / "tmp").mkdir()
    env = {"TMPDIR": str(place / "tmp"), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    tier = tiers(host_bytes=1 << 24, directory=str(place / "tier"))

    def server(name: str, config: dict[str, object]) -> VllmServer:
        return vllm_server(name, model, place / f"{name}.log", config, args, env=env)

    first = server("first", transfer("kv_producer"))
    second = server("second", beside(transfer("kv_consumer"), tier))
    later = server("later", beside(transfer("kv_consumer"), tier))
    with running([first, second]):
        yield Engines(first, second, later)


def ask(server: VllmServer, adapter: str, ids: list[int], **more: object) -> list[int]:
    (answer,) = token_ids(server.complete(ids, model=adapter, **more))
    return answer


def operate(url: str, path: str, asked: object) -> httpx.Response:
    return client().post(f"{url}{path}", json=asked, headers=AS_OPERATOR, timeout=60)


def found(server: VllmServer) -> float:
    """Bytes that it read out of the directory."""
    return server.metric("vllm:kv_offload_total_bytes_total", transfer_type="STORAGE_to_CPU")


def test_each_is_handed_over(engines: Engines, prompt: Prompt) -> None:
    """The same prompts for all; that their answers differ shows that adapters do something."""
    for length in (5, 128, 700):
        ids, answers = prompt(length), set[tuple[int, ...]]()
        for adapter in ("tiny", "a", "b", "a"):
            params = engines.first.prefill(ids, model=adapter)
            answer = ask(engines.second, adapter, ids, kv_transfer_params=params)
            assert answer == ask(engines.first, adapter, ids)
            answers.add(tuple(answer))
        assert len(answers) == 3
    assert engines.second.metric("disagg_kv_load_failures_total", reason="prompt_mismatch") == 0
    assert engines.second.metric("disagg_handoffs_total", **LOADED) == 12


@pytest.mark.parametrize("adapter", ["tiny", "a"])
def test_followed(engines: Engines, prompt: Prompt, adapter: str) -> None:
    def right(ids: list[int]) -> list[list[int]]:
        return [ask(engines.first, adapter, ids, cache_salt="alone")]

    check_followed(engines.first, engines.second, lambda: prompt(2000), right, model=adapter)


def test_one_is_not_taken_for_another(engines: Engines, prompt: Prompt) -> None:
    """By a router that mixes them up."""
    ids = prompt(700)
    right = ask(engines.first, "a", ids)
    params = engines.first.prefill(ids, model="b")
    assert ask(engines.second, "a", ids, kv_transfer_params=params) == right


def test_one_is_loaded_by_all(
    engines: Engines, prompt: Prompt, model: Path, adapters: Path
) -> None:
    """Through the router, while they serve."""
    write_adapter(model, adapters / "c", 5)
    with routed([engines.first], [engines.second], pairing={"local_prefill_tokens": 0}) as url:
        asked = {"lora_name": "c", "lora_path": str(adapters / "c")}
        for expected in (200, 400):
            answer = operate(url, "/v1/load_lora_adapter", asked)
            assert answer.status_code == expected, answer.text
        assert "prefill-0 answered 400" in answer.text
        assert "already" in answer.text
        body = completion(prompt(300), model="c")
        before = engines.second.metric("disagg_handoffs_total", **LOADED)
        got = client().post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert token_ids(got) == token_ids(engines.first.complete(**body))
        assert engines.second.metric("disagg_handoffs_total", **LOADED) == before + 1
        said = client().get(f"{engines.first.url}/disagg/adapters", timeout=60).json()
        more = {"is_3d_lora_weight": False, "load_inplace": False}
        assert said == [{**asked, **more}], "not those of its arguments"
        answer = operate(url, "/v1/unload_lora_adapter", asked)
        assert answer.status_code == 200
        assert engines.first.post("/v1/completions", body).status_code == 404


def test_one_is_loaded_again_in_place(
    engines: Engines, prompt: Prompt, model: Path, adapters: Path
) -> None:
    """Into engines that go on. What a lease holds of the old weights is of no use to the new."""
    where, both = adapters / "d", (engines.first, engines.second)
    asked = {"lora_name": "d", "lora_path": str(where)}
    write_adapter(model, where, 11)
    for server in both:
        assert server.post("/v1/load_lora_adapter", asked).status_code == 200
    before, after = prompt(700), prompt(700)
    early = engines.first.prefill(before, model="d")
    old = ask(engines.first, "d", before, cache_salt="old weights")
    shutil.rmtree(where)
    write_adapter(model, where, 12)
    for server in both:
        answer = server.post("/v1/load_lora_adapter", asked | {"load_inplace": True})
        assert answer.status_code == 200, answer.text

    loaded = engines.second.metric("disagg_handoffs_total", **LOADED)
    params = engines.first.prefill(after, model="d")
    handed = ask(engines.second, "d", after, kv_transfer_params=params)
    assert handed == ask(engines.first, "d", after, cache_salt="new weights")
    assert engines.second.metric("disagg_handoffs_total", **LOADED) == loaded + 1

    failed = engines.second.metric("disagg_kv_load_failures_total", reason="prompt_mismatch")
    handed = ask(engines.second, "d", before, kv_transfer_params=early)
    assert handed == ask(engines.first, "d", before, cache_salt="new weights") != old
    now = engines.second.metric("disagg_kv_load_failures_total", reason="prompt_mismatch")
    assert now == failed + 1


@pytest.mark.slow
def test_other_weights_in_the_same_place(
    engines: Engines, prompt: Prompt, model: Path, adapters: Path
) -> None:
    """Trained anew: what a prefill engine or a directory still has of the old ones is not used."""
    ids = {"a": prompt(700), "b": prompt(700)}
    stored = engines.second.metric("disagg_tier_stored_total", tier="directory")
    old = {name: ask(engines.second, name, ids[name]) for name in ids}

    def is_stored() -> bool:
        now = engines.second.metric("disagg_tier_stored_total", tier="directory")
        return now - stored >= 2 * (700 // BLOCK)

    assert eventually(is_stored)
    shutil.rmtree(adapters / "a")
    write_adapter(model, adapters / "a", 7)
    with running([engines.later]):
        params = {name: engines.first.prefill(ids[name], model=name) for name in ids}
        before = found(engines.later)
        assert ask(engines.later, "b", ids["b"]) == old["b"]
        assert found(engines.later) > before, "it did not change"
        before = found(engines.later)
        handed = ask(engines.later, "a", ids["a"], kv_transfer_params=params["a"])
        right = ask(engines.later, "a", ids["a"], cache_salt="computed anew")
        assert handed == right != old["a"]
        assert found(engines.later) == before
        assert engines.later.metric("disagg_kv_load_failures_total", reason="prompt_mismatch") == 1
