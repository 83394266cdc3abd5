"""Mixtures of experts whose ranks are data parallel: each rank is an engine with its own cache.

Two ranks share the experts, so none computes a step without the other. A third engine has all
experts itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from disagg.testing.ports import free_port
from disagg.testing.vllm_server import VllmServer, token_ids
from engine.conftest import lengths, running, transfer
from engine.followed import check_followed
from engine.windows import make_experts

Prompt = Callable[[int], list[int]]
Engines = Mapping[str, VllmServer]
NAMES = ("rank-0", "rank-1", "alone")
BLOCK, BLOCK_BYTES = 128, 4 * 2 * 128 * 2 * 64 * 4  # layers, K and V, tokens, heads, dim, float
TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    make_experts(folder)
    return folder


@pytest.fixture(scope="module")
def engines(
    model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engines]:
    logs, port = tmp_path_factory.mktemp("logs"), str(free_port())
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))}

    def server(name: str, *more: str) -> VllmServer:
        args = ("--max-model-len", "4096", "--num-gpu-blocks-override", "256", *more)
        connector = transfer("kv_both", lease_s=60.0, load_deadline_s=60.0)
        return vllm_server(name, model, logs / name, connector, args, env=env)

    group: tuple[str, ...] = ("--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1")
    group += ("--data-parallel-rpc-port", port, "--enable-expert-parallel")
    servers = [
        server("rank-0", *group, "--data-parallel-rank", "0"),
        server("rank-1", *group, "--data-parallel-rank", "1"),
        server("alone"),
    ]
    with running(servers):
        yield dict(zip(NAMES, servers, strict=True))


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    evaluated: PreTrainedModel = loaded.eval()
    return evaluated


def right(reference: Any, ids: list[int], tokens: int = TOKENS) -> list[int]:
    """What transformers answers, greedily."""
    with torch.no_grad():
        whole = reference.generate(
            torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
    answer: list[int] = whole[0, len(ids) :].tolist()
    return answer


@lengths(5, 700, long=[128])
@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(NAMES, 2)])
def test_exact_between_ranks_and_sizes(
    engines: Engines, reference: Any, prompt: Prompt, source: str, target: str, length: int
) -> None:
    """From a group to one engine, back, and from rank to rank."""
    ids = prompt(length)
    of_target = engines[target]
    before = of_target.metric("disagg_handoff_bytes_total", transport="process_memory")
    params = engines[source].prefill(ids)
    answer = of_target.complete(ids, max_tokens=TOKENS, kv_transfer_params=params)
    moved = of_target.metric("disagg_handoff_bytes_total", transport="process_memory") - before
    assert token_ids(answer) == [right(reference, ids)]
    assert moved == -(-(length - 1) // BLOCK) * BLOCK_BYTES


@pytest.mark.parametrize(("source", "target"), [("rank-0", "alone"), ("alone", "rank-1")])
def test_followed(
    engines: Engines, reference: Any, prompt: Prompt, source: str, target: str
) -> None:
    def right_all(ids: list[int]) -> list[list[int]]:
        return [right(reference, ids)]

    check_followed(engines[source], engines[target], lambda: prompt(700), right_all)


def test_ranks_answer_at_the_same_time(engines: Engines, reference: Any, prompt: Prompt) -> None:
    """Prompts of unequal lengths, so that the ranks' steps have unequal numbers of tokens."""
    prompts = [prompt(length) for length in (3, 40, 300, 1200, 7, 900, 150, 64)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(engines[NAMES[at % 2]].complete, ids, max_tokens=TOKENS)
            for at, ids in enumerate(prompts)
        ]
        answers = [token_ids(one.result()) for one in asked]
    assert answers == [[right(reference, ids)] for ids in prompts]
