"""Routers in front of plain vLLM servers: ours under load and cancellation, and vllm-router."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.testing.http import client
from disagg.testing.ports import free_port
from disagg.testing.vllm_server import completion, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import LEASE_S, Fleet, routed

ENGINES = ("producer", "consumer", "single")
Prompt = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Iterator[str]:
    """The URL of a router of ours in front of the fleet, which hands short prompts over too."""
    with routed([fleet.producer], [fleet.consumer], pairing={"local_prefill_tokens": 0}) as url:
        yield url


def ask(url: str, prompt: Any, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", **completion(prompt, **options)}
    answer = client().post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def nothing_held(fleet: Fleet) -> bool:
    idle = "vllm:kv_cache_usage_perc"
    return (
        fleet.producer.metric("disagg_leases_held") == 0
        and fleet.producer.metrics(idle)[idle + "{}"] == 0
        and fleet.consumer.metrics(idle)[idle + "{}"] == 0
        and not list(fleet.storage.glob("*.safetensors*"))
    )


@pytest.mark.parametrize("length", [1, 128, 700, 3000])
def test_exact_through_our_router(fleet: Fleet, router: str, prompt: Prompt, length: int) -> None:
    ids = prompt(length)
    before = fleet.consumer.metric("disagg_handoff_bytes_total", transport="process_memory")
    answer, reference = ask(router, ids), fleet.single.complete(ids)
    after = fleet.consumer.metric("disagg_handoff_bytes_total", transport="process_memory")
    assert token_ids(answer) == token_ids(reference)
    assert answer["usage"]["prompt_tokens"] == reference["usage"]["prompt_tokens"]
    assert (after > before) == (length > 1)  # one token is computed in any case


def test_several_prompts_in_one_request(fleet: Fleet, router: str, prompt: Prompt) -> None:
    prompts = [prompt(length) for length in (3, 300, 129)]
    assert token_ids(ask(router, prompts)) == token_ids(fleet.single.complete(prompts))


def test_errors_are_vllms_own(fleet: Fleet, router: str) -> None:
    wrong: list[dict[str, Any]] = [{"max_tokens": -1}, {"prompt": [[]]}, {"temperature": "hot"}]
    for body in [*wrong, {"model": "other"}]:
        sent = {"model": "tiny", "prompt": "x", **body}
        ours = client().post(f"{router}/v1/completions", json=sent, timeout=60)
        theirs = client().post(f"{fleet.single.url}/v1/completions", json=sent, timeout=60)
        assert ours.status_code == theirs.status_code >= 400
        assert set(ours.json()["error"]) == set(theirs.json()["error"])


def test_what_only_decode_refuses_gives_the_lease_back(
    fleet: Fleet, router: str, prompt: Prompt
) -> None:
    body = {"model": "tiny", "prompt": prompt(900), "logprobs": 1000}
    answer = client().post(f"{router}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 400
    assert eventually(lambda: nothing_held(fleet), LEASE_S + 10)


def test_200_requests_cancelled_at_random(fleet: Fleet, router: str, prompt: Prompt) -> None:
    generator = random.Random(5)
    prompts = [prompt(generator.choice([20, 200, 900, 2500])) for _ in range(200)]

    def cancelled(ids: list[int]) -> None:
        body = {"model": "tiny", **completion(ids, max_tokens=64, stream=generator.random() < 0.5)}
        patience = generator.choice([0.01, 0.05, 0.2, 0.6])
        try:
            with client().stream(
                "POST", f"{router}/v1/completions", json=body, timeout=patience
            ) as answer:
                deadline = time.monotonic() + patience
                for _ in answer.iter_raw():
                    if time.monotonic() > deadline:
                        return
        except httpx.TimeoutException:
            return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cancelled, prompts))
    assert eventually(lambda: nothing_held(fleet), LEASE_S + 30)
    ids = prompt(500)
    assert token_ids(ask(router, ids)) == token_ids(fleet.single.complete(ids))


def test_300_requests_at_16_leave_nothing(fleet: Fleet, router: str, prompt: Prompt) -> None:
    engines = (fleet.producer, fleet.consumer, fleet.single)

    def memory() -> list[float]:
        """MiB of the workers. vLLM has touched the whole cache when it started."""
        return [server.worker().memory_info().rss / 2**20 for server in engines]

    def load(pool: ThreadPoolExecutor, prompts: list[list[int]]) -> None:
        list(pool.map(lambda ids: ask(router, ids, max_tokens=8), prompts))
        list(pool.map(lambda ids: fleet.single.complete(ids, max_tokens=8), prompts))
        assert eventually(lambda: nothing_held(fleet), LEASE_S + 10)

    prompts = [prompt(200 + 14 * (number % 30)) for number in range(300)]
    with ThreadPoolExecutor(16) as pool:
        load(pool, prompts[:60])
        before = memory()
        # An engine without connector, too, takes hundreds of MiB more in its first thousands of
        # requests: its heap is cut up. A leak only adds to that.
        more: list[float] = []
        while not more or (more[-1] >= 100 and len(more) < 6):
            load(pool, prompts)
            *ours, plain = (now - at for now, at in zip(memory(), before, strict=True))
            more.append(max(ours) - plain)
    assert more[-1] < 100, more


def test_idle_connectors_cost_no_cpu(fleet: Fleet) -> None:
    def used() -> list[float]:
        workers = [s.worker() for s in (fleet.producer, fleet.consumer, fleet.single)]
        return [sum(worker.cpu_times()[:2]) for worker in workers]

    assert eventually(lambda: nothing_held(fleet), LEASE_S + 10)
    time.sleep(2)  # vLLM itself polls for a second after each request
    before = used()
    time.sleep(4)
    producer, consumer, plain = (now - at for at, now in zip(before, used(), strict=True))
    assert max(producer, consumer) < plain + 0.1, "of 4 s: more than an engine without connector"


@pytest.fixture
def vllm_router(fleet: Fleet, tmp_path: Path) -> Iterator[str]:
    """vllm-project's own router, in its NIXL mode, knowing nothing of us."""
    binary = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    assert binary, "vllm-router is in the dev extra"
    port, metrics_port = free_port(), free_port()
    command = [binary, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", fleet.producer.url, "--decode", fleet.consumer.url]
    command += ["--prometheus-port", str(metrics_port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        assert eventually(lambda: answers(url), 60), (tmp_path / "log").read_text()[-3000:]
        yield url
    finally:
        process.terminate()
        process.wait(15)


def answers(url: str) -> bool:
    try:
        return client().get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def test_vllm_router_drives_our_connector(fleet: Fleet, vllm_router: str, prompt: Prompt) -> None:
    loaded = {"transport": "process_memory", "outcome": "loaded"}
    before = fleet.consumer.metric("disagg_handoffs_total", **loaded)
    for length in (40, 128, 1000):
        ids = prompt(length)
        assert token_ids(ask(vllm_router, ids)) == token_ids(fleet.single.complete(ids))
    assert fleet.consumer.metric("disagg_handoffs_total", **loaded) == before + 3
    assert eventually(lambda: nothing_held(fleet), LEASE_S + 10)
