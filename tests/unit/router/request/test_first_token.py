"""Which answers of prefill a stream may begin with, and that what follows is one with them."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disagg.chaos.expected_answers import compact
from disagg.router.api.bodies import prefill_body
from disagg.router.api.errors import ApiError
from disagg.router.api.paths import CHAT, COMPLETION
from disagg.router.pairing.first_token_hold import FirstTokenHold
from disagg.router.pairing.in_flight import Seat
from disagg.router.request.decode_leg import Opened
from disagg.router.request.first_token import Begun, begin, may_begin, same_draw
from disagg.router.request.plan import RequestPlan
from disagg.router.request.stream_state import watched

SAID = {"max_model_len": "20", "chats": "plain"}
BODY: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 6}
TALK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | {
    "stream": True
}
PROMPT = [5, 6, 7]


def prefilled(path: str, text: str | None = " a", **changed: Any) -> bytes:
    """As vLLM 0.32 answers the prefill leg."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    choice |= {"stop_reason": None, "token_ids": [9]}
    head: dict[str, Any] = {"id": "p-1", "created": 3, "model": "m", "usage": {"total_tokens": 4}}
    if path == CHAT:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            "tool_calls": [],
            "reasoning": None,
        }
        choice["message"] = message | changed.pop("message", {})
        head |= {"object": "chat.completion", "prompt_token_ids": PROMPT}
    else:
        choice |= {"text": text, "prompt_token_ids": PROMPT}
        head["object"] = "text_completion"
    return compact({**head, "choices": [choice | changed], "kv_transfer_params": {"a": 1}})


def events(data: bytes) -> list[Any]:
    return [json.loads(part.removeprefix(b"data: ")) for part in data.split(b"\n\n") if part]


@pytest.mark.parametrize(("path", "body"), [(COMPLETION, BODY), (CHAT, TALK)])
def test_what_the_client_sees_and_what_decode_is_asked(path: str, body: Any) -> None:
    assert may_begin(RequestPlan(path, body), SAID)
    first = begin(RequestPlan(path, body), SAID, prefilled(path))
    stream = watched(RequestPlan(path, body))
    assert first is not None
    assert stream is not None
    seen = events(stream.feed(first))
    choices = [event["choices"][0] for event in seen]
    if path == CHAT:
        deltas = [{"role": "assistant", "content": ""}, {"content": " a"}]
        assert [choice["delta"] for choice in choices] == deltas
        assert {event["object"] for event in seen} == {"chat.completion.chunk"}
    else:
        assert [choice["text"] for choice in choices] == [" a"]
        assert {event["object"] for event in seen} == {"text_completion"}
    assert {(event["id"], event["created"]) for event in seen} == {("p-1", 3)}
    assert all(choice["finish_reason"] is None for choice in choices)
    assert not stream.is_whole

    asked = stream.follows(SAID)
    assert asked["prompt"] == [*PROMPT, 9]
    assert asked["max_tokens"] == (5 if path == COMPLETION else 16), "the client's, or all there is"
    choice = {"index": 0, "text": "b", "finish_reason": "stop", "token_ids": [10]}
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    names = {"id": "d-2", "object": "text_completion", "created": 9, "model": "m"}
    rest = [{**names, "choices": [choice]}, {**names, "choices": [], "usage": usage}]
    after = events(stream.feed(b"".join(b"data: %b\n\n" % compact(one) for one in rest)))
    said = after[0]["choices"][0]
    assert (said["delta"]["content"] if path == CHAT else said["text"]) == "b"
    assert {event["id"] for event in after} == {"p-1"}
    assert {event["object"] for event in after} == {seen[0]["object"]}
    assert after[1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert stream.is_whole
    assert stream.migrations == 0, "nothing has failed"


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (COMPLETION, prefilled(COMPLETION, "")),
        (COMPLETION, prefilled(COMPLETION, "\ufffd")),
        (COMPLETION, prefilled(COMPLETION, None)),
        (COMPLETION, prefilled(COMPLETION, finish_reason="stop")),
        (COMPLETION, prefilled(COMPLETION, token_ids=[1, 2])),
        (COMPLETION, prefilled(COMPLETION, token_ids=None)),
        (COMPLETION, prefilled(COMPLETION, prompt_token_ids=None)),
        (COMPLETION, b'{"kv_transfer_params": {}}'),
        (COMPLETION, b"no JSON"),
        (CHAT, prefilled(CHAT, None)),
        (CHAT, prefilled(CHAT, message={"reasoning": "hm"})),
        (CHAT, prefilled(CHAT, message={"tool_calls": [{"id": "1"}]})),
        (CHAT, prefilled(CHAT, message={"refusal": "no"})),
    ],
)
def test_what_no_stream_begins_with(path: str, answer: bytes) -> None:
    assert begin(RequestPlan(path, BODY if path == COMPLETION else TALK), SAID, answer) is None


def test_both_engines_draw_the_same_token() -> None:
    """Each request by a seed of its own, which the rest of a stream that was begun has not."""
    assert same_draw(RequestPlan(COMPLETION, {**BODY, "temperature": 0})) == {}
    drawn = [same_draw(RequestPlan(COMPLETION, BODY)) for _ in range(9)]
    assert len({each["seed"] for each in drawn}) == 9
    assert prefill_body({**BODY, "seed": None}, more=drawn[0])["seed"] == drawn[0]["seed"]
    stream, first = (
        watched(RequestPlan(COMPLETION, BODY)),
        begin(RequestPlan(COMPLETION, BODY), SAID, prefilled(COMPLETION)),
    )
    assert stream is not None
    assert first is not None
    stream.feed(first)
    assert "seed" not in stream.follows(SAID)


@pytest.mark.parametrize(
    ("changed", "may"),
    [
        ({"max_tokens": 2}, True),
        ({"max_tokens": 1}, False),
        ({"max_tokens": 0}, False),
        ({"max_tokens": -1}, False),
        ({"max_tokens": 17}, True),
        ({"max_tokens": 18}, False),
        ({"max_tokens": None}, True),
        ({"min_tokens": 6}, True),
        ({"min_tokens": 7}, False),
        ({"min_tokens": -1}, False),
        ({"max_completion_tokens": 1}, True),  # nothing to a completion
    ],
)
def test_decode_must_take_what_is_asked(changed: dict[str, Any], may: bool) -> None:
    found = begin(RequestPlan(COMPLETION, {**BODY, **changed}), SAID, prefilled(COMPLETION))
    assert (found is not None) is may


def test_room_and_limits_of_chats_and_of_defaults() -> None:
    talk, tight = RequestPlan(CHAT, TALK), {**SAID, "max_model_len": "4"}
    assert begin(talk, tight, prefilled(CHAT)) is None, "room for one token alone"
    assert begin(talk, {**SAID, "max_model_len": "5"}, prefilled(CHAT)) is not None
    one = RequestPlan(CHAT, {**TALK, "max_completion_tokens": 1})
    assert begin(one, SAID, prefilled(CHAT)) is None
    no_limit = {key: value for key, value in BODY.items() if key != "max_tokens"}
    plan, small = RequestPlan(COMPLETION, no_limit), {**SAID, "max_model_len": "18"}
    assert begin(plan, SAID, prefilled(COMPLETION)) is not None
    assert begin(plan, small, prefilled(COMPLETION)) is None, "16 do not fit"


@pytest.mark.parametrize(
    ("path", "options", "said", "may"),
    [
        (COMPLETION, {"include_usage": True}, SAID, True),
        (COMPLETION, {"include_usage": False, "continuous_usage_stats": False}, SAID, True),
        (COMPLETION, {"continuous_usage_stats": True}, SAID, False),
        (COMPLETION, {"include_usage": 1}, SAID, False),
        (COMPLETION, {"other": True}, SAID, False),
        (COMPLETION, [1], SAID, False),
        (COMPLETION, None, {"chats": "plain"}, False),
        (COMPLETION, None, {"max_model_len": "many"}, False),
        (COMPLETION, None, {"max_model_len": "20"}, True),
        (CHAT, None, {"max_model_len": "20"}, False),
        (CHAT, None, {**SAID, "chats": "parsed"}, False),
        (CHAT, None, SAID, True),
    ],
)
def test_which_requests_may(path: str, options: Any, said: dict[str, str], may: bool) -> None:
    assert may_begin(RequestPlan(path, {**BODY, "stream_options": options}), said) is may


@pytest.mark.parametrize("asked", [True, False, None])
def test_only_what_the_assistant_says(asked: bool | None) -> None:
    """Without a generation prompt, vLLM names the role of the last message."""
    assert may_begin(RequestPlan(CHAT, {**TALK, "add_generation_prompt": asked}), SAID) is (
        asked is True
    )


class Held:
    """A stream that was begun, and in which order what happened to it."""

    def __init__(self, hold_s: float, decode_s: float, error: ApiError | None = None) -> None:
        self.seen: list[str] = []
        self._decode_s, self._error = decode_s, error
        seat = cast(Seat, SimpleNamespace(leave=lambda: self.seen.append("left")))
        self.begun = Begun(b"", seat, self._decode, lambda: self.seen.append("given back"), hold_s)

    async def _decode(self) -> Opened:
        self.seen.append("asked")
        try:
            await asyncio.sleep(self._decode_s)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        if self._error is not None:
            raise self._error
        self.seen.append("opened")
        return cast(Opened, SimpleNamespace(close=lambda: self.seen.append("closed")))

    async def pass_first(self) -> None:
        self.seen.append("first")

    async def go_on(self) -> Opened:
        try:
            return await self.begun.go_on(self.pass_first)
        finally:
            self.begun.close()


@pytest.mark.parametrize(
    ("hold_s", "decode_s", "order"),
    [
        (0.0, 0.0, ["first", "asked", "opened"]),
        (60.0, 0.01, ["asked", "opened", "first"]),
        (0.01, 0.3, ["asked", "first", "opened"]),
    ],
    ids=["not", "until the second", "no longer"],
)
def test_the_first_token_is_held(hold_s: float, decode_s: float, order: list[str]) -> None:
    held = Held(hold_s, decode_s)
    asyncio.run(held.go_on())
    assert held.seen == order


def test_who_waited_longer_than_most_is_not_held() -> None:
    holding = FirstTokenHold(0.05)
    drawn = random.Random(1)
    waited = [drawn.random() for _ in range(2000)]
    held = {one: holding.of(one) for one in waited}
    assert held[waited[0]] == 0.05, "nothing is known yet"
    assert set(held.values()) == {0.05, 0.0}
    later = waited[200:]
    not_held = [one for one in later if not held[one]]
    assert 0.07 < len(not_held) / len(later) < 0.13
    assert min(not_held) > 0.8
    assert {holding.of(5.0) for _ in range(128)} == {0.0, 0.05}, "until that is what most wait"
    assert FirstTokenHold(0.0).of(0.1) == 0.0


def test_a_token_is_sent_whatever_becomes_of_decode() -> None:
    held = Held(60.0, 0.01, ApiError(502, "refused"))
    with pytest.raises(ApiError, match="refused"):
        asyncio.run(held.go_on())
    assert held.seen == ["asked", "first"]


def test_a_client_that_leaves_while_it_is_held() -> None:
    held = Held(60.0, 60.0)

    async def leave() -> None:
        serving = asyncio.create_task(held.go_on())
        await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.wait([serving])
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert held.seen == ["asked", "cancelled"], "which gives up seat and lease"


def test_a_client_that_leaves_before_decode_was_asked() -> None:
    held = Held(60.0, 60.0)

    async def leave() -> None:
        serving = asyncio.create_task(held.go_on())
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([serving])

    asyncio.run(leave())
    assert held.seen == ["left", "given back"]


def test_a_client_that_leaves_at_the_first_token() -> None:
    held = Held(60.0, 0.01)

    async def gone() -> None:
        raise ConnectionResetError

    async def leave() -> None:
        with pytest.raises(ConnectionResetError):
            await held.begun.go_on(gone)
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert held.seen == ["asked", "opened", "closed"]
