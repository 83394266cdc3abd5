"""What a client may ask for in a minute, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from unit.router.conftest import Setup
from unit.router.pairing.test_admission import until
from unit.router.pairing.test_fair_queue import KEYS
from unit.router.test_other_engines import replace

from disagg.config import ShareSection
from disagg.credentials import ApiKey
from disagg.router.api.errors import ApiError, Style
from disagg.router.pairing.rate_limits import RateLimits
from disagg.testing.http import client

Make = Callable[..., Setup]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, processes: int = 1, **share: Any) -> RateLimits:
    section = ShareSection(**share)
    return RateLimits(lambda client: section, processes, clock)


def told(limited: RateLimits, client: str, tokens: int, style: Style) -> dict[str, str]:
    fields = limited.admit(client, tokens, style)
    return {name.decode(): value.decode() for name, value in fields}


def refused(limited: RateLimits, tokens: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        limited.admit("a", tokens, "openai")
    return caught.value


def test_requests_a_minute() -> None:
    clock = Clock()
    limited = limits(clock, requests_per_minute=60)
    for left in range(59, -1, -1):
        headers = told(limited, "a", 5, "openai")
        assert headers["x-ratelimit-remaining-requests"] == str(left)
    error = refused(limited)
    assert error.status == 429
    assert "60 requests a minute; try again in 1 s (requests_per_minute in" in error.message
    assert error.headers is not None
    assert error.headers["Retry-After"] == "1"
    clock.now += 1
    limited.admit("a", 5, "openai")
    refused(limited)
    limited.admit("b", 5, "openai")


def test_tokens_of_prompts_are_paid_before() -> None:
    clock = Clock()
    limited = limits(clock, prompt_tokens_per_minute=1000)
    headers = told(limited, "a", 900, "openai")
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == "100"
    assert headers["x-ratelimit-reset-tokens"] == "54s"
    error = refused(limited, 400)
    assert error.headers is not None
    assert error.headers["Retry-After"] == "18"
    clock.now += 18
    limited.admit("a", 400, "openai")


def test_a_prompt_of_more_than_a_minute_is_not_refused_for_ever() -> None:
    clock = Clock()
    limited = limits(clock, prompt_tokens_per_minute=1000)
    limited.admit("a", 5000, "openai")
    clock.now += 200
    refused(limited)
    clock.now += 45
    limited.admit("a", 1, "openai")


def test_tokens_of_answers_are_paid_afterwards() -> None:
    clock = Clock()
    limited = limits(clock, output_tokens_per_minute=600)
    limited.admit("a", 1, "openai")
    limited.answered("a", 900)
    error = refused(limited)
    assert "600 output tokens a minute" in error.message
    clock.now += 31
    headers = told(limited, "a", 1, "anthropic")
    assert headers["anthropic-ratelimit-output-tokens-remaining"] == "10"
    assert headers["anthropic-ratelimit-output-tokens-reset"].endswith("Z")


def test_processes_share_a_limit() -> None:
    limited = limits(Clock(), processes=4, requests_per_minute=8)
    limited.admit("a", 1, "openai")
    limited.admit("a", 1, "openai")
    assert "8 requests" in refused(limited).message


def ask(setup: Setup, key: ApiKey, *, path: str = "completions", **more: Any) -> Any:
    headers = {"authorization": f"Bearer {key.value}"}
    body = {"model": "m", "prompt": "x", "messages": [], **more}
    return client().post(f"{setup.url}/v1/{path}", json=body, headers=headers, timeout=20)


def test_answers_say_what_is_left(make: Make) -> None:
    shares = {"flood": {"requests_per_minute": 2}, "*": {"output_tokens_per_minute": 4}}
    setup = make(api_keys=KEYS, section={"shares": shares})
    assert ask(setup, KEYS[0]).headers["x-ratelimit-remaining-requests"] == "1"
    last = ask(setup, KEYS[0], stream=True)
    assert last.headers["x-ratelimit-remaining-requests"] == "0"
    over = ask(setup, KEYS[0], path="messages")
    assert over.status_code == 429
    assert over.json()["error"]["type"] == "rate_limit_error"
    assert over.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert over.headers["retry-after"]
    assert len(setup.decode.bodies) == 2

    setup.decode.chunks = 9
    assert ask(setup, KEYS[1], stream=True).status_code == 200
    assert ask(setup, KEYS[1]).status_code == 429, "the answer had more tokens than a minute has"


def test_an_engine_that_schedules_by_priority_gets_it(make: Make) -> None:
    shares = {"urgent": {"priority": -3}, "calm": {"priority": 2}}
    setup = make(api_keys=KEYS, section={"shares": shares})
    ask(setup, KEYS[2])
    assert "priority" not in setup.decode.bodies[-1], "it would refuse the request"


def test_a_client_cannot_put_itself_first(make: Make) -> None:
    setup = make(api_keys=KEYS, section={"shares": {"calm": {"priority": 2}}})
    for engine in (setup.decode, setup.prefill):
        engine.refusing["/disagg/fingerprint"] = (200, {"scheduling_policy": "priority"})
    replace(setup, [])
    replace(setup, setup.endpoints)
    until(lambda: client().get(f"{setup.url}/ready").status_code == 200)
    for asked, given in ((None, 2), (-9, 2), (7, 7)):
        more: dict[str, Any] = {} if asked is None else {"priority": asked}
        assert ask(setup, KEYS[1], **more).status_code == 200
        assert setup.decode.bodies[-1]["priority"] == given
        assert setup.prefill.bodies[-1]["priority"] == given
