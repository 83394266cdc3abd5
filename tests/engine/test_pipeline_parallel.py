"""Engines of two pipeline stages and of one hand over to each other, and two stages to two.

vLLM 0.32 runs stages on CPU only if it warms them up, which it does only for compiled models; the
`eager` backend of torch.compile needs no compiler, and computes what the others do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import Fleet, beside, running, tiers, transfer
from engine.followed import check_followed
from engine.ranks import check_streams, check_tiers

ENGINES = ("producer", "consumer", "single")
TRIES = 5
BLOCK = 4 * 2 * 128 * 2 * 64 * 4  # layers, KV heads, tokens, K and V, head dim, float32
STAGES = (
    "--pipeline-parallel-size",
    "2",
    "--no-enforce-eager",
    "--compilation-config",
    json.dumps({"mode": 2, "backend": "eager"}),
    "--num-gpu-blocks-override",
    "192",
    "--max-num-batched-tokens",
    "512",
    "--max-num-seqs",
    "16",
)
Prompt = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def staged(
    fleet: Fleet,
    model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, VllmServer]]:
    """`even`: two layers in each of its stages, over process memory. `odd`: one and three, TCP, and
    beside it tiers."""
    fleet.wake(*ENGINES)
    logs = tmp_path_factory.mktemp("logs")
    made = {}
    for name, cut in (("even", "2,2"), ("odd", "1,3")):
        extra = {} if name == "even" else {"transports": ["tcp"]}
        config = transfer("kv_both", lease_s=60.0, load_deadline_s=60.0, **extra)
        if name == "odd":
            folder = str(tmp_path_factory.mktemp("tier"))
            kept = tiers(host_bytes=1 << 28, directory=folder, reset_keeps_files=True)
            config = beside(config, kept)
        env = {"TMPDIR": fleet.producer.env["TMPDIR"], "VLLM_PP_LAYER_PARTITION": cut}
        env["VLLM_SERVER_DEV_MODE"] = "1"
        made[name] = vllm_server(name, model, logs / f"{name}.log", config, STAGES, env=env)
    with running([*made.values()]):
        for server in made.values():
            assert server.process is not None
            os.setpriority(os.PRIO_PGRP, server.process.pid, 19)
        yield made


def moved(server: VllmServer) -> float:
    return sum(
        server.metric("disagg_handoff_bytes_total", transport=name)
        for name in ("tcp", "process_memory")
    )


WAYS = ["producer-even", "even-consumer", "producer-odd", "odd-consumer", "even-odd", "odd-even"]


@pytest.mark.parametrize("length", [5, 128, 1000])
@pytest.mark.parametrize("way", WAYS)
def test_exact_between_stages(
    fleet: Fleet, staged: dict[str, VllmServer], prompt: Prompt, way: str, length: int
) -> None:
    """All of the prompt moves, over one fetch for each stage that has layers of another's."""
    source, target = (staged.get(name) or getattr(fleet, name) for name in way.split("-"))
    for _ in range(TRIES):
        ids, before = prompt(length), moved(target)
        answer = target.complete(ids, kv_transfer_params=source.prefill(ids))
        assert token_ids(answer) == token_ids(fleet.single.complete(ids))
        if moved(target) - before == -(-length // 128) * BLOCK:
            return
    pytest.fail("nothing was handed over")


@pytest.mark.parametrize("way", ["producer-even", "even-consumer", "even-odd"])
def test_followed(fleet: Fleet, staged: dict[str, VllmServer], prompt: Prompt, way: str) -> None:
    source, target = (staged.get(name) or getattr(fleet, name) for name in way.split("-"))

    def right(ids: list[int]) -> list[list[int]]:
        return token_ids(fleet.single.complete(ids))

    length = 7000 if source is fleet.producer else 2000
    check_followed(source, target, lambda: prompt(length), right, may_fail=True)


@pytest.mark.parametrize("way", ["producer-even", "even-consumer"])
def test_streams_that_begin_at_prefill(
    fleet: Fleet, staged: dict[str, VllmServer], prompt: Prompt, way: str
) -> None:
    source, target = (staged.get(name) or getattr(fleet, name) for name in way.split("-"))
    check_streams(source, target, fleet.single, prompt, partial(moved, target))


def test_tiers_of_two_stages(fleet: Fleet, staged: dict[str, VllmServer], prompt: Prompt) -> None:
    """Each stage has its layers in host memory and in files of its own, in as many slots."""
    check_tiers(staged["odd"], fleet.single, prompt(1000), BLOCK)


def test_nothing_is_held(fleet: Fleet, staged: dict[str, VllmServer], prompt: Prompt) -> None:
    """Every stage's lease has ended, also of prompts that nobody fetched whole: decode had them."""
    even, ids = staged["even"], prompt(300)
    engines = [fleet.producer, *staged.values()]
    for server in engines:  # those of the tests before
        held = partial(server.metric, "disagg_leases_held")
        assert eventually(lambda held=held: held() == 0)
    expired = [one.metric("disagg_leases_total", outcome="expired") for one in engines]
    for _ in range(3):
        fleet.consumer.complete(ids, kv_transfer_params=even.prefill(ids))
    for server, before in zip(engines, expired, strict=True):
        held = partial(server.metric, "disagg_leases_held")
        assert eventually(lambda held=held: held() == 0)
        assert server.metric("disagg_leases_total", outcome="expired") == before
