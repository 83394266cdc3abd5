"""MLA: one latent of every token for all heads, which each tensor parallel rank keeps whole.

The two engines are these tests' own, of one rank and of two. What transformers computes is the
reference: vLLM 0.32 alone answers otherwise on a CPU (disagg/engine/vllm_patches/mla_rotary.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from disagg.testing.vllm_server import VllmServer, token_ids
from engine.conftest import SLOW, lengths, running, transfer
from engine.followed import check_followed
from engine.windows import LATENT, ROTATED, make_latent

LAYERS, BLOCK = 2, 16  # vLLM's CPU_MLA has blocks of 16 tokens alone
BLOCK_BYTES = LAYERS * BLOCK * (LATENT + ROTATED) * 4
TRIES = 5
Prompt = Callable[[int], list[int]]


@dataclass(frozen=True)
class Engines:
    """one, two: by ranks. Both hand over and are handed over to."""

    one: VllmServer
    two: VllmServer
    reference: Any

    def right(self, ids: list[int], tokens: int = 16) -> list[int]:
        """The greedy answer of transformers."""
        answer, given, cache = list[int](), torch.tensor([ids]), None
        with torch.no_grad():
            for _ in range(tokens):
                output = self.reference(given, past_key_values=cache, logits_to_keep=1)
                given, cache = output.logits.argmax(-1), output.past_key_values
                answer.append(int(given))
        return answer


@pytest.fixture(scope="module")
def engines(
    vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("mla")
    make_latent(folder / "model", LAYERS)
    args: tuple[str, ...] = ("--max-model-len", "4096", "--attention-backend", "CPU_MLA")
    args += ("--num-gpu-blocks-override", "1024")
    args += ("--max-num-batched-tokens", "256", "--max-num-seqs", "16")
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))}

    def server(ranks: int) -> VllmServer:
        name = f"{ranks}-ranks"
        # Ranks poll with sched_yield: on two cores others may wait for seconds.
        connector = transfer("kv_both", lease_s=60.0, load_deadline_s=60.0)
        more = (*args, "--tensor-parallel-size", str(ranks))
        return vllm_server(name, folder / "model", folder / name, connector, more, env=env)

    servers = [server(1), server(2)]
    with running(servers):
        for one in servers:
            assert one.process is not None
            os.setpriority(os.PRIO_PGRP, one.process.pid, 19)
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        yield Engines(servers[0], servers[1], model.eval())


@lengths(5, 257, long=[16, 1000])
@pytest.mark.parametrize("way", ["1-to-2", "2-to-1"])
def test_exact_between_sizes(engines: Engines, prompt: Prompt, way: str, length: int) -> None:
    """Each rank of the target has all bytes, whatever the sizes."""
    source, target = engines.one, engines.two
    if way == "2-to-1":
        source, target = target, source
    ranks = 2 if target is engines.two else 1
    moved = 0.0
    for _ in range(TRIES):
        ids = prompt(length)
        before = target.metric("disagg_handoff_bytes_total", transport="process_memory")
        answer = target.complete(ids, kv_transfer_params=source.prefill(ids))
        assert token_ids(answer) == [engines.right(ids)]
        moved = target.metric("disagg_handoff_bytes_total", transport="process_memory") - before
        if moved:
            break  # or it came too late and was computed, which is right as well
    assert moved == -(-length // BLOCK) * BLOCK_BYTES * ranks


@pytest.mark.parametrize("way", ["1-to-2", pytest.param("2-to-1", marks=SLOW)])
def test_followed(engines: Engines, prompt: Prompt, way: str) -> None:
    source, target = engines.one, engines.two
    if way == "2-to-1":
        source, target = target, source
    for length in (17, 1500):
        ask = functools.partial(prompt, length)
        check_followed(source, target, ask, lambda ids: [engines.right(ids)], may_fail=True)


def test_the_next_turn(engines: Engines, prompt: Prompt) -> None:
    """A prompt that continues a prompt and its answer: vLLM keeps no prefix of MLA on a CPU."""
    ids = prompt(300)
    first = engines.right(ids)
    assert token_ids(engines.one.complete(ids)) == [first]
    longer = [*ids, *first, *prompt(100)]
    params = engines.one.prefill(longer)
    answer = engines.two.complete(longer, kv_transfer_params=params)
    assert token_ids(answer) == [engines.right(longer)]
