"""Every watcher sees the same in any form of a stream, and the client gets the bytes that came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.router.event_forms import BOM, Said, contents, pieces, read, usual, written

from disagg.router.api.event_stream import EventWatcher, Plain
from disagg.router.api.paths import COMPLETION, ENDS, MESSAGES
from disagg.router.request.plan import RequestPlan
from disagg.router.request.replay import Replay
from disagg.router.request.stream_state import Stream

BODY: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 5}
PROMPT = [5, 6]
WORDS = [" a", "data: b", "", ': c\n\n"token_ids":[7]', "ä"]
DONE: Said = ("", "[DONE]")


def said(number: int, *, of: str = "cmpl-1", prompt: list[int] = PROMPT) -> Said:
    """The event of a token, as vLLM writes it."""
    choice: dict[str, Any] = {"index": 0, "text": WORDS[number], "logprobs": None}
    choice["finish_reason"] = "length" if number == len(WORDS) - 1 else None
    choice |= {"prompt_token_ids": None if number else prompt, "token_ids": [number]}
    names = {"id": of, "object": "text_completion", "created": 1, "model": "m"}
    return "", json.dumps({**names, "choices": [choice]}, separators=(",", ":"))


WHOLE = [*map(said, range(len(WORDS))), DONE]


def fed(watcher: EventWatcher, cut: list[bytes]) -> bytes:
    return b"".join(map(watcher.feed, cut))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_bytes_pass_untouched(data: st.DataObject) -> None:
    stream = data.draw(written(WHOLE))
    for watcher in (Plain(ENDS[COMPLETION]), Replay(COMPLETION)):
        cut = data.draw(pieces(stream))
        assert fed(watcher, cut) + watcher.finish() == stream
        assert watcher.is_whole


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_the_same_state(data: st.DataObject) -> None:
    events = WHOLE[: data.draw(st.integers(0, len(WHOLE)))]
    streams = usual(events), data.draw(written(events))
    plan = RequestPlan(COMPLETION, BODY)
    watchers = Stream(plan), Stream(plan)
    shown = [
        fed(watcher, data.draw(pieces(stream)))
        for watcher, stream in zip(watchers, streams, strict=True)
    ]
    assert contents(shown[0]) == contents(shown[1])
    one, other = watchers
    assert one.tokens() == other.tokens() == list(range(min(len(events), len(WORDS))))
    assert (one.is_whole, one.has_begun, one.left()) == (
        other.is_whole,
        other.has_begun,
        other.left(),
    )
    assert one.rest(0, {}) == other.rest(0, {})


def rest_of(given: int, base: int) -> list[Said]:
    """The completion behind the tokens given, of another engine."""
    prompt = [*PROMPT, *range(base)]
    events = []
    for number in range(given, len(WORDS)):
        content = json.loads(said(number, of="cmpl-2")[1])
        content["choices"][0]["prompt_token_ids"] = prompt if number == given else None
        events.append(("", json.dumps(content, separators=(",", ":"))))
    return [*events, DONE]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_another_engine_continues_after_any_byte(data: st.DataObject) -> None:
    """The client reads one stream with one id, whatever form either engine writes."""
    stream = data.draw(written(WHOLE))
    broken = stream[: data.draw(st.integers(0, len(stream)))]
    watcher = Stream(RequestPlan(COMPLETION, BODY))
    shown = fed(watcher, data.draw(pieces(broken)) if broken else [])
    if not watcher.is_whole:
        given = len(watcher.tokens()) if watcher.has_begun else 0
        if watcher.has_begun:
            watcher.goes_on(0)
        else:
            watcher.begins_anew()
        other = data.draw(written(rest_of(given, given)))
        shown += fed(watcher, data.draw(pieces(other)))
    shown += watcher.left()
    assert BOM not in shown[3:]
    *events, last = contents(shown)
    assert last == DONE
    assert "".join(content["choices"][0]["text"] for _, content in events) == "".join(WORDS)
    assert {content["id"] for _, content in events} == {events[0][1]["id"]}


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_another_engine_repeats_after_any_byte(data: st.DataObject) -> None:
    stream = data.draw(written(WHOLE))
    watcher = Replay(COMPLETION)
    broken = stream[: data.draw(st.integers(0, len(stream)))]
    shown = fed(watcher, data.draw(pieces(broken)) if broken else [])
    if not watcher.is_whole:
        watcher.begins_anew()
        anew = [*(said(n, of="cmpl-2") for n in range(len(WORDS))), DONE]
        shown += fed(watcher, data.draw(pieces(data.draw(written(anew)))))
    assert watcher.failure is None
    *events, last = contents(shown)
    assert last == DONE
    texts = [content["choices"][0]["text"] for _, content in events if content["choices"]]
    assert "".join(texts) == "".join(WORDS)
    assert len({content["id"] for _, content in events}) == 1


def test_a_comment_does_not_wait_for_an_event() -> None:
    watcher = Plain(ENDS[COMPLETION])
    assert watcher.feed(b": keep-alive\n") == b": keep-alive\n"
    assert watcher.feed(b"\ndata: {") == b"\n"
    assert watcher.feed(b"}\n\n: a\r\n\r\n") == b"data: {}\n\n: a\r\n\r\n"


TOKEN, LAST = usual([said(0)]), usual([said(len(WORDS) - 1)])


@pytest.mark.parametrize(
    ("end", "is_whole"),
    [
        (LAST + b"data: [DONE]\n\n", True),
        (LAST + b"data: [DONE]\n", True),
        (LAST + b"data:[DONE]", True),
        (LAST, True),
        (LAST[:-1], True),
        (LAST[:-2], True),
        (LAST[:-3], False),
        (TOKEN, False),
        (b"", False),
    ],
)
def test_a_stream_that_ends_without_its_last_bytes(end: bytes, is_whole: bool) -> None:
    """It is whole if its content is."""
    watcher = Plain(ENDS[COMPLETION], b'"finish_reason":"')
    passed = watcher.feed(TOKEN + end)
    assert not watcher.is_whole or b"[DONE]\n\n" in end
    passed += watcher.finish()
    assert watcher.is_whole == is_whole
    assert read(passed + b"\n\n") == read(
        TOKEN + (end if is_whole or end == TOKEN else b"") + b"\n\n"
    )
    stream = Stream(RequestPlan(COMPLETION, BODY))
    passed = stream.feed(TOKEN + end) + stream.finish()
    assert stream.is_whole == is_whole
    if is_whole:
        assert contents(passed + stream.left() + b"\n\n")[-1] == DONE


def test_a_named_event_without_a_blank_line_ends_a_stream() -> None:
    watcher = Plain(ENDS[MESSAGES])
    last = b'event:message_stop\r\ndata:{"type":"message_stop"}'
    assert watcher.feed(last) + watcher.finish() == last
    assert watcher.is_whole


def test_a_failure_in_another_form() -> None:
    for failure in (b'data:{"error":{"code":500}}\r\n\r\n', b'event:error\rdata:{"code":5}\r\r'):
        watcher = Stream(RequestPlan(COMPLETION, BODY))
        assert b"error" not in watcher.feed(TOKEN + failure)
        assert watcher.failure is not None


def test_an_endless_line() -> None:
    watcher = Plain(ENDS[COMPLETION])
    for _ in range(17):
        watcher.feed(b":" * (1 << 20))
    assert watcher.failure is not None
