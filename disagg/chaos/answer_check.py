"""Judges one answer of the router in `disagg bench router-faults`.

Right: all tokens once, in order, with their end. Otherwise it must be one well-formed error. An
answer that is not streamed may also be a connection that visibly broke. Everything else is wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from disagg.chaos.expected_answers import CHAT, MODELS, NO_MODEL, generated, text_of
from disagg.chaos.stream_forms import data_of

RIGHT, EVENT, CUT, WRONG = "right", "error event", "cut", "WRONG"
UNKNOWN = "unknown model"


@dataclass(frozen=True)
class Received:
    """An answer. `broken`: the connection ended before the answer did."""

    status: int
    kind: str
    body: bytes
    broken: bool


class _Wrong(Exception):
    """Why an answer is neither right nor a proper error."""


def judge(path: str, asked: dict[str, Any], got: Received) -> str:
    """RIGHT, EVENT, CUT, UNKNOWN, `error 503` etc., or WRONG with the reason after a colon."""
    try:
        if b"127.0.0.1" in got.body or b"Traceback" in got.body:
            raise _Wrong("names an address, or shows a stack trace")
        if asked.get("model") == NO_MODEL:
            return _unknown(got)
        if got.status != 200:
            return _refusal(got)
        return _stream(path, asked, got) if asked["stream"] else _whole(path, asked, got)
    except (_Wrong, LookupError, TypeError, AttributeError) as error:
        return f"{WRONG}: {error!r}; {got.status} {got.kind} {got.body[-300:]!r}"


def _unknown(got: Received) -> str:
    if got.status != 404 or got.broken:
        raise _Wrong("an unknown model is 404")
    if any(f" {model}" not in _json(got.body)["error"]["message"] for model in MODELS):
        raise _Wrong("it does not say which models there are")
    _check_error(_json(got.body))
    return UNKNOWN


def _refusal(got: Received) -> str:
    # The request is valid: a 4xx other than 429 would blame the client.
    if got.status < 500 and got.status != 429:
        raise _Wrong("blames the client")
    if got.broken or not got.kind.startswith("application/json"):
        raise _Wrong("an error that is no JSON")
    _check_error(_json(got.body))
    return f"error {got.status}"


def _whole(path: str, asked: dict[str, Any], got: Received) -> str:
    if got.broken:
        return CUT
    answer = _json(got.body)
    tokens = generated(asked)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    if text != text_of(tokens) or choice["finish_reason"] != "length":
        raise _Wrong("another text")
    _check_usage(answer["usage"], tokens)
    return RIGHT


def _stream(path: str, asked: dict[str, Any], got: Received) -> str:
    if got.broken:
        raise _Wrong("cut without a word")
    data = data_of(got.body)
    if data is None:
        raise _Wrong("broken events")
    if b'"token_ids":[' in got.body or b'"prompt_token_ids":[' in got.body:
        raise _Wrong("token ids that nobody asked for")
    is_done = bool(data) and data[-1] == b"[DONE]"
    contents = [_json(one) for one in (data[:-1] if is_done else data)]
    tokens = generated(asked)
    failed = [content for content in contents if "error" in content]
    text, ends = "", []
    for content in contents:
        for choice in content.get("choices", ()):
            text += (choice["delta"].get("content") or "") if path == CHAT else choice["text"]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    if failed:
        if len(failed) > 1 or failed[0] is not contents[-1]:
            raise _Wrong("goes on after an error")
        _check_error(failed[0])
        if not (text_of(tokens) + " ").startswith(text + " ") and text:
            raise _Wrong("wrong tokens before an error")
        return EVENT
    if not is_done:
        raise _Wrong("a silent cut")
    if text != text_of(tokens) or ends != ["length"]:
        raise _Wrong(f"other tokens, or another end {ends}")
    usages = [content["usage"] for content in contents if content.get("usage")]
    if len(usages) != int("stream_options" in asked):
        raise _Wrong(f"{len(usages)} usages")
    for usage in usages:
        _check_usage(usage, tokens)
    return RIGHT


def _json(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _Wrong("no JSON") from error
    if not isinstance(content, dict):
        raise _Wrong("no JSON object")
    return content


def _check_error(content: dict[str, Any]) -> None:
    error = content.get("error")
    if not isinstance(error, dict) or not (
        isinstance(error.get("message"), str)
        and error["message"]
        and isinstance(error.get("type"), str)
        and isinstance(error.get("code"), int)
    ):
        raise _Wrong("not an error as the OpenAI API has them")


def _check_usage(usage: dict[str, int], tokens: list[int]) -> None:
    if usage["completion_tokens"] != len(tokens):
        raise _Wrong(f"usage of {usage['completion_tokens']} tokens instead of {len(tokens)}")
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        raise _Wrong("usage does not add up")
