"""Whatever `kv_transfer_params` reach a decode engine, it answers right and stays alive.

The five kinds of vllm-project/vllm issue 52234, and what else a client or attacker may send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from disagg.testing.vllm_server import completion, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import BLOCK_BYTES, LEASE_S, Fleet

ENGINES = ("producer", "consumer", "single")
Prompt = Callable[[int], list[int]]
Params = dict[str, Any]


def answers_as_if_alone(fleet: Fleet, ids: list[int], params: Any) -> None:
    answer = fleet.consumer.complete(ids, kv_transfer_params=params)
    assert token_ids(answer) == token_ids(fleet.single.complete(ids))


def failures(fleet: Fleet, reason: str) -> float:
    return fleet.consumer.metric("disagg_kv_load_failures_total", reason=reason)


def none_held(fleet: Fleet, seconds: float) -> bool:
    return eventually(lambda: fleet.producer.metric("disagg_leases_held") == 0, seconds)


def test_what_decode_refuses_ends_its_lease(fleet: Fleet, prompt: Prompt) -> None:
    ids = prompt(300)
    assert none_held(fleet, LEASE_S + 10), "of other tests"
    before = failures(fleet, "prompt_mismatch")
    params = fleet.producer.prefill(ids)
    body = {**completion(ids), "logprobs": 1000, "kv_transfer_params": params}
    assert fleet.consumer.post("/v1/completions", body).status_code == 400
    assert none_held(fleet, LEASE_S / 2)
    assert failures(fleet, "prompt_mismatch") == before


def test_a_vllm_with_our_routes_takes_leases_back(fleet: Fleet, prompt: Prompt) -> None:
    """`--middleware disagg.engine.routes.Routes`, by the secret that this user's engines share."""
    assert none_held(fleet, LEASE_S + 10), "of other tests"
    params = fleet.producer.prefill(prompt(300))
    forged = {"kv_transfer_params": forge(params)}
    assert fleet.producer.post("/disagg/release", forged).status_code == 409
    assert fleet.producer.metric("disagg_leases_held") == 1
    released = fleet.producer.post("/disagg/release", {"kv_transfer_params": params})
    assert released.status_code == 200
    assert none_held(fleet, LEASE_S / 2)


def test_consumed_reference(fleet: Fleet, prompt: Prompt) -> None:
    ids = prompt(500)
    params = fleet.producer.prefill(ids)
    before = failures(fleet, "lease_gone")
    answers_as_if_alone(fleet, ids, params)
    answers_as_if_alone(fleet, ids, params)
    assert failures(fleet, "lease_gone") == before + 1


def test_stale_reference_after_blocks_were_used_again(fleet: Fleet, prompt: Prompt) -> None:
    ids = prompt(500)
    params = fleet.producer.prefill(ids)
    assert none_held(fleet, LEASE_S + 10)
    for _ in range(3):
        fleet.producer.complete(prompt(4000), max_tokens=1)
    before = failures(fleet, "lease_gone")
    answers_as_if_alone(fleet, ids, params)
    assert failures(fleet, "lease_gone") == before + 1


def test_lease_expired(fleet: Fleet, prompt: Prompt) -> None:
    ids = prompt(300)
    params = fleet.producer.prefill(ids)
    time.sleep(LEASE_S + 1)
    assert fleet.producer.metric("disagg_leases_held") == 0
    answers_as_if_alone(fleet, ids, params)


def test_reference_of_another_prompt(fleet: Fleet, prompt: Prompt) -> None:
    before = failures(fleet, "prompt_mismatch")
    answers_as_if_alone(fleet, prompt(500), fleet.producer.prefill(prompt(500)))
    assert failures(fleet, "prompt_mismatch") == before + 1


def test_only_the_common_prefix_is_loaded(fleet: Fleet, prompt: Prompt) -> None:
    common = prompt(400)
    longer = [*common, *prompt(300)]
    params = fleet.producer.prefill([*common, *prompt(100)])
    before = fleet.consumer.metric("disagg_handoff_bytes_total", transport="process_memory")
    answers_as_if_alone(fleet, longer, params)
    after = fleet.consumer.metric("disagg_handoff_bytes_total", transport="process_memory")
    assert after - before == 3 * BLOCK_BYTES


def forge(params: Params) -> Params:
    token = params["disagg"]
    return {**params, "disagg": token[:40] + ("A" if token[40] != "A" else "B") + token[41:]}


def as_floats(params: Params) -> Params:
    integers = {k: float(v) for k, v in params.items() if type(v) is int}
    return {**params, **integers}


@pytest.mark.parametrize(
    "tamper",
    [
        lambda p: {**p, "remote_request_id": "unknown"},
        lambda p: {**p, "remote_block_ids": [[10**9, -1, 5]]},
        lambda p: {**p, "remote_host": "198.51.100.7", "remote_port": 9},
        lambda p: {**p, "tp_size": 10**12},
        as_floats,
    ],
    ids=["request-id", "block-ids", "host", "tp-size", "floats"],
)
def test_outer_keys_are_not_trusted(fleet: Fleet, prompt: Prompt, tamper: Any) -> None:
    ids = prompt(400)
    answers_as_if_alone(fleet, ids, tamper(fleet.producer.prefill(ids)))


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (forge, "forged"),
        (lambda p: {k: v for k, v in p.items() if k != "disagg"}, "malformed"),
        (lambda p: {"do_remote_prefill": True}, "malformed"),
        (lambda p: {"do_remote_prefill": 1, "disagg": 5}, "malformed"),
        (lambda p: {"do_remote_prefill": {"x": 1}, "disagg": ["y"]}, "malformed"),
        (lambda p: {**p, "disagg": "%%%"}, "malformed"),
        (lambda p: {**p, "disagg": ""}, "forged"),
    ],
    ids=["forged", "no-token", "flag-alone", "number", "nested", "not-base64", "empty"],
)
def test_made_up_params(fleet: Fleet, prompt: Prompt, tamper: Any, reason: str) -> None:
    ids = prompt(400)
    before = failures(fleet, reason)
    answers_as_if_alone(fleet, ids, tamper(fleet.producer.prefill(ids)))
    assert failures(fleet, reason) == before + 1


@pytest.mark.parametrize("params", [[1, 2], "text", 7])
def test_wrong_type_is_a_400(fleet: Fleet, prompt: Prompt, params: Any) -> None:
    body = {**completion(prompt(50)), "kv_transfer_params": params}
    answer = fleet.consumer.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_params_by_the_back_door(fleet: Fleet, prompt: Prompt) -> None:
    # vllm_xargs reach the same place without a type check.
    body = {**completion(prompt(50)), "vllm_xargs": {"kv_transfer_params": "text"}}
    fleet.consumer.post("/v1/completions", body)
    answers_as_if_alone(fleet, prompt(100), None)


def test_leases_end_when_the_consumer_computes_alone(fleet: Fleet, prompt: Prompt) -> None:
    """What decode holds already is not moved, and the lease is let go at once."""
    ids = prompt(257)
    assert none_held(fleet, LEASE_S + 10), "of other tests"
    answers_as_if_alone(fleet, ids[:256], None)
    answers_as_if_alone(fleet, ids, fleet.producer.prefill(ids))
    assert none_held(fleet, LEASE_S / 2)
