"""OpenAI's responses and Anthropic's messages through both legs: as one engine answers them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from disagg.testing.http import client
from engine.conftest import Fleet, routed

ENGINES = ("producer", "consumer", "single")
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT = "Where do the blocks go when the prompt was read? " * 30
TOOL = {"name": "weather", "description": "x", "input_schema": {"type": "object"}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"input": TEXT}),
    (RESPONSES, {"input": TEXT, "instructions": "Be short.", "max_output_tokens": 1}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]}),
    (RESPONSES, {"input": TEXT, "text": {"format": {"type": "json_object"}}}),
    (RESPONSES, {"input": TEXT, "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    (RESPONSES, {"input": TEXT, "temperature": 1.4, "seed": 3, "stop": ["a"]}),
    (RESPONSES, {"input": TEXT, "temperature": -4}),
    (RESPONSES, {"input": 5}),
    (MESSAGES, {"messages": [{"role": "user", "content": TEXT}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": TEXT}], "system": "Be short."}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": TEXT}], "stop_sequences": ["a"]}),
    (MESSAGES, {"messages": [{"role": "user", "content": TEXT}], "tools": [TOOL]}),
    (MESSAGES, {"messages": [], "max_tokens": 3}),
    (MESSAGES, {"messages": "x"}),
]
# What names one answer, or tells of one engine's prefix cache.
OWN = {"id", "item_id", "created_at", "completed_at", "kv_transfer_params", "sequence_number"}
OWN |= {"input_tokens", "input_tokens_details", "total_tokens"}
OWN |= {"cache_read_input_tokens", "cache_creation_input_tokens"}


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> Iterator[str]:
    fleet.wake(*ENGINES)
    with routed([fleet.producer], [fleet.consumer]) as url:
        yield url


def moved(fleet: Fleet) -> float:
    return fleet.consumer.metric("disagg_handoff_bytes_total", transport="process_memory")


def without_own(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: without_own(value) for key, value in content.items() if key not in OWN}
    return [without_own(each) for each in content] if isinstance(content, list) else content


def whole(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = client().post(f"{url}{path}", json=body, timeout=60)
    return answer.status_code, without_own(answer.json())


def streamed(url: str, path: str, body: dict[str, Any]) -> Any:
    """Text, the names of the events in their order, and what the last one says."""
    names, text, last = list[str](), "", {}
    with client().stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=60) as got:
        if got.status_code != 200:
            got.read()
            return got.status_code, got.json()
        for line in got.iter_lines():
            if line.startswith("event: ") and line not in names[-1:]:
                names.append(line)  # how many deltas there are is a matter of time
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                delta = last.get("delta") or ""
                text += delta if isinstance(delta, str) else delta.get("text") or ""
    return names, text, without_empty(without_own(last))


def without_empty(content: Any) -> Any:
    """A stream has the log probability of a token without text only if the engine sends the token
    together with the next one: a matter of time."""
    if isinstance(content, list):
        kept = [one for one in content if not (isinstance(one, dict) and one.get("token") == "")]
        return [without_empty(one) for one in kept]
    if isinstance(content, dict):
        return {key: without_empty(value) for key, value in content.items()}
    return content


def nearly(content: Any) -> Any:
    """The same but for the last digits of log probabilities: what is computed in one step more or
    less is rounded otherwise on some CPUs."""
    if isinstance(content, dict):
        return {key: nearly(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(nearly(each) for each in content)
    return pytest.approx(content, abs=1e-3) if isinstance(content, float) else content


@pytest.mark.parametrize("ask", [pytest.param(whole, marks=pytest.mark.slow), streamed])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_as_one_engine_answers(
    fleet: Fleet, url: str, path: str, ask: Callable[[str, str, dict[str, Any]], Any]
) -> None:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for number, more in enumerate(more for own, more in ASKED if own == path):
        body = {"model": "tiny", "temperature": 0, limit: 12, **more}
        body = json.loads(
            json.dumps(body).replace("Where", f"{path} {ask.__name__} {number}: where", 1)
        )
        before = moved(fleet)
        got = ask(url, path, body)
        assert got == nearly(ask(fleet.single.url, path, body)), more
        if TEXT in json.dumps(more) and more.get("temperature", 0) >= 0:
            assert moved(fleet) > before, more


def test_openais_client(url: str, fleet: Fleet) -> None:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    asked["input"] = f"client: {TEXT}"
    answers = []
    for base in (url, fleet.single.url):
        with openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as one:
            events = list(one.responses.create(stream=True, **asked))
            assert events[-1].type == "response.completed"
            answers += [one.responses.create(**asked).output_text, events[-1].response.output_text]
    assert len(set(answers)) == 1
    assert answers[0]
