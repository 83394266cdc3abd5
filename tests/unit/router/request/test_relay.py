"""Engines that write comments and odd line ends, over real HTTP on both sides."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from unit.router.conftest import Loop
from unit.router.event_forms import BOM, contents
from unit.router.scripted import Body, Script, ScriptedEngine, routed

from disagg.chaos.expected_answers import CHAT, events, generated, text_of

PROMPT = [41, 2, 3, 4]
ASKED: dict[str, Body] = {
    "/v1/completions": {"prompt": PROMPT},
    CHAT: {"messages": [{"role": "user", "content": "41 2 3 4"}]},
}
Form = Callable[[bytes], list[bytes]]


def vllm_comments(event: bytes) -> list[bytes]:
    """vLLM's with `--sse-keep-alive-interval`."""
    return [b": keep-alive\n\n", event]


def comment_within(event: bytes) -> list[bytes]:
    return [b":a\n", b": b\n" + event[:9], event[9:-1] + b": c\n\n"]


def crlf(event: bytes) -> list[bytes]:
    """Cut between CR and LF."""
    head, data = event.replace(b"\n", b"\r\n")[:-1], b"\n"
    return [b"id: 1\r", b"\nretry:5\r\n", head, data]


def no_space(event: bytes) -> list[bytes]:
    return [event.replace(b"data: ", b"data:").replace(b"\n", b"\r")]


def two_lines(event: bytes) -> list[bytes]:
    return [re.sub(rb"^(data: \{)", rb"\1\ndata: ", event)]


def with_bom(event: bytes) -> list[bytes]:
    return [BOM + event] if b'"role"' in event or b'"prompt_token_ids":[41' in event else [event]


FORMS: Sequence[Form] = (vllm_comments, comment_within, crlf, no_space, two_lines, with_bom)


def pieces(form: Form, path: str, body: Body, count: int | None = None) -> list[bytes]:
    return [piece for event in list(events(path, body))[:count] for piece in form(event)]


def body_for(path: str, **more: Any) -> Body:
    return {"model": "m", "stream": True, "max_tokens": 8, "temperature": 0, **ASKED[path], **more}


def said(path: str, stream: bytes) -> tuple[str, set[str]]:
    """The text and the ids of a whole stream."""
    *parsed, (_, last) = contents(stream)
    assert last == "[DONE]"
    choices = [choice for _, content in parsed for choice in content["choices"]]
    texts = [(c["delta"].get("content") or "") if path == CHAT else c["text"] for c in choices]
    return "".join(texts), {content["id"] for _, content in parsed}


@pytest.mark.parametrize("form", FORMS)
def test_bytes_pass_untouched(loop: Loop, form: Form) -> None:
    """With one decode engine, nothing is asked of it that the client did not ask for."""
    body = body_for("/v1/completions")
    script = Script([lambda path, asked: pieces(form, path, asked)])
    with routed(loop, [ScriptedEngine("decode", script)]) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body)
    assert answer.content == b"".join(pieces(form, "/v1/completions", body))


@pytest.mark.parametrize("more", [{}, {"stop": ["never"]}], ids=["continued", "replayed"])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("form", FORMS)
def test_failover_after_odd_bytes(loop: Loop, form: Form, path: str, more: Body) -> None:
    """The answer goes on at another engine, in one stream with one id."""
    body = body_for(path, **more)

    def breaks(path: str, asked: Body) -> list[bytes | None]:
        return [*pieces(form, path, asked, 5), None]

    def goes_on(path: str, asked: Body) -> list[bytes]:
        return [one.replace(b"cmpl-1", b"cmpl-2") for one in pieces(form, path, asked)]

    script = Script([breaks, goes_on])
    engines = [ScriptedEngine("decode", script), ScriptedEngine("decode", script)]
    with routed(loop, engines) as url:
        answer = httpx.post(f"{url}{path}", json=body, timeout=20)
    text, ids = said(path, answer.content)
    assert text == text_of(generated(body))
    assert ids == {"cmpl-1"}
    assert b'_ids":[' not in answer.content.replace(b'_ids": [', b'_ids":[')
    assert len(script.asked) == 2


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("end", [b"", b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r"])
def test_a_stream_without_its_end(loop: Loop, end: bytes, engines: int) -> None:
    """No `[DONE]`, or no blank line: the answer is whole, and no error follows it."""
    body = body_for("/v1/completions")

    def ends(path: str, asked: Body) -> list[bytes]:
        return [*list(events(path, asked))[:-1], *([end] if end else [])]

    script = Script([ends])
    with routed(loop, [ScriptedEngine("decode", script) for _ in range(engines)]) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=20)
    shown = answer.content + b"\n\n"
    texts = [c["choices"][0]["text"] for _, c in contents(shown) if c != "[DONE]"]
    assert "".join(texts) == text_of(generated(body))
    assert len(script.asked) == 1
    if engines == 1:
        assert answer.content.endswith(end or b"}\n\n")
