"""A handed-over request answers with exactly the tokens of a single engine, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from disagg.router.api.bodies import REMOTE_DECODE
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import BLOCK_BYTES, Fleet, lengths

Prompt = Callable[[int], list[int]]


@dataclass(frozen=True)
class Pair:
    """A producer, a consumer, the transport they have in common, and whom they must equal."""

    producer: VllmServer
    consumer: VllmServer
    transport: str
    single: VllmServer

    def loads(self) -> float:
        labels = {"transport": self.transport, "outcome": "loaded"}
        return self.consumer.metric("disagg_handoffs_total", **labels)

    def moved(self) -> float:
        return self.consumer.metric("disagg_handoff_bytes_total", transport=self.transport)

    def handoff(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """Prefill on one engine, decode on the other; the decode engine must have loaded."""
        before = self.loads()
        params = self.producer.prefill(prompt, **options)
        answer = self.consumer.complete(prompt, kv_transfer_params=params, **options)
        assert self.loads() > before, "nothing was loaded"
        return answer


WAYS = {
    "memory": ("producer", "consumer", "process_memory"),
    "tcp": ("producer", "tcp", "tcp"),
    "files": ("producer", "files", "shared_storage"),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pair(way: str, fleet: Fleet) -> Pair:
    producer, consumer, transport = WAYS[way]
    fleet.wake(producer, consumer, "single")
    return Pair(getattr(fleet, producer), getattr(fleet, consumer), transport, fleet.single)


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Prompt:
    """The same token ids for every way, so that producer and reference compute them once."""
    generator = random.Random(request.node.nodeid.replace(request.getfixturevalue("way"), ""))
    return lambda length: [generator.randrange(300, 1000) for _ in range(length)]


@lengths(1, 5, 127, 128, 129, 1000, 3000, long=[640, 8000])
def test_any_length(pair: Pair, prompt: Prompt, length: int) -> None:
    # 3,000 and 8,000 are prefilled in several chunks: more than max_num_batched_tokens.
    ids = prompt(length)
    params = pair.producer.prefill(ids)
    answer = pair.consumer.complete(ids, kv_transfer_params=params)
    reference = pair.single.complete(ids)
    assert token_ids(answer) == token_ids(reference)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][count] == reference["usage"][count]


@pytest.mark.parametrize("length", [2, 300, 1000])
def test_blocks_do_arrive(pair: Pair, prompt: Prompt, length: int) -> None:
    before = pair.moved()
    pair.handoff(prompt(length))
    assert pair.moved() - before == -(-length // 128) * BLOCK_BYTES


def test_repeated_prompt_uses_prefix_caches(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(1500)
    first = pair.handoff(ids)
    again = pair.consumer.complete(ids, kv_transfer_params=pair.producer.prefill(ids))
    longer = [*ids, *prompt(200)]
    before = pair.moved()
    extended = pair.handoff(longer)
    moved = pair.moved() - before
    assert token_ids(first) == token_ids(again) == token_ids(pair.single.complete(ids))
    assert token_ids(extended) == token_ids(pair.single.complete(longer))
    assert moved <= 3 * BLOCK_BYTES, "what decode holds already was moved again"


def test_text_and_chat(pair: Pair) -> None:
    text = "def hand_over(blocks):\n    " * 40
    assert token_ids(pair.handoff(text)) == token_ids(pair.single.complete(text))
    chat = {
        "messages": [{"role": "user", "content": "Why is the sky blue? " * 30}],
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
    }
    first = pair.producer.post(
        "/v1/chat/completions",
        {**chat, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE},
    ).json()
    handed = {**chat, "kv_transfer_params": first["kv_transfer_params"]}
    answer = pair.consumer.post("/v1/chat/completions", handed).json()
    reference = pair.single.post("/v1/chat/completions", chat).json()
    assert answer["choices"][0]["message"] == reference["choices"][0]["message"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"logprobs": 3},
        {"temperature": 0.8, "seed": 11},
        {"n": 2, "temperature": 0.8, "seed": 11},
        {"min_tokens": 4, "ignore_eos": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(pair: Pair, prompt: Prompt, options: dict[str, Any]) -> None:
    ids = prompt(700)
    answer, reference = pair.handoff(ids, **options), pair.single.complete(ids, **options)
    assert token_ids(answer) == token_ids(reference)
    if "logprobs" in options:
        ours, theirs = (a["choices"][0]["logprobs"]["token_logprobs"] for a in (answer, reference))
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_stop_string(pair: Pair) -> None:
    text = "import torch\nfrom typing import " * 20
    whole = pair.single.complete(text)["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:3]
    answer = pair.handoff(text, stop=[stop])["choices"][0]
    reference = pair.single.complete(text, stop=[stop])["choices"][0]
    assert answer["text"] == reference["text"]
    assert answer["finish_reason"] == reference["finish_reason"] == "stop"


def test_32_at_once(pair: Pair, prompt: Prompt) -> None:
    # Together far over max_num_batched_tokens: prefilled in chunks that share steps.
    prompts = [prompt(100 + 53 * number) for number in range(32)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda ids: pair.handoff(ids), prompts))
        references = list(pool.map(lambda ids: pair.single.complete(ids), prompts))
    wrong = [
        i
        for i, (a, r) in enumerate(zip(answers, references, strict=True))
        if token_ids(a) != token_ids(r)
    ]
    assert not wrong
    assert eventually(lambda: pair.producer.metric("disagg_leases_held") == 0)


def test_one_params_object_for_several_prompts(pair: Pair, prompt: Prompt) -> None:
    prompts = [prompt(length) for length in (5, 200, 700)]
    params = pair.producer.prefill(prompts)
    answer = pair.consumer.complete(prompts, kv_transfer_params=params)
    assert token_ids(answer) == token_ids(pair.single.complete(prompts))


def test_streamed_usage(pair: Pair, prompt: Prompt) -> None:
    ids = prompt(300)
    params = pair.producer.prefill(ids)
    body = completion(ids, stream=True, stream_options={"include_usage": True})
    streamed = pair.consumer.post("/v1/completions", {**body, "kv_transfer_params": params}).text
    assert '"prompt_tokens":300' in streamed
    assert '"completion_tokens":16' in streamed
    assert streamed.rstrip().endswith("data: [DONE]")
