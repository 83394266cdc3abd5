"""A data parallel prefill pool under `disagg serve`: its ranks live, die and restart as a group."""

from __future__ import annotations

import json
import random
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.test_serve import (
    Served,
    core_of,
    deployment,
    end,
    handed_over,
    launch,
    states,
    temporary,
)
from disagg.testing.ports import free_port
from engine.windows import make_experts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS, GONE_S, BACK_S = 16, 5.0, 240
RANKS = ("prefill-0", "prefill-1")


class Reference:
    """What transformers answers, greedily."""

    def __init__(self, model: Path) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = loaded.eval()

    def answer(self, ids: list[int], tokens: int = TOKENS) -> list[int]:
        with torch.no_grad():
            whole = self._model.generate(
                torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        answer: list[int] = whole[0, len(ids) :].tolist()
        return answer


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, int, Reference]]:
    folder, port = tmp_path_factory.mktemp("group"), free_port()
    make_experts(folder / "model")
    content = deployment(folder / "model", port)
    content["engine"]["args"]["enforce_eager"] = True
    content["prefill"]["args"] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    content["router"]["pairing"] = {"local_prefill_tokens": 0}
    with temporary() as temp:
        served = launch(folder, temp, "group", content)
        try:
            served.until_shown("Ready: ")
            yield served, port, Reference(folder / "model")
        finally:
            end(served)
        served.check_nothing_left()


def ask(port: int, ids: list[int], tokens: int = TOKENS) -> list[int]:
    body = {"model": "tiny", "prompt": ids, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body | {"ignore_eos": True, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: list[int] = json.load(response)["choices"][0]["token_ids"]
    return answer


def prompts(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(300, 1000) for _ in range(chance.randint(200, 900))] for _ in range(count)
    ]


def ask_all(port: int, reference: Reference, asked: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda ids: ask(port, ids), asked))
    assert answers == [reference.answer(ids) for ids in asked]


def test_each_rank_is_an_engine_of_the_router(group: tuple[Served, int, Reference]) -> None:
    served, port, reference = group
    assert states(port) == dict.fromkeys([*RANKS, "decode-0"], "up")
    ask_all(port, reference, prompts(8, 1))
    assert handed_over(port) >= 8
    served.note()


def test_a_ranks_death_takes_its_group_out(group: tuple[Served, int, Reference]) -> None:
    """In the middle of requests: each is answered right, and the group is back as a whole."""
    served, port, reference = group
    asked = prompts(6, 2)
    with ThreadPoolExecutor(len(asked)) as pool:
        streams = [pool.submit(ask, port, ids) for ids in asked]
        core_of(served, "prefill-1").send_signal(signal.SIGKILL)
        served.until(lambda: all(states(port)[name] != "up" for name in RANKS), GONE_S)
        answers = [stream.result() for stream in streams]
    assert answers == [reference.answer(ids) for ids in asked]
    served.until(lambda: all(f"{name} is back" in served.text for name in RANKS), BACK_S)
    died = next(line for line in served.text.splitlines() if " died: " in line)
    assert "engine prefill-1 died: " in died
    assert "prefill-0 of its data parallel group ends with it" in died
    before = handed_over(port)
    ask_all(port, reference, prompts(4, 3))
    assert handed_over(port) >= before + 4
    served.note()
