"""Token ids of texts and chats, from an engine's `/tokenize`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from unit.router.conftest import FakeEngine, Setup

from disagg.router.api import bodies
from disagg.router.api.paths import CHAT, COMPLETION
from disagg.router.request.plan import RequestPlan

MESSAGES = [{"role": "user", "content": "hello"}]
CHATS: dict[str, Any] = {"model": "m", "messages": MESSAGES}
SECTION = {"pairing": {"prefill": "cache_aware", "tokenize": "engine", "local_prefill_tokens": 0}}


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        (COMPLETION, {"prompt": "x", "max_tokens": 3}, {"prompt": "x"}),
        (
            COMPLETION,
            {"model": "m", "prompt": "x", "add_special_tokens": False},
            {"model": "m", "prompt": "x", "add_special_tokens": False},
        ),
        (CHAT, CHATS | {"temperature": 1}, CHATS),
        (CHAT, CHATS | {"tools": [{"a": 1}]}, CHATS | {"tools": [{"a": 1}]}),
        (CHAT, CHATS | {"tools": [{"a": 1}], "tool_choice": "none"}, None),
        (CHAT, CHATS | {"documents": [{"a": 1}]}, None),
        (CHAT, CHATS | {"reasoning_effort": "low"}, None),
        (CHAT, {"messages": "x"}, None),
        (COMPLETION, {"prompt": ["x"]}, None),
        (COMPLETION, {"prompt": "x", "truncate_prompt_tokens": 4}, None),
        ("/v1/responses", {"input": "x"}, None),
        ("/v1/messages", CHATS, None),
    ],
)
def test_what_is_asked(path: str, body: dict[str, Any], asked: dict[str, Any] | None) -> None:
    assert bodies.tokenize_body(body, path) == asked


def test_a_plan_that_was_told() -> None:
    plan = RequestPlan(CHAT, CHATS)
    assert plan.blocks is None
    plan.reads(range(33))
    assert plan.blocks is not None
    assert plan.blocks.count(16) == 2
    plan.reads([-1])
    assert plan.blocks is None


class Slow(FakeEngine):
    """Its `/tokenize` does not answer."""

    async def _other(self, request: Any) -> Any:
        if request.path == "/tokenize":
            await asyncio.sleep(3600)
        return await super()._other(request)


def ask(setup: Setup, path: str = CHAT, **body: Any) -> None:
    answer = httpx.post(f"{setup.url}{path}", json=CHATS | body, timeout=20)
    assert answer.status_code == 200
    assert "tokens" not in answer.text


def outcomes(setup: Setup) -> dict[str, float]:
    text = httpx.get(f"{setup.url}/metrics", timeout=10).text
    lines = [one for one in text.splitlines() if one.startswith("disagg_router_tokenized_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((200, {"tokens": [1, 2, 3], "count": 3}), "known"),
        ((200, {"tokens": [-1]}), "failed"),
        ((200, {"tokens": [1 << 40]}), "failed"),
        ((200, {"tokens": "x"}), "failed"),
        ((404, {"tokens": [1]}), "failed"),
    ],
)
def test_what_an_engine_answers(
    make: Callable[..., Setup], answer: tuple[int, Any], outcome: str
) -> None:
    setup = make(section=SECTION)
    setup.prefill.refusing["/tokenize"] = answer
    ask(setup)
    assert setup.prefill.asked.count("/tokenize") == 1
    assert outcomes(setup) == {outcome: 1}
    assert setup.decode.bodies[0]["messages"] == MESSAGES
    ask(setup, COMPLETION, prompt=[1, 2, 3])
    assert setup.prefill.asked.count("/tokenize") == 1, "these are ids already"


def test_a_slow_engine_is_not_awaited(make: Callable[..., Setup]) -> None:
    setup = make(section=SECTION, kind=Slow)
    ask(setup)
    assert outcomes(setup) == {"failed": 1}


def test_images_are_not_asked_about(make: Callable[..., Setup]) -> None:
    setup = make(section=SECTION)
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    ask(setup, messages=[{"role": "user", "content": [image]}])
    assert "/tokenize" not in setup.prefill.asked
    assert outcomes(setup) == {}


def test_nobody_asks_by_default(make: Callable[..., Setup]) -> None:
    for pairing in ({"prefill": "cache_aware"}, {"tokenize": "engine"}):
        setup = make(section={"pairing": {**pairing, "local_prefill_tokens": 0}})
        ask(setup)
        assert "/tokenize" not in setup.prefill.asked + setup.decode.asked
