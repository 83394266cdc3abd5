"""Many loads at once of a model of windows alone, in a cache that holds hardly any of them.

vLLM by itself lets more loads begin than can be finished, and nobody runs any more: see
disagg/connector/load_admission.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import running, tiers
from engine.resets import reset_caches
from engine.windows import SLIDING, make_windows

Prompt = Callable[[int], list[int]]
REQUESTS = 6
# Room for three loads of two or three blocks each, and not for what each of them lacks then.
ARGS = ("--max-model-len", "4096", "--max-num-batched-tokens", "512")
BLOCKS = ("--num-gpu-blocks-override", "12")
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def engine(
    vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    model, logs = tmp_path_factory.mktemp("model") / "sliding", tmp_path_factory.mktemp("logs")
    make_windows(model, (SLIDING,) * 4)
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp")), "VLLM_SERVER_DEV_MODE": "1"}
    config = tiers(host_bytes=1 << 28)
    server = vllm_server("sliding", model, logs / "sliding", config, (*ARGS, *BLOCKS), env=env)
    with running([server]):
        yield server


def forget(engine: VllmServer, *, host: bool) -> None:
    assert eventually(lambda: not engine.metric("disagg_tier_in_use_chunks", tier="host"))
    reset_caches(engine, host=host)


@pytest.mark.slow
def test_all_of_many_loads_end(engine: VllmServer, prompt: Prompt) -> None:
    begun = [prompt(2900) for _ in range(REQUESTS)]
    for ids in begun:
        engine.complete(ids, max_tokens=1)
    forget(engine, host=False)
    asked = [[*ids, *prompt(400)] for ids in begun]
    pool, core = ThreadPoolExecutor(REQUESTS), engine.core()
    core.suspend()  # so that it finds all of them at once
    try:
        futures = [pool.submit(engine.complete, ids, max_tokens=8) for ids in asked]
        time.sleep(1)
    finally:
        core.resume()
    pool.shutdown(wait=False)
    answers = [token_ids(future.result(LIMIT_S)) for future in futures]
    assert engine.metric("vllm:kv_offload_total_bytes_total", transfer_type="CPU_to_GPU") > 0
    for ids, answer in zip(asked, answers, strict=True):
        forget(engine, host=True)
        assert token_ids(engine.complete(ids, max_tokens=8)) == answer
