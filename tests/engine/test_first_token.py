"""Streams whose first token is the prefill engine's: the same answers, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from disagg.testing.http import client
from disagg.testing.waiting import eventually
from engine.conftest import BLOCK_BYTES, Fleet, begun, routed
from engine.streams import Streamed, stream

ENGINES = ("producer", "consumer", "single")
PATH = "/v1/completions"
OPTIONS = {"model": "tiny", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
Prompt = Callable[[int], list[int]]


@pytest.fixture(params=[0.0, 0.1], ids=["at once", "held"])
def url(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[str]:
    # Not of `prompt`, whose next ones would depend on how often it takes.
    generator = random.Random(f"first {request.node.nodeid}")
    pairing = {"first_token": "prefill", "local_prefill_tokens": 0}
    pairing["first_token_hold_s"] = request.param
    with routed([fleet.producer], [fleet.consumer], pairing=pairing) as url:

        def begins_at_prefill() -> bool:
            """Not before the router has asked the engine for its length."""
            ids = [generator.randrange(300, 1000) for _ in range(200)]
            stream(url, PATH, {**OPTIONS, "prompt": ids}, Streamed())
            return begun(url) > 0

        assert eventually(begins_at_prefill)
        yield url


def same(fleet: Fleet, url: str, body: dict[str, Any]) -> None:
    seen, body = Streamed(), {**body, "return_token_ids": True}
    stream(url, PATH, body, seen)
    reference = fleet.single.post(PATH, body).json()
    seen.check(reference)
    assert seen.tokens == reference["choices"][0]["token_ids"]


def spoken(fleet: Fleet, prompt: Prompt, length: int) -> list[int]:
    """A prompt whose first token is text: a stream does not begin with half a character."""
    for _ in range(20):
        ids = prompt(length)
        first = fleet.single.post(PATH, {**OPTIONS, "prompt": ids, "max_tokens": 1}).json()
        if first["choices"][0]["text"].strip("\ufffd"):
            return ids
    pytest.fail("twenty prompts, and no answer begins with text")


def test_answers_and_what_moves(fleet: Fleet, url: str, prompt: Prompt) -> None:
    """All of the prompt's blocks, whole or not: the token itself is all that decode computes."""
    for length in (1, 5, 127, 128, 129, 1000, 3000):
        ids = spoken(fleet, prompt, length)
        before = begun(url), moved(fleet)
        same(fleet, url, {**OPTIONS, "prompt": ids})
        assert begun(url) - before[0] == 1, length
        assert moved(fleet) - before[1] == -(-length // 128) * BLOCK_BYTES


def moved(fleet: Fleet) -> float:
    labels = {"transport": "process_memory"}
    return fleet.consumer.metric("disagg_handoff_bytes_total", **labels)


def test_many_at_once_and_of_any_length(fleet: Fleet, url: str, prompt: Prompt) -> None:
    bodies: list[dict[str, Any]] = []
    for number, limit in enumerate([1, 2, 3, 8, 30, 60] * 3):
        ids = spoken(fleet, prompt, 20 + 60 * number)
        bodies.append({**OPTIONS, "prompt": ids, "max_tokens": limit, "min_tokens": limit})
    before = begun(url)
    seen = [Streamed() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        for _ in pool.map(lambda body, one: stream(url, PATH, body, one), bodies, seen):
            pass
        references = list(pool.map(lambda body: fleet.single.post(PATH, body).json(), bodies))
    for one, reference in zip(seen, references, strict=True):
        one.check(reference)
    assert begun(url) - before == 15, "all but those of one token"


@pytest.mark.parametrize("url", [0.0, pytest.param(0.1, marks=pytest.mark.slow)], indirect=True)
def test_what_is_drawn_is_as_likely_as_ever(fleet: Fleet, url: str, prompt: Prompt) -> None:
    """Also the tokens that no stream begins with, for which decode is asked: drawn anew, they would
    have to come twice."""
    silent, spoken = 255, 300  # half a character, and text
    body = {"model": "tiny", "max_tokens": 2, "logit_bias": {silent: 100, spoken: 100}}
    body |= {"temperature": 2, "return_token_ids": True}
    for _ in range(10):  # until both are likely
        body["prompt"] = prompt(200)
        drawn = fleet.single.post(PATH, {**body, "n": 400}).json()["choices"]
        expected = sum(one["token_ids"][0] == silent for one in drawn) / len(drawn)
        if 0.3 < expected < 0.7:
            break
    assert 0.3 < expected < 0.7, expected
    seen = [Streamed() for _ in range(400)]
    before = begun(url)
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda one: stream(url, PATH, body, one), seen):
            pass
    got = sum(one.tokens[0] == silent for one in seen) / len(seen)
    assert begun(url) > before
    assert got == pytest.approx(expected, abs=0.14), "four standard deviations"


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 100_000}, {"max_tokens": 5, "min_tokens": 6}, {"max_tokens": 0}]
)
def test_what_decode_refuses_has_its_status(url: str, prompt: Prompt, wrong: Any) -> None:
    before = begun(url)
    body = {**OPTIONS, "prompt": prompt(300), "stream": True, **wrong}
    answer = client().post(f"{url}{PATH}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "error" in answer.json()
    assert begun(url) == before


def test_a_client_that_leaves_gives_the_lease_back(fleet: Fleet, url: str, prompt: Prompt) -> None:
    for number in range(6):
        body = {**OPTIONS, "prompt": prompt(1500), "stream": True, "max_tokens": 400}
        with client().stream("POST", f"{url}{PATH}", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            for _ in range(1 + number % 3 * 2):
                next(lines)
    assert eventually(lambda: not fleet.producer.metric("disagg_leases_held"))
    assert eventually(lambda: not fleet.consumer.metric("vllm:num_requests_running"))
