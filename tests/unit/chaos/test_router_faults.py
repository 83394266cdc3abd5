"""The router in front of engines that fail in every way there is: the short form of
`disagg bench router-faults`. And what judges the answers: it must find what is wrong."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

import pytest
import uvloop

from disagg.chaos import router_faults
from disagg.chaos.answer_check import CUT, EVENT, RIGHT, UNKNOWN, WRONG, Received, judge
from disagg.chaos.expected_answers import (
    CHAT,
    NO_MODEL,
    answer,
    detokenized,
    events,
    generated,
)
from disagg.chaos.faulty_engine import DECODE, MID_STREAM, PREFILL
from disagg.chaos.router_scene import CLIENTS, Scene
from disagg.chaos.stream_forms import FORMS

COMPLETION = "/v1/completions"
REQUESTS = len(PREFILL) * len(DECODE) + 20
ERROR = {"error": {"message": "m", "type": "t", "param": None, "code": 502}}


@pytest.mark.timeout(120)
def test_every_combination_of_faults() -> None:
    report = uvloop.run(router_faults.storm(REQUESTS, clients=32, seed=5))
    assert report.problems == []
    assert len(report.outcomes) == len(PREFILL) * len(DECODE)
    total = report.total()
    assert total.total() == REQUESTS
    assert not total[WRONG]
    assert report.odd_streams > REQUESTS // 10
    assert report.offers > REQUESTS // 20
    assert report.moves > 2
    assert all(report.by_client[client] for client in CLIENTS)
    # Faults there were, and not one outcome for all.
    assert all(
        total[one] for one in (RIGHT, EVENT, CUT, UNKNOWN, "continued", "error 503", "error 504")
    )


@pytest.mark.timeout(120)
def test_streams_that_begin_with_a_token_of_prefills() -> None:
    report = uvloop.run(router_faults.storm(600, clients=32, seed=6, first_token="prefill"))
    assert report.problems == []
    assert report.begun_at_prefill > 100
    total = report.total()
    assert not total[WRONG]
    assert all(total[one] for one in (RIGHT, EVENT, "continued"))


def test_an_unknown_model_is_404_with_the_list() -> None:
    def verdict_on(status: int, message: str) -> str:
        error = {"message": message, "type": "NotFoundError", "param": "model", "code": status}
        got = Received(status, "application/json", json.dumps({"error": error}).encode(), False)
        return judge(COMPLETION, {**asked(COMPLETION, stream=False), "model": NO_MODEL}, got)

    assert verdict_on(404, "there are: m, other") == UNKNOWN
    for status, message in ((404, "there are: m"), (503, "there are: m, other")):
        assert verdict_on(status, message).startswith(WRONG)
    text = b"".join(stream())
    got = Received(200, "text/event-stream", text, False)
    assert judge(COMPLETION, {**asked(COMPLETION, stream=True), "model": NO_MODEL}, got) != RIGHT


@pytest.mark.parametrize("form", FORMS)
def test_the_judge_reads_every_form(form: str) -> None:
    body = {"prompt": [4, 5], "max_tokens": 3, "stream": True}
    stream = b"".join(map(FORMS[form], events(COMPLETION, body)))
    got = Received(200, "text/event-stream", stream, False)
    assert judge(COMPLETION, body, got) == RIGHT
    for end in range(1, len(stream) - 1, 7):  # a part of it is wrong, or a silent cut
        cut = Received(200, "text/event-stream", stream[:end], False)
        assert judge(COMPLETION, body, cut).startswith(WRONG)


async def streams_whose_engine_dies(count: int) -> set[str]:
    async with AsyncExitStack() as stack:
        scene = await Scene.open(stack)
        body = {"model": "m", "max_tokens": 14, "stream": True}
        bodies = [{**body, "prompt": [number, *range(20)]} for number in range(count)]
        cases = [
            router_faults.FaultCase(number, "right", "die/once", COMPLETION, body)
            for number, body in enumerate(bodies)
        ]
        return {await router_faults.ask(scene, case) for case in cases}


def test_what_detokenize_says_otherwise_is_no_obstacle() -> None:
    """Special tokens, for which answers have no text, and the space before the first word."""
    assert "<end>" in detokenized(generated({"prompt": [1, *range(20)], "max_tokens": 7}))
    assert uvloop.run(streams_whose_engine_dies(12)) == {RIGHT}


def test_whole_runs_have_every_combination_equally_often() -> None:
    plan = router_faults.cases(3 * len(PREFILL) * len(DECODE), seed=1)
    counts = [sum(case.kinds == (one, "die") for case in plan) for one in PREFILL]
    assert counts == [3] * len(PREFILL)
    assert {case.refusing for case in plan} >= {(0, 0), (0, 2), (0, 3), (2, 0), (3, 0)}
    assert set(DECODE) > MID_STREAM


# ---- the judge -----------------------------------------------------------------------------


def asked(path: str, *, stream: bool) -> dict[str, object]:
    body: dict[str, object] = {"model": "m", "max_tokens": 5, "stream": stream}
    return body | ({"messages": [{"content": "7 8"}]} if path == CHAT else {"prompt": [7, 8]})


def verdict(body: bytes, *, path: str = COMPLETION, broken: bool = False, status: int = 200) -> str:
    is_stream = body.startswith(b"data") or (status == 200 and not body)
    kind = "text/event-stream" if is_stream else "application/json"
    got = Received(status, kind, body, broken)
    return judge(path, asked(path, stream=is_stream), got).partition(":")[0]


def stream(path: str = COMPLETION) -> list[bytes]:
    return list(events(path, asked(path, stream=True)))


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_what_is_right(path: str) -> None:
    assert verdict(b"".join(stream(path)), path=path) == RIGHT
    assert verdict(answer(path, asked(path, stream=False)), path=path) == RIGHT


def test_what_is_a_proper_error() -> None:
    text = json.dumps(ERROR).encode()
    assert verdict(text, status=502) == "error 502"
    event, before = b"data: " + text + b"\n\n", b"".join(stream()[:2])
    assert verdict(before + event) == EVENT
    assert verdict(before + event + b"data: [DONE]\n\n") == EVENT
    assert verdict(b'{"id": ', broken=True) == CUT


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_what_is_wrong(path: str) -> None:
    right, error = stream(path), b"data: " + json.dumps(ERROR).encode() + b"\n\n"
    wrong = {
        "nothing": b"",
        "no end": b"".join(right[:-1]),
        "a token twice": b"".join([*right[:2], right[1], *right[2:]]),
        "a token too few": b"".join([*right[:1], *right[2:]]),
        "two ends": b"".join([*right, right[-1]]),
        "two errors": right[0] + error + error,
        "tokens behind an error": right[0] + error + b"".join(right[1:]),
        "an error behind the end": b"".join(right) + error,
        "wrong tokens before an error": right[2] + error if path == COMPLETION else b"data: x\n\n",
        "half an event": b"".join(right)[:-5],
    }
    found = {name: verdict(body, path=path) for name, body in wrong.items()}
    assert found == dict.fromkeys(wrong, WRONG)
    assert verdict(b"".join(right[:3]), path=path, broken=True) == WRONG, "cut without a word"


def test_what_is_no_proper_error() -> None:
    text = json.dumps(ERROR).encode()
    assert verdict(text, status=400) == WRONG, "the client made no mistake"
    assert verdict(text, status=502, broken=True) == WRONG
    assert verdict(b"oops", status=502) == WRONG
    assert verdict(b'{"error": "m"}', status=502) == WRONG
    assert verdict(text.replace(b'"m"', b'"http://127.0.0.1:1"'), status=502) == WRONG
    half = answer(COMPLETION, asked(COMPLETION, stream=False))[:-9]
    assert verdict(half) == WRONG, "not seen to be cut"
