"""Streams that are silent for long get comments; errors behind them are events of the API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from unit.router.conftest import Loop, leave, wait_for
from unit.router.event_forms import contents
from unit.router.request.test_relay import body_for, said
from unit.router.scripted import Body, Script, ScriptedEngine, routed

from disagg.chaos.expected_answers import events, generated, text_of
from disagg.config import LimitsSection

COMMENT = b": keep-alive\n\n"
PATH = "/v1/completions"
BODY = body_for(PATH)
EVERY: dict[str, Any] = {"stream_keep_alive_s": 0.1}


def right(path: str, asked: Body) -> list[bytes]:
    return list(events(path, asked))


def ask(
    loop: Loop, url: str, body: Body, script: Script, comments: int
) -> tuple[httpx.Response, bytes]:
    """The answer to a stream; prefill waits until the client has so many comments."""
    content, headers, gate = b"", {"x-request-id": "r1"}, script.gate
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as answer:
        for chunk in answer.iter_raw():
            content += chunk
            if gate is not None and content.count(COMMENT) >= comments:
                loop.run(_open(gate))
    return answer, content


async def _open(gate: asyncio.Event) -> None:
    gate.set()


def pair(script: Script, decodes: int = 1) -> list[ScriptedEngine]:
    decode = [ScriptedEngine("decode", script) for _ in range(decodes)]
    return [ScriptedEngine("prefill", script), *decode]


@pytest.mark.parametrize("first_token", ["decode", "prefill"])
def test_while_prefill_computes(loop: Loop, first_token: str) -> None:
    script = Script([right], gate=asyncio.Event())
    pairing = {"local_prefill_tokens": 0, "first_token": first_token}
    with routed(loop, pair(script), pairing=pairing, **EVERY) as url:
        answer, content = ask(loop, f"{url}{PATH}", BODY, script, 3)
        figures = httpx.get(f"{url}/metrics").text
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "r1"
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert content.startswith(COMMENT * 3)
    assert said(PATH, content) == (text_of(generated(BODY)), {"cmpl-1"})
    assert "disagg_router_ttft_seconds_count 1.0" in figures


def test_while_decode_computes_and_another_goes_on(loop: Loop) -> None:
    def breaks(path: str, asked: Body) -> list[bytes | float | None]:
        first, second, *_ = right(path, asked)
        return [first, second, 0.5, None]

    def late(path: str, asked: Body) -> list[bytes | float]:
        first, *others = right(path, asked)
        return [first, 0.5, *others]

    with routed(loop, pair(Script([breaks, late]), 2), **EVERY) as url:
        answer = httpx.post(f"{url}{PATH}", json=BODY, timeout=20)
    assert answer.content.startswith(b"data: ")
    assert answer.content.count(COMMENT) >= 2
    assert said(PATH, answer.content) == (text_of(generated(BODY)), {"cmpl-1"})


def refuses(status: int) -> Any:
    def stream(path: str, asked: Body) -> Sequence[int]:
        return [status]

    return stream


@pytest.mark.parametrize("status", [400, 503])
@pytest.mark.parametrize(
    ("path", "begin"),
    [
        (PATH, b'data: {"error"'),
        ("/v1/responses", b'event: error\ndata: {"type": "error", "error"'),
        ("/v1/messages", b'event: error\ndata: {"type": "error", "error"'),
    ],
)
def test_an_error_after_a_comment(loop: Loop, path: str, begin: bytes, status: int) -> None:
    """The status is 200 by then, so that the error is an event in the API's form."""
    body = {"model": "m", "stream": True, "max_tokens": 4}
    body |= {"prompt": [1, 2, 3]} if path == PATH else {"messages": [], "input": "1 2"}
    script = Script([refuses(status)] * 4, gate=asyncio.Event())
    engines = pair(script)
    if path != PATH:  # the scripted prefill engine answers completions only
        engines, script.streams = engines[1:], [late_refusal(status)] * 4
    with routed(loop, engines, **EVERY) as url:
        answer, content = ask(loop, f"{url}{path}", body, script, 1)
    assert answer.status_code == 200
    *comments, event, rest = content.split(b"\n\n")
    assert comments
    assert set(comments) == {COMMENT.strip()}
    assert event.startswith(begin)
    assert rest == b""
    ((_, said_last),) = contents(content)
    assert said_last["error"]["message"] == "told to"


def late_refusal(status: int) -> Any:
    def stream(path: str, asked: Body) -> Sequence[float]:
        return [status, 0.5]

    return stream


def test_a_quick_error_keeps_its_status(loop: Loop) -> None:
    with routed(loop, pair(Script([refuses(400)])), stream_keep_alive_s=15.0) as url:
        answer = httpx.post(f"{url}{PATH}", json=BODY, timeout=20)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "told to")


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_queue(loop: Loop, stream: bool) -> None:
    """A stream gets comments, then the queue's error; any other answer gets its status."""
    limits = LimitsSection(max_in_flight=1, queue_timeout_s=0.6)
    script = Script([right, right], gate=asyncio.Event())
    with routed(loop, pair(script), limits=limits, **EVERY) as url:
        first = threading.Thread(target=lambda: httpx.post(f"{url}{PATH}", json=BODY, timeout=20))
        first.start()
        assert wait_for(lambda: any(path == PATH for path, _ in script.seen))
        answer = httpx.post(f"{url}{PATH}", json={**BODY, "stream": stream}, timeout=20)
        assert script.gate is not None
        loop.run(_open(script.gate))
        first.join()
    if not stream:
        assert answer.status_code == 429
        assert b"keep-alive" not in answer.content
        return
    assert (answer.status_code, answer.content.startswith(COMMENT)) == (200, True)
    ((_, content),) = contents(answer.content)
    assert content["error"]["code"] == 429


def test_a_client_that_leaves_while_it_waits(loop: Loop) -> None:
    script = Script([right], gate=asyncio.Event())
    engines = pair(script)
    with routed(loop, engines, **EVERY) as url:
        leave(url, BODY, lambda: any(path == PATH for path, _ in script.seen))
        in_flight = 'disagg_router_in_flight{role="decode"} 0.0'
        assert wait_for(lambda: in_flight in httpx.get(f"{url}/metrics").text)
        assert script.gate is not None
        loop.run(_open(script.gate))
        assert wait_for(lambda: engines[0].left > 0)


def test_off_by_default(loop: Loop) -> None:
    def late(path: str, asked: Body) -> list[bytes | float]:
        return [0.4, *right(path, asked)]

    with routed(loop, pair(Script([late]))) as url:
        answer = httpx.post(f"{url}{PATH}", json=BODY, timeout=20)
    assert b"keep-alive" not in answer.content
