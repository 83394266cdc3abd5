"""One rank hands over to two and two to one: heads are sliced and merged, tokens stay the same.

vLLM's ranks poll with sched_yield, which on a machine of two cores can keep every other process
waiting for seconds. Leases and deadlines are long here, and a handoff that came too late is
tried again; every answer must be right, late or not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from disagg.testing.vllm_server import VllmServer, token_ids
from engine.conftest import BLOCK_BYTES, SLOW, Fleet, beside, lengths, tiers, transfer
from engine.followed import check_followed
from engine.ranks import check_streams, check_tiers

ENGINES = ("producer", "consumer", "single")
TRIES = 5
STEPS = ("--max-num-batched-tokens", "512", "--max-num-seqs", "16")
Prompt = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def two_ranks(
    fleet: Fleet,
    model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmServer]:
    fleet.wake(*ENGINES)
    server = vllm_server(
        "two-ranks",
        model,
        tmp_path_factory.mktemp("logs") / "two-ranks.log",
        beside(
            transfer("kv_both", transports=["tcp"], lease_s=60.0, load_deadline_s=60.0),
            tiers(
                host_bytes=1 << 28,
                directory=str(tmp_path_factory.mktemp("tier")),
                reset_keeps_files=True,
            ),
        ),
        ("--tensor-parallel-size", "2", "--num-gpu-blocks-override", "192", *STEPS),
        env={"TMPDIR": fleet.producer.env["TMPDIR"], "VLLM_SERVER_DEV_MODE": "1"},
    )
    with server:
        server.wait_ready()
        # While it keeps a lease its ranks poll without end, and there may be no third core.
        assert server.process is not None
        os.setpriority(os.PRIO_PGRP, server.process.pid, 19)
        yield server


def handoff(fleet: Fleet, source: VllmServer, target: VllmServer, ids: list[int]) -> float:
    """Bytes that moved over TCP. The answer must be a single engine's in any case."""
    before = target.metric("disagg_handoff_bytes_total", transport="tcp")
    answer = target.complete(ids, kv_transfer_params=source.prefill(ids))
    assert token_ids(answer) == token_ids(fleet.single.complete(ids))
    return target.metric("disagg_handoff_bytes_total", transport="tcp") - before


@lengths(5, 1000, long=[128])
@pytest.mark.parametrize("way", ["1-to-2", "2-to-1"])
def test_exact_between_sizes(
    fleet: Fleet, two_ranks: VllmServer, prompt: Prompt, way: str, length: int
) -> None:
    pair = (fleet.producer, two_ranks) if way == "1-to-2" else (two_ranks, fleet.consumer)
    moved = [handoff(fleet, *pair, prompt(length)) for _ in range(2)]
    while not any(moved) and len(moved) < TRIES:
        moved.append(handoff(fleet, *pair, prompt(length)))
    assert max(moved) == -(-length // 128) * BLOCK_BYTES


@pytest.mark.parametrize(
    ("way", "length"), [("1-to-2", 300), pytest.param("1-to-2", 7000, marks=SLOW), ("2-to-1", 2000)]
)
def test_followed(
    fleet: Fleet, two_ranks: VllmServer, prompt: Prompt, way: str, length: int
) -> None:
    source, target = (fleet.producer, two_ranks) if way == "1-to-2" else (two_ranks, fleet.consumer)

    def right(ids: list[int]) -> list[list[int]]:
        return token_ids(fleet.single.complete(ids))

    check_followed(source, target, lambda: prompt(length), right, may_fail=True)


@pytest.mark.parametrize("way", ["1-to-2", "2-to-1"])
def test_streams_that_begin_at_prefill(
    fleet: Fleet, two_ranks: VllmServer, prompt: Prompt, way: str
) -> None:
    source, target = (fleet.producer, two_ranks) if way == "1-to-2" else (two_ranks, fleet.consumer)
    moved = partial(target.metric, "disagg_handoff_bytes_total", transport="tcp")
    check_streams(source, target, fleet.single, prompt, moved)


def test_tiers_of_two_ranks(fleet: Fleet, two_ranks: VllmServer, prompt: Prompt) -> None:
    """Each rank has its heads in host memory and in files of its own."""
    check_tiers(two_ranks, fleet.single, prompt(1000), BLOCK_BYTES)
