"""Engines that share no folder find each other's blocks in an object store, in float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from object_servers import (
    ENVIRONMENT,
    S3Server,
    Server,
    has_mooncake,
    running_mooncake,
    running_s3,
    running_valkey,
)
from slow_proxy import SlowProxy, slow_proxy

from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import BLOCK_BYTES, Fleet, running, tiers
from engine.resets import reset_caches

ENGINES = ("single",)
Prompt = Callable[[int], list[int]]
N = 128
SMALL = ("--num-gpu-blocks-override", "36", "--max-model-len", "4096")


class Engines(NamedTuple):
    """Two engines with a host tier each, and the store between them, behind a proxy."""

    first: VllmServer
    second: VllmServer
    store: Server
    slow: SlowProxy


STORES: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "valkey": running_valkey,
    "s3": running_s3,
    "mooncake": running_mooncake,
}
KINDS = [
    "valkey",
    pytest.param("s3", marks=pytest.mark.slow),
    pytest.param(
        "mooncake",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not has_mooncake(), reason="Mooncake is not installed"),
        ],
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def engines(
    fleet: Fleet,
    model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Engines]:
    logs = tmp_path_factory.mktemp("logs")
    opened = STORES[request.param]
    with opened(logs / "store.log") as store, slow_proxy(store.port) as slow:
        settings = {"url": store.url, "reset_keeps_objects": True}
        if isinstance(store, S3Server):
            endpoint = f"http://127.0.0.1:{slow.port}"
            settings |= {"endpoint": endpoint, "region": "us-east-1"}
        else:
            settings["url"] = store.url.replace(f":{store.port}/", f":{slow.port}/")
        config = tiers(host_bytes=1 << 26, objects=settings)
        env = {
            "TMPDIR": str(fleet.storage.parents[1]),
            "VLLM_SERVER_DEV_MODE": "1",
            **ENVIRONMENT,
        }
        first, second = (
            vllm_server(name, model, logs / f"{name}.log", config, SMALL, env=env)
            for name in ("first-objects", "second-objects")
        )
        fleet.wake()  # they would take the cores from those that start
        with running((first, second)):
            fleet.wake(*ENGINES)
            yield Engines(first, second, store, slow)


def read(engine: VllmServer) -> int:
    """Blocks that it has read from the store."""
    name = "vllm:kv_offload_total_bytes_total"
    return int(engine.metric(name, transfer_type="STORAGE_to_CPU")) // BLOCK_BYTES


def written(engine: VllmServer) -> float:
    return engine.metric("disagg_tier_stored_total", tier="objects")


def is_idle(engine: VllmServer) -> bool:
    return not any(
        engine.metric("disagg_tier_in_use_chunks", tier=tier) for tier in ("host", "objects")
    )


def test_another_engine_finds_them(fleet: Fleet, engines: Engines, prompt: Prompt) -> None:
    first, second, *_ = engines
    ids, before, read_before = prompt(1000), written(engines.first), read(engines.second)
    reference = token_ids(fleet.single.complete(ids))
    assert token_ids(first.complete(ids)) == reference
    assert eventually(lambda: written(first) - before >= 1000 // N)
    answer = second.complete(ids)
    assert token_ids(answer) == reference
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1000 // N * N
    assert read(second) - read_before == 1000 // N


@pytest.mark.parametrize(
    ("delay_s", "count"), [(0.5, 6), pytest.param(5.0, 12, marks=pytest.mark.slow)]
)
def test_a_slow_store_costs_little(
    fleet: Fleet, engines: Engines, prompt: Prompt, delay_s: float, count: int
) -> None:
    """It has all prompts, and each of its answers takes so long. The bounds of the slow form are
    those of docs/tiers.md, with room for cores that are busy."""
    first, second, _, slow = engines
    prompts = [prompt(2000) for _ in range(count)]
    references = [token_ids(fleet.single.complete(ids)) for ids in prompts]
    before = written(first)
    for ids in prompts:
        first.complete(ids)
    assert eventually(lambda: written(first) - before >= len(prompts) * (2000 // N), 60)
    computed = [seconds(partial(second.complete, prompt(2000)))[0] for _ in range(3)]
    assert eventually(lambda: is_idle(second), 60)
    reset_caches(second, host=True)
    left, taken = too_slow(second), list[float]()
    with slow.by(delay_s):
        for ids, reference in zip(prompts, references, strict=True):
            taken_s, answer = seconds(partial(second.complete, ids))
            assert token_ids(answer) == reference
            taken.append(taken_s)
    print(f"computed {computed}, with a store that takes {delay_s} s: {taken}")
    if delay_s > 1:
        assert max(taken) < 3 * max(computed) + 1
        assert sorted(taken)[count // 2] < 1.7 * max(computed), "most wait for nothing"
    assert too_slow(second) - left >= count - 2
    assert "slower than computing" in second.tail(1 << 20)

    def found_again() -> bool:
        assert eventually(lambda: is_idle(second), 60)
        reset_caches(second, host=True)
        read_before = read(second)
        assert token_ids(second.complete(prompts[0])) == references[0]
        return read(second) > read_before

    assert eventually(found_again, 60)


def too_slow(engine: VllmServer) -> float:
    """Requests that did not wait for the store."""
    return engine.metric("disagg_tier_too_slow_total", tier="objects")


def seconds(ask: Callable[[], dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    began = time.monotonic()
    answer = ask()
    return time.monotonic() - began, answer


def test_a_store_that_is_killed_or_stopped_costs_time_only(
    fleet: Fleet, engines: Engines, prompt: Prompt
) -> None:
    """While requests run, of which the store has the first blocks; then it comes back, empty."""
    first, second, store, _ = engines
    shared = prompt(600)
    prompts = [[*shared, *prompt(100 + 30 * number)] for number in range(6)]
    references = [token_ids(fleet.single.complete(ids)) for ids in prompts]
    before = written(first)
    first.complete(shared)
    assert eventually(lambda: written(first) - before >= 600 // N)

    def answers(engine: VllmServer) -> list[list[list[int]]]:
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda ids: token_ids(engine.complete(ids)), prompts))

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answers, second)
        store.kill()
        assert asked.result() == references
    store.start()
    with store.stopped():
        for engine in (first, second):
            reset_caches(engine, host=True)
            assert answers(engine) == references
    assert eventually(lambda: is_idle(first) and is_idle(second), 60)

    def found_again() -> bool:
        ids, read_before = prompt(400), read(second)
        first.complete(ids)
        return bool(
            eventually(lambda: is_idle(first))
            and token_ids(second.complete(ids))
            and read(second) > read_before
        )

    assert eventually(found_again, 120)
