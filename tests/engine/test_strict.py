"""Strict mode, preemption in a small cache, and at last the producer's death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import Fleet, beside, running, tiers, transfer
from engine.followed import handed_off, invitation

ENGINES = ("producer", "consumer", "strict", "single")
Prompt = Callable[[int], list[int]]


def test_strict_refuses_what_could_not_be_loaded(fleet: Fleet, prompt: Prompt) -> None:
    ids = prompt(300)
    params = fleet.producer.prefill(ids)
    good = fleet.strict.complete(ids, kv_transfer_params=params)
    assert token_ids(good) == token_ids(fleet.single.complete(ids))
    ids = prompt(300)
    body = {**completion(ids), "kv_transfer_params": {"do_remote_prefill": True}}
    refused = fleet.strict.post("/v1/completions", body)
    assert refused.status_code >= 500
    assert "error" in refused.json()
    assert fleet.strict.metric("disagg_kv_load_failures_total", reason="malformed") >= 1
    assert token_ids(fleet.strict.complete(ids)) == token_ids(fleet.single.complete(ids))


@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.slow), True])
def test_inside_multi_connector(
    fleet: Fleet,
    vllm_server: Callable[..., VllmServer],
    model: Path,
    prompt: Prompt,
    tmp_path: Path,
    strict: bool,
) -> None:
    """A lost lease ends there as it does outside. Without us, vLLM reads the outer config, whose
    default is an error."""
    config = beside(transfer("kv_consumer", strict=strict), tiers(host_bytes=1 << 24))
    assert "kv_load_failure_policy" not in config
    env = {"TMPDIR": str(fleet.storage.parents[1]), "VLLM_SERVER_DEV_MODE": "1"}
    args = ("--num-gpu-blocks-override", "64", "--max-model-len", "4096")
    server = vllm_server("multi", model, tmp_path / "log", config, args, env=env)
    with running([server]):
        ids = prompt(300)
        params, right = fleet.producer.prefill(ids), token_ids(fleet.single.complete(ids))
        assert token_ids(server.complete(ids, kv_transfer_params=params)) == right
        server.post("/reset_prefix_cache?reset_external=true", {}).raise_for_status()
        body = {**completion(ids), "kv_transfer_params": params}  # a consumed reference
        again = server.post("/v1/completions", body)
        assert server.metric("disagg_kv_load_failures_total", reason="lease_gone") == 1
        if strict:
            assert again.status_code >= 500
            assert "error" in again.json()
        else:
            assert token_ids(again.json()) == right


def test_several_answers_of_one_prompt(fleet: Fleet, prompt: Prompt) -> None:
    """The lease ends with the first one's load. The others have whole blocks from it, and are no
    error: they compute what is left."""
    ids, drawn = prompt(700), {"n": 4, "temperature": 1.0, "seed": 7}
    failures, found = "disagg_kv_load_failures", "vllm:prefix_cache_hits_total"
    before = fleet.strict.metrics(failures), fleet.strict.metric(found)
    params = fleet.producer.prefill(ids)
    answer = fleet.strict.complete(ids, kv_transfer_params=params, **drawn)
    assert token_ids(answer) == token_ids(fleet.single.complete(ids, **drawn))
    assert fleet.strict.metrics(failures) == before[0]
    assert fleet.strict.metric(found) - before[1] == 3 * 640


def test_preempted_on_the_consumer(fleet: Fleet, prompt: Prompt) -> None:
    """24 blocks for eight requests that each grow to 5: some are preempted and come back."""
    prompts = [prompt(380) for _ in range(8)]
    # All first: beside slow prefills the early ones would be done before the late ones come.
    params = [fleet.producer.prefill(ids) for ids in prompts]

    def handed(one: int) -> list[list[int]]:
        asked = {"kv_transfer_params": params[one], "max_tokens": 200}
        return token_ids(fleet.strict.complete(prompts[one], **asked))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(handed, range(8)))
        alone = list(pool.map(lambda ids: fleet.single.complete(ids, max_tokens=200), prompts))
    assert fleet.strict.metrics("vllm:num_preemptions")["vllm:num_preemptions_total{}"] > 0
    assert answers == [token_ids(answer) for answer in alone]
    assert eventually(lambda: usage(fleet) == 0)


def test_many_prompts_in_a_small_producer(fleet: Fleet, prompt: Prompt) -> None:
    """Leases hold most of the producer's cache; later prompts wait for them, and are right."""
    prompts = [prompt(700) for _ in range(12)]

    def both(ids: list[int]) -> list[list[int]]:
        return token_ids(fleet.consumer.complete(ids, kv_transfer_params=fleet.strict.prefill(ids)))

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(both, prompts))
    assert answers == [token_ids(fleet.single.complete(ids)) for ids in prompts]
    assert eventually(lambda: fleet.strict.metric("disagg_leases_held") == 0)
    assert eventually(lambda: usage(fleet) == 0)


def test_prompts_that_a_small_producer_preempts_are_followed(fleet: Fleet, prompt: Prompt) -> None:
    prompts, invited = [prompt(700) for _ in range(12)], invitation(fleet.strict)

    def both(ids: list[int]) -> list[list[int]]:
        return token_ids(handed_off(fleet.strict, fleet.consumer, ids, invited))

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(both, prompts))
    assert answers == [token_ids(fleet.single.complete(ids)) for ids in prompts]
    assert eventually(lambda: fleet.strict.metric("disagg_leases_held") == 0)
    assert eventually(lambda: usage(fleet) == 0)


def test_producer_killed_after_prefill(fleet: Fleet, prompt: Prompt) -> None:
    """Last in this file: the engine does not come back."""
    ids = prompt(600)
    params = fleet.strict.prefill(ids)
    os.kill(fleet.strict.worker().pid, signal.SIGKILL)
    before = fleet.consumer.metric("disagg_kv_load_failures_total", reason="peer_lost")
    answer = fleet.consumer.complete(ids, kv_transfer_params=params)
    assert token_ids(answer) == token_ids(fleet.single.complete(ids))
    after = fleet.consumer.metric("disagg_kv_load_failures_total", reason="peer_lost")
    assert after == before + 1


def usage(fleet: Fleet) -> float:
    return fleet.strict.metrics("vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc{}"]
