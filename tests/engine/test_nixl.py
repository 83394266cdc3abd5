"""Two engines that have only NIXL: the answers are a single engine's, and the blocks came by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.transport.nixl.settings import is_installed
from engine.conftest import BLOCK_BYTES, lengths, running, transfer

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")

Prompt = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def servers(
    model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[VllmServer]]:
    logs = tmp_path_factory.mktemp("logs")
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp"))}
    blocks = ("--num-gpu-blocks-override", "160")
    configs = {
        "producer": transfer("kv_producer", transports=["nixl"]),
        "consumer": transfer("kv_consumer", transports=["nixl"]),
        "single": None,
    }
    made = [
        vllm_server(name, model, logs / f"{name}.log", config, blocks, env=env)
        for name, config in configs.items()
    ]
    with running(made):
        yield made


@lengths(1, 1000, long=[129, 3000])
def test_answers_are_exact_and_blocks_came_by_nixl(
    servers: list[VllmServer], prompt: Prompt, length: int
) -> None:
    producer, consumer, single = servers
    ids = prompt(length)
    before = consumer.metric("disagg_handoff_bytes_total", transport="nixl")
    params = producer.prefill(ids)
    answer = consumer.complete(ids, kv_transfer_params=params)
    moved = consumer.metric("disagg_handoff_bytes_total", transport="nixl") - before
    assert token_ids(answer) == token_ids(single.complete(ids))
    # Of a prompt of one token decode has nothing to load: it computes the last token itself.
    assert moved == (0 if length == 1 else -(-length // 128) * BLOCK_BYTES)


def test_a_dead_producer_costs_no_answer(servers: list[VllmServer], prompt: Prompt) -> None:
    """Comes last: decode computes the prompt itself."""
    producer, consumer, single = servers
    ids = prompt(700)
    params = producer.prefill(ids)
    worker = producer.worker()
    worker.kill()
    worker.wait(20)
    answer = consumer.complete(ids, kv_transfer_params=params)
    assert token_ids(answer) == token_ids(single.complete(ids))
