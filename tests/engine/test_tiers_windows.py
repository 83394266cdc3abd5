"""Tiers of a model with several KV cache groups, whose window is much shorter than the prompt.

The engines are this test's own: one without tiers is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from disagg.bench.vllm_server import VllmServer, token_ids
from engine.conftest import beside, running, tiers, transfer
from engine.waiting import eventually
from engine.windows import BLOCK, GROUP_BYTES, WINDOW, make_windows

Prompt = Callable[[int], list[int]]
GROUPS, WINDOWED = 3, 2
# So small that a few prompts push each other out of the engine's own cache.
ARGS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "128")


class Engines(NamedTuple):
    """`first` and `second` hand over to each other, and share a folder of files."""

    plain: VllmServer
    first: VllmServer
    second: VllmServer


@pytest.fixture(scope="module")
def engines(
    vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    model = tmp_path_factory.mktemp("model") / "windows"
    make_windows(model)
    folder, logs = str(tmp_path_factory.mktemp("tiers")), tmp_path_factory.mktemp("logs")
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp")), "VLLM_SERVER_DEV_MODE": "1"}

    def server(name: str, config: dict[str, object] | None) -> VllmServer:
        return vllm_server(name, model, logs / name, config, ARGS, env=env)

    both = beside(
        transfer("kv_both"), tiers(host_bytes=1 << 28, directory=folder, reset_keeps_files=True)
    )
    engines = Engines(server("plain", None), server("first", both), server("second", both))
    with running(engines):
        yield engines


def moved(engine: VllmServer, medium: str) -> int:
    """Blocks of a group, by their bytes."""
    name = "vllm:kv_offload_total_bytes_total"
    return int(engine.metric(name, transfer_type=medium)) // GROUP_BYTES


def files(engine: VllmServer) -> float:
    return engine.metric("disagg_tier_stored_total", tier="directory")


def is_idle(engine: VllmServer) -> bool:
    """Whether no slot is in use."""
    return not any(
        engine.metric("disagg_tier_in_use_chunks", tier=tier) for tier in ("host", "directory")
    )


def forget(engine: VllmServer, *, host: bool) -> None:
    assert eventually(lambda: is_idle(engine))
    engine.post(f"/reset_prefix_cache?reset_external={host}", {}).raise_for_status()


def needed(full: int) -> int:
    """Blocks of all groups, for so many computed ones."""
    skipped = max(0, full * BLOCK - WINDOW + 1) // BLOCK
    return full + WINDOWED * (full - skipped)


@pytest.mark.parametrize("length", [129, 640, 3001])
def test_answers_and_what_is_loaded(engines: Engines, prompt: Prompt, length: int) -> None:
    """From host memory, from files, by another engine, and the next turn of a conversation."""
    plain, first, second = engines
    ids, full = prompt(length), (length - 1) // BLOCK
    options, all_full, before = {"max_tokens": 150}, (length + 149) // BLOCK, files(first)
    reference = plain.complete(ids, **options)
    answers = [first.complete(ids, **options)]
    assert eventually(lambda: files(first) - before == GROUPS * all_full)
    sources = ((first, "CPU_to_GPU", False), (first, "STORAGE_to_CPU", True))
    for engine, medium, host in (*sources, (second, "STORAGE_to_CPU", True)):
        forget(engine, host=host)
        loaded = moved(engine, medium)
        answers.append(engine.complete(ids, **options))
        assert moved(engine, medium) - loaded == needed(full)
    assert [token_ids(answer) for answer in answers] == [token_ids(reference)] * 4
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers[1:]]
    assert cached == [full * BLOCK] * 3

    turn = [*ids, *token_ids(reference)[0], *prompt(50)]
    forget(second, host=True)
    loaded = moved(second, "CPU_to_GPU")
    assert token_ids(second.complete(turn)) == token_ids(plain.complete(turn))
    # The last token of an answer is never computed.
    assert moved(second, "CPU_to_GPU") - loaded == needed(all_full)


def test_beside_the_hand_over_and_under_pressure(engines: Engines, prompt: Prompt) -> None:
    """Handed over, and continued by either engine; the engines' own caches hold few of these."""
    plain, first, second = engines
    base = prompt(900)
    prompts = [[*base[: 300 * (i % 4)], *prompt(200 + 150 * i)] for i in range(8)]
    references = [token_ids(plain.complete(ids)) for ids in prompts]

    def one(number: int) -> bool:
        ids, producer, consumer = prompts[number % 8], *(first, second)[:: 1 - number % 2 * 2]
        params = {"kv_transfer_params": producer.prefill(ids)} if number % 3 else {}
        return token_ids(consumer.complete(ids, **params)) == references[number % 8]

    before = moved(first, "CPU_to_GPU") + moved(second, "CPU_to_GPU")
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(24)))
    assert moved(first, "CPU_to_GPU") + moved(second, "CPU_to_GPU") > before
    for engine in (first, second):
        assert engine.metric("disagg_handoff_bytes_total", transport="process_memory") > 0
        assert eventually(lambda engine=engine: is_idle(engine))
        assert not sum(engine.metrics("disagg_tier_failures").values())
