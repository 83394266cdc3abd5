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
from engine.conftest import (
    DEEP_BLOCK_BYTES,
    LEASE_S,
    SLOW,
    beside,
    lengths,
    running,
    tiers,
    transfer,
)
from engine.followed import check_followed
from engine.ranks import check_streams, check_tiers

TRIES = 5
SMALL = ("--num-gpu-blocks-override", "192")
STAGES = (
    "--pipeline-parallel-size",
    "2",
    "--no-enforce-eager",
    "--compilation-config",
    json.dumps({"mode": 2, "backend": "eager"}),
    *SMALL,
    "--max-num-batched-tokens",
    "512",
    "--max-num-seqs",
    "16",
)
Prompt = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def engines(
    deep_model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, VllmServer]]:
    """`even`: two layers in each of its stages, over process memory. `odd`: one and three, TCP, and
    beside it tiers. `whole`: one stage; `single`: without a connector."""
    logs, temporary = tmp_path_factory.mktemp("logs"), str(tmp_path_factory.mktemp("tmp"))

    def server(name: str, config: dict[str, object] | None, *args: str, **env: str) -> VllmServer:
        env["TMPDIR"] = temporary
        return vllm_server(name, deep_model, logs / f"{name}.log", config, args, env=env)

    made = {
        "whole": server("whole", transfer("kv_both", lease_s=LEASE_S), *SMALL),
        "single": server("single", None, *SMALL),
    }
    for name, cut in (("even", "2,2"), ("odd", "1,3")):
        extra = {} if name == "even" else {"transports": ["tcp"]}
        config = transfer("kv_both", lease_s=60.0, load_deadline_s=60.0, **extra)
        if name == "odd":
            folder = str(tmp_path_factory.mktemp("tier"))
            kept = tiers(host_bytes=1 << 28, directory=folder, reset_keeps_files=True)
            config = beside(config, kept)
        env = {"VLLM_PP_LAYER_PARTITION": cut, "VLLM_SERVER_DEV_MODE": "1"}
        made[name] = server(name, config, *STAGES, **env)
    with running([*made.values()]):
        for name in ("even", "odd"):
            process = made[name].process
            assert process is not None
            os.setpriority(os.PRIO_PGRP, process.pid, 19)
        yield made


def moved(server: VllmServer) -> float:
    return sum(
        server.metric("disagg_handoff_bytes_total", transport=name)
        for name in ("tcp", "process_memory")
    )


WAYS = ["whole-even", "even-whole", "whole-odd", "odd-whole", "even-odd", "odd-even"]


@lengths(5, 1000, long=[128])
@pytest.mark.parametrize("way", WAYS)
def test_exact_between_stages(
    engines: dict[str, VllmServer], prompt: Prompt, way: str, length: int
) -> None:
    """All of the prompt moves, over one fetch for each stage that has layers of another's."""
    source, target = (engines[name] for name in way.split("-"))
    for _ in range(TRIES):
        ids, before = prompt(length), moved(target)
        answer = target.complete(ids, kv_transfer_params=source.prefill(ids))
        assert token_ids(answer) == token_ids(engines["single"].complete(ids))
        if moved(target) - before == -(-length // 128) * DEEP_BLOCK_BYTES:
            return
    pytest.fail("nothing was handed over")


@pytest.mark.parametrize(
    "way",
    [pytest.param("whole-even", marks=SLOW), "even-whole", pytest.param("even-odd", marks=SLOW)],
)
def test_followed(engines: dict[str, VllmServer], prompt: Prompt, way: str) -> None:
    source, target = (engines[name] for name in way.split("-"))

    def right(ids: list[int]) -> list[list[int]]:
        return token_ids(engines["single"].complete(ids))

    length = 7000 if source is engines["whole"] else 2000
    check_followed(source, target, lambda: prompt(length), right, may_fail=True)


@pytest.mark.parametrize("way", ["whole-even", pytest.param("even-whole", marks=SLOW)])
def test_streams_that_begin_at_prefill(
    engines: dict[str, VllmServer], prompt: Prompt, way: str
) -> None:
    source, target = (engines[name] for name in way.split("-"))
    check_streams(source, target, engines["single"], prompt, partial(moved, target))


def test_tiers_of_two_stages(engines: dict[str, VllmServer], prompt: Prompt) -> None:
    """Each stage has its layers in host memory and in files of its own, in as many slots."""
    check_tiers(engines["odd"], engines["single"], prompt(1000), DEEP_BLOCK_BYTES)


def test_nothing_is_held(engines: dict[str, VllmServer], prompt: Prompt) -> None:
    """Every stage's lease has ended, also of prompts that nobody fetched whole: decode had them."""
    even, ids = engines["even"], prompt(300)
    holders = [engines[name] for name in ("whole", "even", "odd")]
    for server in holders:  # those of the tests before
        held = partial(server.metric, "disagg_leases_held")
        assert eventually(lambda held=held: held() == 0)
    expired = [one.metric("disagg_leases_total", outcome="expired") for one in holders]
    for _ in range(3):
        engines["whole"].complete(ids, kv_transfer_params=even.prefill(ids))
    for server, before in zip(holders, expired, strict=True):
        held = partial(server.metric, "disagg_leases_held")
        assert eventually(lambda held=held: held() == 0)
        assert server.metric("disagg_leases_total", outcome="expired") == before
