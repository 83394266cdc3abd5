"""Hidden states of a real engine equal those of a plain forward pass, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from disagg.connector.hidden_states import (
    HiddenStatesError,
    cleanup_hidden_states,
    load_hidden_states,
)
from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.testing.waiting import eventually

LAYERS = [0, 1, 2, 4]  # the embeddings and the last layer's output among them
CHUNK = 512
MAX_LEN = 2048
# Of the largest value: both compute in float32, in another order.
TOLERANCE = 1e-4
Prompt = Callable[[int], list[int]]
States = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hidden") / "states"


@pytest.fixture(scope="module")
def engine(
    deep_model: Path,
    folder: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmServer]:
    """Chunked prefill, a prefix cache, and so few blocks that requests are preempted."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        # Asked for in any order, they come in that of the layers.
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS[::-1]}},
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "disagg.connector",
        "kv_role": "kv_both",
        # So small that most files go through it in several pieces.
        "kv_connector_extra_config": {"shared_storage_path": str(folder), "buffer_bytes": 1 << 20},
    }
    server = vllm_server(
        "hidden-states",
        deep_model,
        tmp_path_factory.mktemp("logs") / "hidden-states.log",
        transfer,
        (
            *("--speculative-config", json.dumps(speculative)),
            *("--max-num-batched-tokens", str(CHUNK), "--max-model-len", str(MAX_LEN)),
            *("--num-gpu-blocks-override", "24"),
        ),
    )
    with server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def plain(deep_model: Path) -> Callable[[list[int]], torch.Tensor]:
    """[tokens, layers, hidden] of a plain forward pass."""
    loaded = AutoModelForCausalLM.from_pretrained(deep_model, dtype=torch.float32).eval()
    outputs: list[torch.Tensor] = []
    for layer in loaded.model.layers:
        layer.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    # Transformers gives the last layer's output only with the norm that follows.
    loaded.model.norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))

    @torch.no_grad()
    def forward(tokens: list[int]) -> torch.Tensor:
        outputs.clear()
        loaded.model(torch.tensor([tokens]))
        return torch.stack([outputs[layer][0] for layer in LAYERS], dim=1)

    return forward


def ask(engine: VllmServer, ids: list[int], **options: Any) -> tuple[dict[str, Any], str]:
    """The answer, and the path it names."""
    answer = engine.complete(ids, **{"max_tokens": 1, **options})
    return answer, answer["kv_transfer_params"]["hidden_states_path"]


def check(states: States, tokens: list[int], plain: Callable[[list[int]], torch.Tensor]) -> None:
    assert states["token_ids"].tolist() == tokens
    ours, theirs = states["hidden_states"], plain(tokens)
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    for index, layer in enumerate(LAYERS):
        largest = theirs[:, index].abs().max()
        difference = (ours[:, index] - theirs[:, index]).abs().max() / largest
        assert difference < TOLERANCE, f"layer {layer}"


def test_states_are_those_of_a_plain_forward_pass(
    engine: VllmServer, folder: Path, prompt: Prompt, plain: Any
) -> None:
    """All at once; some longer than a chunk, one as long as the model can take."""
    lengths = (1, 5, 127, 128, 129, CHUNK + 1, 1500, MAX_LEN - 1)
    prompts = [prompt(length) for length in lengths]
    with ThreadPoolExecutor(len(prompts)) as pool:
        paths = [path for _, path in pool.map(partial(ask, engine), prompts)]
    assert len(set(paths)) == len(paths)
    for ids, path in zip(prompts, paths, strict=True):
        assert Path(path).parent == folder
        check(load_hidden_states(path, 60), ids, plain)
        cleanup_hidden_states(path)
        assert not os.path.exists(path)


def test_tokens_from_the_prefix_cache_have_their_states(
    engine: VllmServer, prompt: Prompt, plain: Any
) -> None:
    ids = prompt(600)
    ask(engine, ids)
    for tokens in (ids, ids[:400] + prompt(50)):
        answer, path = ask(engine, tokens)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 384
        check(load_hidden_states(path, 60), tokens, plain)


def test_the_answers_own_states_on_request(engine: VllmServer, prompt: Prompt, plain: Any) -> None:
    ids = prompt(200)
    wanted = {"include_output_tokens": True}
    answer, path = ask(engine, ids, max_tokens=70, kv_transfer_params=wanted)
    (made,) = token_ids(answer)
    assert len(made) == 70
    # The last token was never the input of a forward pass.
    check(load_hidden_states(path, 60), ids + made[:-1], plain)
    _, path = ask(engine, ids, max_tokens=70)
    check(load_hidden_states(path, 60), ids, plain)


def test_preempted_requests_have_all_their_states(
    engine: VllmServer, prompt: Prompt, plain: Any
) -> None:
    """24 blocks for eight requests that each grow to 5."""
    prompts = [prompt(380) for _ in range(8)]
    wanted = {"include_output_tokens": True}
    before = engine.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(8) as pool:
        one = partial(ask, engine, max_tokens=180, kv_transfer_params=wanted)
        answers = list(pool.map(one, prompts))
    assert engine.metric("vllm:num_preemptions_total") > before
    for ids, (answer, path) in zip(prompts, answers, strict=True):
        check(load_hidden_states(path, 60), ids + token_ids(answer)[0][:-1], plain)
    assert eventually(lambda: usage(engine) == 0)


@pytest.mark.parametrize(
    "request_id", ["../../../../tmp/out", "/etc/passwd", "..", "%2e%2e%2f", "a b\\c", "x" * 3000]
)
def test_an_id_neither_leaves_the_folder_nor_collides(
    engine: VllmServer, folder: Path, prompt: Prompt, plain: Any, request_id: str
) -> None:
    prompts = [prompt(20) for _ in range(4)]

    def one(ids: list[int]) -> str:
        body = {"model": "tiny", **completion(ids, max_tokens=1)}
        # A client's wish for another path is no wish of ours.
        body["kv_transfer_params"] = {"hidden_states_path": "/tmp/elsewhere.safetensors"}
        headers = {"X-Request-Id": request_id}
        url = f"{engine.url}/v1/completions"
        answer = client().post(url, json=body, headers=headers, timeout=60)
        path: str = answer.raise_for_status().json()["kv_transfer_params"]["hidden_states_path"]
        return path

    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(one, prompts))
    assert len(set(paths)) == 4
    for ids, path in zip(prompts, paths, strict=True):
        assert os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)
        assert os.path.basename(path).startswith("cmpl-" + quote(request_id, safe="")[:100])
        check(load_hidden_states(path, 60), ids, plain)
        cleanup_hidden_states(path)


def test_who_leaves_early_leaves_nothing(engine: VllmServer, folder: Path, prompt: Prompt) -> None:
    """Aborted while waiting, computing the prompt, and answering."""
    before = set(os.listdir(folder))

    async def leave() -> None:
        async with httpx.AsyncClient() as client:

            async def one(index: int) -> None:
                body = {"model": "tiny", **completion(prompt(900), max_tokens=900)}
                url = f"{engine.url}/v1/completions"
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(url, json=body, timeout=0.2 + 0.15 * index)

            await asyncio.gather(*(one(index) for index in range(8)))

    asyncio.run(leave())
    assert eventually(lambda: engine.metric("vllm:num_requests_running") == 0)
    assert eventually(lambda: usage(engine) == 0)
    assert set(os.listdir(folder)) == before


def test_a_stop_string_ends_a_request_without_a_path(engine: VllmServer, prompt: Prompt) -> None:
    """vLLM finds it in the API process and aborts the request in the engine."""
    ids = prompt(30)
    text = ask(engine, ids, max_tokens=16)[0]["choices"][0]["text"]
    answer = engine.complete(ids, max_tokens=16, stop=[text[4:6]])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer.get("kv_transfer_params") is None
    assert eventually(lambda: usage(engine) == 0)


def test_a_folder_that_cannot_be_written_is_the_readers_error_not_the_engines(
    engine: VllmServer, folder: Path, prompt: Prompt, plain: Any
) -> None:
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("no folder")
    try:
        answer, path = ask(engine, prompt(30))
        assert len(token_ids(answer)[0]) == 1
        with pytest.raises(HiddenStatesError):
            load_hidden_states(path, 30)
    finally:
        folder.unlink()
    ids = prompt(30)
    check(load_hidden_states(ask(engine, ids)[1], 60), ids, plain)
    assert engine.metric("disagg_hidden_states_files_total", outcome="storage") >= 1
    shutil.rmtree(aside)


def test_metrics_count_files_and_bytes(engine: VllmServer, prompt: Prompt) -> None:
    name = "disagg_hidden_states_files_total"
    before = (
        engine.metric(name, outcome="written"),
        engine.metric("disagg_hidden_states_bytes_total"),
    )
    sizes = [os.path.getsize(written(ask(engine, prompt(300))[1])) for _ in range(3)]
    ask(engine, prompt(5))  # counts travel with the next step
    assert eventually(lambda: engine.metric(name, outcome="written") >= before[0] + 3)
    assert engine.metric("disagg_hidden_states_bytes_total") >= before[1] + sum(sizes)
    assert engine.metric("disagg_hidden_states_seconds_count") >= 3


def test_an_engine_that_ends_takes_its_lock_file_along(
    engine: VllmServer, folder: Path, prompt: Prompt
) -> None:
    """Last in this file."""
    _, path = ask(engine, prompt(30))
    load_hidden_states(path, 30)
    assert list(folder.glob(".*.lock"))
    worker = engine.worker()
    worker.terminate()  # alone: on a busy machine, vLLM kills it before it has ended by itself
    worker.wait(timeout=60)
    engine.stop()
    assert not list(folder.glob(".*"))
    assert load_hidden_states(path)["token_ids"].shape == (30,)


def written(path: str) -> str:
    load_hidden_states(path, 60)
    return path


def usage(engine: VllmServer) -> float:
    return engine.metric("vllm:kv_cache_usage_perc")
