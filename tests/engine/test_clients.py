"""Clients of the field against our router and real engines, unchanged: openai's own, and curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from engine.conftest import Fleet, routed

ENGINES = ("producer", "consumer", "single")
TEXT = "Where do the blocks go when the prompt was read? " * 12
MESSAGES: Any = [{"role": "user", "content": TEXT}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    is_large: bool


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> Iterator[str]:
    with routed([fleet.producer], [fleet.consumer]) as router:
        yield f"{router}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def single(fleet: Fleet) -> Iterator[openai.OpenAI]:
    url = f"{fleet.single.url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
        yield client


def test_openai_answers(client: openai.OpenAI, single: openai.OpenAI) -> None:
    both = (client, single)
    ours, theirs = (c.chat.completions.create(messages=MESSAGES, **GREEDY) for c in both)
    assert ours.choices[0].message == theirs.choices[0].message
    assert ours.usage is not None
    assert theirs.usage is not None
    assert ours.usage.total_tokens == theirs.usage.total_tokens
    told, expected = (c.completions.create(prompt=TEXT, **GREEDY) for c in both)
    assert told.choices[0].text == expected.choices[0].text
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_openai_streams(client: openai.OpenAI, single: openai.OpenAI) -> None:
    whole = single.completions.create(prompt=TEXT, **GREEDY).choices[0].text
    events = client.completions.create(prompt=TEXT, stream=True, **GREEDY)
    assert "".join(event.choices[0].text for event in events) == whole
    usage = {"include_usage": True}
    create: Any = client.chat.completions.create
    last = [*create(messages=MESSAGES, stream=True, stream_options=usage, **GREEDY)][-1]
    assert last.usage.completion_tokens == GREEDY["max_tokens"]


def test_openai_async(url: str, single: openai.OpenAI) -> None:
    whole = single.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content

    async def both() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", timeout=60) as client:

            async def one() -> str:
                create = client.chat.completions.create
                events = await create(messages=MESSAGES, stream=True, **GREEDY)
                return "".join([event.choices[0].delta.content or "" async for event in events])

            return [*await asyncio.gather(one(), one())]

    assert asyncio.run(both()) == [whole, whole]


def test_openai_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        messages=MESSAGES, response_format=City, **{**GREEDY, "max_tokens": 64}
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_openai_tools(client: openai.OpenAI, single: openai.OpenAI) -> None:
    """The same call as a single engine's; what a random model puts in is another matter."""
    asked: dict[str, Any] = {
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        **GREEDY,
        "max_tokens": 64,
    }
    ours, theirs = (c.chat.completions.create(**asked).choices[0].message for c in (client, single))
    assert ours.tool_calls
    assert theirs.tool_calls
    assert [call.function for call in ours.tool_calls] == [
        call.function for call in theirs.tool_calls
    ]
    json.loads(ours.tool_calls[0].function.arguments)


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt=TEXT, **{**GREEDY, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(prompt=TEXT, **{**GREEDY, "max_tokens": -1})


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(url: str) -> None:
    body = json.dumps({**GREEDY, "prompt": TEXT, "stream": True})
    command = ["curl", "-sN", f"{url}/completions", "-H", "Content-Type: application/json"]
    done = subprocess.run([*command, "-d", body], capture_output=True, timeout=60, check=True)
    # Of a slow server, tokens may share an event.
    assert 2 <= done.stdout.count(b"data: {") <= GREEDY["max_tokens"]
    assert done.stdout.endswith(b"data: [DONE]\n\n")
