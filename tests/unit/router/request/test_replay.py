"""A stream that is asked for anew goes on as if it had not broken off, however it is cut."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from assembled_stream import AssembledStream
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.router.api.paths import CHAT, COMPLETION, MESSAGES, RESPONSES
from disagg.router.request.plan import RequestPlan
from disagg.router.request.replay import Replay
from disagg.router.request.stream_state import watched

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Token:
    """A token, in which part of the answer it is, and its text; of several choices, in which."""

    part: str
    text: str
    id: int = 7
    choice: int = 0


def sse(content: Any, kind: str | None = None) -> bytes:
    data = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return data if kind is None else f"event: {kind}\n".encode() + data


def grouped(tokens: Sequence[Token], cuts: Sequence[bool]) -> list[list[Token]]:
    """Neighbours that come in one event: of one part, and not cut."""
    groups = list[list[Token]]()
    for at, token in enumerate(tokens):
        last = groups[-1][-1] if groups else None
        whole = at < len(cuts) and not cuts[at]
        if last is not None and whole and (last.part, last.choice) == (token.part, token.choice):
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


def said(group: Sequence[Token]) -> str:
    return "".join(token.text for token in group)


def logprobs(group: Sequence[Token], digits: float) -> list[dict[str, Any]]:
    return [{"token": token.text, "logprob": -1 - digits, "bytes": [1]} for token in group]


def completions(tokens: Sequence[Token], cuts: Sequence[bool], name: str) -> list[bytes]:
    names = {"id": f"cmpl-{name}", "object": "text_completion", "created": len(name), "model": "m"}
    events, first = [], {0, 1}
    for group in grouped(tokens, cuts):
        at = group[0].choice
        probs: dict[str, Any] = {"tokens": [one.text for one in group]}
        probs["token_logprobs"] = [-1.0 - len(name) / 99] * len(group)
        probs["text_offset"] = [0] * len(group)
        probs["top_logprobs"] = [{"a": 1.0}] * len(group)
        choice = {"index": at, "text": said(group), "logprobs": probs, "finish_reason": None}
        choice |= {"token_ids": [one.id for one in group]}
        choice["prompt_token_ids"] = [1, 2] if at in first else None
        first.discard(at)
        events.append(sse({**names, "choices": [choice]}))
    for at in sorted({token.choice for token in tokens}):
        choice = {"index": at, "text": "", "logprobs": None, "finish_reason": "stop"}
        events.append(sse({**names, "choices": [{**choice, "stop_reason": "x"}]}))
    return [*events, sse({**names, "choices": [], "usage": {"total_tokens": 9}}), DONE]


def chats(tokens: Sequence[Token], cuts: Sequence[bool], name: str) -> list[bytes]:
    names = {"id": f"chat-{name}", "object": "chat.completion.chunk", "created": len(name)}
    choices = sorted({token.choice for token in tokens})
    begin = {"role": "assistant", "content": ""}
    opening = [{"index": at, "delta": begin, "finish_reason": None} for at in choices]
    events = [sse({**names, "choices": [one], "prompt_token_ids": [1]}) for one in opening]
    called = set[tuple[int, str]]()
    for group in grouped(tokens, cuts):
        part, at = group[0].part, group[0].choice
        if part.startswith("call"):
            number = int(part.removeprefix("call"))
            call: dict[str, Any] = {"index": number, "function": {"arguments": said(group)}}
            if (at, part) not in called:
                called.add((at, part))
                call = {"id": f"call-{name}-{number}", "type": "function", **call}
                call["function"]["name"] = f"tool{number}"
            delta: dict[str, Any] = {"tool_calls": [call]}
        else:
            delta = {part: said(group)}
        choice = {"index": at, "delta": delta, "finish_reason": None}
        choice["logprobs"] = {"content": logprobs(group, len(name) / 99)}
        events.append(sse({**names, "choices": [choice]}))
    for at in choices:
        ended = {"index": at, "delta": {}, "finish_reason": "tool_calls", "stop_reason": None}
        events.append(sse({**names, "choices": [ended]}))
    return [*events, DONE]


def messages(tokens: Sequence[Token], cuts: Sequence[bool], name: str) -> list[bytes]:
    kinds = {"content": "text", "reasoning": "thinking"}
    started = {"type": "message_start", "message": {"id": f"msg-{name}", "content": []}}
    events = [sse(started, "message_start")]
    part, index = None, -1
    for group in grouped(tokens, cuts):
        if group[0].part != part:
            if part is not None:
                ended = {"type": "content_block_stop", "index": index}
                events.append(sse(ended, "content_block_stop"))
            part, index = group[0].part, index + 1
            block = {"type": kinds.get(part, "tool_use")}
            if part not in kinds:
                block |= {"id": f"toolu-{name}", "name": part}
            begun = {"type": "content_block_start", "index": index, "content_block": block}
            events.append(sse(begun, "content_block_start"))
        if part in kinds:
            delta = {"type": f"{kinds[part]}_delta", kinds[part]: said(group)}
        else:
            delta = {"type": "input_json_delta", "partial_json": said(group)}
        more = {"type": "content_block_delta", "index": index, "delta": delta}
        events.append(sse(more, "content_block_delta"))
    last: list[dict[str, Any]] = [{"type": "content_block_stop", "index": index}]
    last += [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"o": 9}}]
    last += [{"type": "message_stop"}]
    return [*events, *(sse(one, one["type"]) for one in last)]


def responses(tokens: Sequence[Token], cuts: Sequence[bool], name: str) -> list[bytes]:
    kinds = {"content": "output_text", "reasoning": "reasoning_text"}
    response = {"id": f"resp-{name}", "created_at": len(name), "output": []}
    contents: list[dict[str, Any]] = [
        {"type": f"response.{what}", "response": response} for what in ("created", "in_progress")
    ]
    part, index, text = None, -1, ""

    def ends() -> None:
        kind = kinds.get(str(part), "function_call_arguments")
        item_id = f"{part}-{name}"
        place = {"output_index": index, "item_id": item_id}
        contents.append({"type": f"response.{kind}.done", "text": text, **place})
        item = {"id": item_id, "type": "message", "text": text}
        contents.append({"type": "response.output_item.done", "output_index": index, "item": item})

    for group in grouped(tokens, cuts):
        if group[0].part != part:
            if part is not None:
                ends()
            part, index, text = group[0].part, index + 1, ""
            item = {"id": f"{part}-{name}", "type": "message"}
            if part not in kinds:
                item = {"id": f"{part}-{name}", "call_id": f"c-{name}", "name": part}
            added = {"type": "response.output_item.added", "output_index": index, "item": item}
            contents.append(added)
        text += said(group)
        kind = kinds.get(part, "function_call_arguments")
        delta = {"type": f"response.{kind}.delta", "delta": said(group), "output_index": index}
        delta |= {"content_index": 0, "item_id": f"{part}-{name}"}
        contents.append({**delta, "logprobs": logprobs(group, len(name) / 99)})
    ends()
    contents.append({"type": "response.completed", "response": {**response, "usage": 9}})
    numbered = ({**one, "sequence_number": at} for at, one in enumerate(contents))
    return [sse(one, one["type"]) for one in numbered]


PARTS = {
    COMPLETION: ["text"],
    CHAT: ["reasoning", "content", "call0", "call1"],
    MESSAGES: ["reasoning", "content", "weather"],
    RESPONSES: ["reasoning", "content", "weather"],
}
Makes = Callable[[Sequence[Token], Sequence[bool], str], list[bytes]]
MAKES: dict[str, Makes] = {
    COMPLETION: completions,
    CHAT: chats,
    MESSAGES: messages,
    RESPONSES: responses,
}


@st.composite
def answers(draw: st.DrawFn, path: str) -> list[Token]:
    """Parts one after the other, in choices by turns where an API has several."""
    texts = st.text('ab"\n\\ü', min_size=1, max_size=3)
    several = path in (CHAT, COMPLETION) and draw(st.booleans())
    queues = [
        [
            Token(part, draw(texts), draw(st.integers(0, 9)), choice)
            for part in PARTS[path]
            for _ in range(draw(st.integers(0, 4)))
        ]
        for choice in range(1 + several)
    ]
    tokens = []
    while any(queues):
        tokens.append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    return tokens or [Token(PARTS[path][0], "a")]


def turned(draw: st.DrawFn, tokens: Sequence[Token]) -> list[Token]:
    """The same choices, by other turns."""
    queues = [[token for token in tokens if token.choice == choice] for choice in (0, 1)]
    other = []
    while any(queues):
        other.append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    return other


def fed(watcher: Replay, data: bytes, size: int) -> bytes:
    passed = b""
    for at in range(0, len(data), size):
        if watcher.failure is None:
            passed += watcher.feed(data[at : at + size])
    return passed


@pytest.mark.parametrize("path", MAKES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_goes_on_as_if_it_had_not_broken_off(path: str, data: st.DataObject) -> None:
    tokens = data.draw(answers(path))
    cuts = st.lists(st.booleans(), max_size=len(tokens))
    undisturbed = b"".join(MAKES[path](tokens, [], "first"))
    first = MAKES[path](tokens, data.draw(cuts), "first")
    watcher = Replay(path)
    size = data.draw(st.integers(1, 400))
    got = b""
    for life in range(data.draw(st.integers(1, 2))):
        events = first if life == 0 else MAKES[path](tokens, data.draw(cuts), f"life {life}")
        broken = b"".join(events)
        got += fed(watcher, broken[: data.draw(st.integers(0, len(broken) - 1))], size)
        assert not watcher.is_whole
        assert watcher.asks_anew
        watcher.begins_anew()
    last = turned(cast("st.DrawFn", data.draw), tokens)
    got += fed(watcher, b"".join(MAKES[path](last, data.draw(cuts), "the last one")), size)
    assert watcher.failure is None
    assert watcher.is_whole
    seen, wanted = AssembledStream.of(got), AssembledStream.of(undisturbed)
    assert (seen.once, seen.fields) == (wanted.once, wanted.fields)
    assert seen.numbers == [*range(len(seen.numbers))]
    assert seen.names.keys() == wanted.names.keys()
    assert {len(each) for each in seen.names.values()} <= {1}


@pytest.mark.parametrize("path", MAKES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_nothing_new_passes_of_another_answer(path: str, data: st.DataObject) -> None:
    tokens = data.draw(answers(path))
    at = data.draw(st.integers(0, len(tokens) - 1))
    choice, others = tokens[at].choice, [*tokens]
    others[at] = replace(tokens[at], text="~" + tokens[at].text[1:])
    each = [True] * len(tokens)
    events, changed = (MAKES[path](these, each, "first") for these in (tokens, others))
    count = data.draw(st.integers(0, len(events) - 1))
    sent = b"".join(events[:count])
    watcher = Replay(path)
    got = fed(watcher, sent, 1000)
    watcher.begins_anew()
    cuts = data.draw(st.lists(st.booleans(), max_size=len(tokens)))
    got += fed(watcher, b"".join(MAKES[path](others, cuts, "other")), 1000)
    seen, had = AssembledStream.of(got), AssembledStream.of(sent)
    assert watcher.is_whole == (watcher.failure is None)
    if (
        had.fields == AssembledStream.of(b"".join(changed[:count])).fields
    ):  # it had not come to this token
        assert watcher.failure is None
        assert seen.fields == AssembledStream.of(b"".join(changed)).fields
        return
    assert watcher.failure is not None
    if path in (CHAT, COMPLETION):
        assert seen.of_choice(choice) == had.of_choice(choice)
    else:
        assert (seen.fields, seen.once) == (had.fields, had.once)


def test_an_answer_that_is_shorter_is_another_one() -> None:
    tokens = [Token("text", "a"), Token("text", "b")]
    watcher = Replay(COMPLETION)
    fed(watcher, b"".join(completions(tokens, [True, True], "first")[:2]), 1000)
    watcher.begins_anew()
    assert b"stop" not in fed(watcher, b"".join(completions(tokens[:1], [], "other")), 1000)
    assert watcher.failure is not None
    assert watcher.failure.status == 502
    assert not watcher.is_whole


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_an_end_before_all_has_come_again_is_another_answer(path: str) -> None:
    """[DONE] alone, as of an engine that gave up without a word."""
    tokens = [Token(PARTS[path][0], "a"), Token(PARTS[path][0], "b")]
    events = MAKES[path](tokens, [True, True], "first")
    had = b"".join(events[: 1 + (path == CHAT) + 1])
    watcher = Replay(path)
    assert watcher.feed(had) == had
    watcher.begins_anew()
    assert watcher.feed(DONE) == b""
    assert watcher.failure is not None
    assert not watcher.is_whole
    # Once all has come, it ends this answer too.
    watcher = Replay(path)
    watcher.feed(had)
    watcher.begins_anew()
    assert watcher.feed(had) == b""
    assert watcher.feed(b"".join(events[len(events) - 1 :])) == DONE
    assert watcher.is_whole


@pytest.mark.parametrize("path", MAKES)
def test_a_long_answer_is_kept_as_its_words(path: str) -> None:
    """Not as its events."""
    tokens = [Token(PARTS[path][-1], f" {at}", at) for at in range(6000)]
    events = MAKES[path](tokens, [True] * 6000, "first")
    watcher = Replay(path)
    tracemalloc.start()
    for event in events[:-4]:
        watcher.feed(event)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < sum(map(len, events)) / 2
    watcher.begins_anew()
    other = b"".join(MAKES[path](tokens, [], "other"))
    got = b"".join(events[:-4]) + fed(watcher, other, 1 << 16)
    assert AssembledStream.of(got).fields == AssembledStream.of(b"".join(events)).fields


@pytest.mark.parametrize(
    ("path", "error", "fails"),
    [
        (CHAT, sse({"error": {"message": "x", "code": 500}}) + DONE, True),
        (CHAT, sse({"error": {"message": "x", "code": 400}}) + DONE, False),
        (MESSAGES, sse({"type": "error", "error": {"type": "internal_error"}}, "error"), True),
        (RESPONSES, sse({"type": "response.failed", "response": {}}, "response.failed"), True),
    ],
)
def test_an_engine_that_says_that_it_failed(path: str, error: bytes, fails: bool) -> None:
    text = Token("content", 'data: {"error"\n\nevent: error\n')
    events = b"".join(MAKES[path]([text], [], "first")[:-2])
    watcher = Replay(path)
    got = watcher.feed(events + error)
    assert got == events + (b"" if fails else error)
    assert (watcher.failure is not None) == fails
    assert watcher.is_whole != fails


ASKED = {"stream": True, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "is_so"),
    [
        (CHAT, ASKED, True),
        (CHAT, {**ASKED, "stream": False}, False),
        (CHAT, {**ASKED, "temperature": 0.0, "tools": [{}]}, True),
        (CHAT, {**ASKED, "temperature": 0.1}, False),
        (CHAT, {**ASKED, "temperature": False}, False),
        (CHAT, {**ASKED, "temperature": "0"}, False),
        (CHAT, {"stream": True}, False),
        (CHAT, {"stream": True, "seed": 0}, True),
        (CHAT, {"stream": True, "seed": None}, False),
        (CHAT, {"stream": True, "seed": True}, False),
        (COMPLETION, {"stream": True, "top_k": 1}, True),
        (COMPLETION, {"stream": True, "top_k": 2}, False),
        (MESSAGES, ASKED, True),
        (MESSAGES, {"stream": True, "seed": 1}, False),
        (RESPONSES, {"stream": True, "seed": 1}, True),
        (RESPONSES, ASKED, True),
        (RESPONSES, {**ASKED, "previous_response_id": "x"}, False),
        (RESPONSES, {**ASKED, "tools": [{"type": "mcp"}]}, False),
        (RESPONSES, {**ASKED, "tools": [{"type": "function"}]}, True),
    ],
)
def test_which_answers_come_again(path: str, body: dict[str, Any], is_so: bool) -> None:
    assert (RequestPlan(path, body).not_replayed is None) == is_so


@pytest.mark.parametrize("shows_ids", [False, True])
@pytest.mark.parametrize("cut", range(2, 9))
def test_a_chat_that_reasons(cut: int, shows_ids: bool) -> None:
    """Tokens do not continue it, so all of it is asked for anew."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    body |= {"stream": True, "max_tokens": 9, "return_token_ids": shows_ids}
    tokens = [Token("reasoning", f"r{at} ") for at in range(4)]
    tokens += [Token("content", f"c{at} ") for at in range(4)]
    stream = watched(RequestPlan(CHAT, body))
    assert stream is not None
    got = stream.feed(b"".join(chats(tokens, [True] * 8, "first")[:cut]))
    assert stream.has_begun
    assert stream.asks_anew
    stream.begins_anew()
    got += stream.feed(b"".join(chats(tokens, [False, False, True], "other")))
    assert stream.is_whole
    seen = AssembledStream.of(got + stream.left())
    wanted = AssembledStream.of(b"".join(chats(tokens, [], "first")))
    assert (seen.once, seen.names) == (wanted.once, wanted.names)
    assert seen.fields == wanted.fields


def test_a_chat_that_reasons_otherwise() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    tokens = [Token("reasoning", "a"), Token("content", "b")]
    stream = watched(RequestPlan(CHAT, {**body, "stream": True}))
    assert stream is not None
    stream.feed(b"".join(chats(tokens, [], "first")[:2]))
    stream.begins_anew()
    other = [replace(tokens[0], text="z"), tokens[1]]
    assert stream.feed(b"".join(chats(other, [], "other"))) == b""
    assert stream.failure is not None
    assert not stream.is_whole
