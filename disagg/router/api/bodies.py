"""Reads the client's body and writes the bodies of the legs. Pure functions.

The prefill leg asks for one token and a lease (NIXL's pull contract). The decode leg is the
client's own request with the params that prefill answered. Transfer params in a client's body are
dropped first: the router never believes them. What the body asks for is read in
`request/plan.py` alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from disagg.router.api.errors import ApiError
from disagg.router.api.paths import CHAT, COMPLETION, MESSAGES, RESPONSES

# Everything that shapes the answer but not the prompt's KV.
_NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
    "include",
    "store",
    "background",
    "max_tool_calls",
)
# What a leg that continues a stream keeps of the client's body.
CONTINUED = frozenset(
    [
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "ignore_eos",
        "stop_token_ids",
        "logit_bias",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "user",
        "priority",
        "stream_options",
        "cache_salt",
        "seed",
    ]
)
# What asks vLLM 0.32 for a lease.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# The same, and the leg's own token counts: else models with recurrent state stop before it.
REMOTE_DECODE_AND_TOKEN = {**REMOTE_DECODE, "first_token": True}
PARAMS = "kv_transfer_params"
TICKET = "disagg"
"""The key of them by which engines find a lease."""
STREAM, INVITATION = "disagg_stream", "disagg_invitation"
"""Keys of them, as docs/streaming.md has them."""
_KEY = PARAMS.encode()
_ESCAPED = b"\\u00"
_HALF_AT_END = re.compile(rb'\\u[dD][89abAB][0-9a-fA-F]{2}[^"]{0,3}"')
_LONE_SURROGATE = (
    r"the body has a lone surrogate in a string, such as \ud83d without the other half of its "
    "pair; it is no character, so send both halves, or the character itself"
)
# Bodies up to this size are parsed in a few milliseconds, whatever they contain.
UNCOUNTED = 64 << 10
_COUNTED_AT_ONCE = 1 << 20
_PER_OBJECT = 10  # a string, array or object takes as long as about ten numbers
# Where vLLM 0.32 reads the params from; the last is of /inference/v1/generate.
_DOORS: Sequence[Sequence[str]] = (
    (),
    ("vllm_xargs",),
    ("extra_body",),
    ("sampling_params", "extra_args"),
)
# What `/tokenize` of vLLM 0.32 knows of a request, and what changes a prompt unknown to it.
_TOKENIZED: Mapping[str, Sequence[str]] = {
    COMPLETION: ("model", "prompt", "add_special_tokens"),
    CHAT: (
        "model",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
    ),
}
_NOT_TOKENIZED = (
    "truncate_prompt_tokens",
    "prompt_embeds",
    "documents",
    "functions",
    "reasoning_effort",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
NOTHING_MORE: Mapping[str, Any] = MappingProxyType({})
_OUTER = frozenset([PARAMS, *(path[0] for path in _DOORS if path)])


class _Prefilled(msgspec.Struct):
    """What is looked at of a prefill's answer."""

    kv_transfer_params: Any = None
    usage: Any = None


class PrefillAnswer(NamedTuple):
    """What a prefill's answer says. `params`: None if there is nothing to fetch. `prompt_tokens`:
    None if it does not say. `cached_tokens`: of the prompt, that the engine's caches had."""

    params: dict[str, Any] | None
    prompt_tokens: int | None
    cached_tokens: int | None = None


_ANSWERS = msgspec.json.Decoder(_Prefilled)
# The Messages API counts tokens of the cache apart.
_PROMPT_USAGE = (
    ("prompt_tokens",),
    ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
)
_BODIES = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object that a client sent; anything else is an `ApiError` 400.

    A body of more than `UNCOUNTED` bytes must have passed `check_elements`.
    """
    try:
        body = _BODIES.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        if _is_lone_surrogate(error, data):
            raise ApiError(400, _LONE_SURROGATE) from error
        raise ApiError(400, f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep() from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _is_lone_surrogate(error: Exception, data: bytes) -> bool:
    # Near the end of the body, msgspec misses the other half and says that the body is cut off.
    return "utf-16 surrogate" in str(error) or (
        "truncated" in str(error) and _HALF_AT_END.search(data[-12:]) is not None
    )


async def check_elements(data: bytes, most: int) -> None:
    """`ApiError` 413 if this JSON has more than `most` values, or a tenth as many strings, arrays
    and objects: parsing it would stop all other requests for too long. Never stops them itself."""
    if len(data) <= UNCOUNTED or _is_within(data, data.count(b'"'), most):
        return
    # Commas and brackets in strings do not count. Rare: most texts have few of them.
    commas = objects = quotes = start = 0
    while start < len(data):
        piece = data[start : start + _COUNTED_AT_ONCE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it ends within an escape
            piece = piece[:-1] or data[start:]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        plain = b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        commas += plain.count(b",")
        objects += plain.count(b"[") + plain.count(b"{")
        if commas > most or (objects + quotes // 2) * _PER_OBJECT > most:
            raise ApiError(
                413,
                f"the body has more than {most} values, or {most // _PER_OBJECT} strings, arrays "
                "and objects (router.limits.max_json_elements)",
            )
        await asyncio.sleep(0)


def _is_within(data: bytes, quotes: int, most: int) -> bool:
    """Whether the JSON is within the limits even if no comma or bracket is in a string."""
    objects = data.count(b"[") + data.count(b"{") + quotes // 2
    return objects * _PER_OBJECT <= most and data.count(b",") <= most


def encoded(body: dict[str, Any]) -> bytes:
    """A leg's body as JSON."""
    try:
        return _encode(body)
    except RecursionError as error:
        raise _too_deep() from error


def _too_deep() -> ApiError:
    return ApiError(400, "the body is nested too deeply")


def without_params(body: dict[str, Any]) -> dict[str, Any]:
    """The client's body without transfer params, wherever vLLM would read them.

    The same object if there was nothing to drop.
    """
    if _OUTER.isdisjoint(body):
        return body  # as nearly all
    for path in _DOORS:
        body = _without(body, path)
    return body


def _without(body: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    if not path:
        return {k: v for k, v in body.items() if k != PARAMS} if PARAMS in body else body
    inner = body.get(path[0])
    if not isinstance(inner, dict):
        return body
    clean = _without(inner, path[1:])
    return body if clean is inner else {**body, path[0]: clean}


def passed_through(data: bytes, content_type: str) -> bytes:
    """The body of a request that goes to decode alone: byte for byte, or without params.

    Read as vLLM reads it, with `json.loads`, which takes UTF-16 and UTF-32 as well. What cannot
    be read must not reach an engine as JSON; the one door beside JSON is a form's `vllm_xargs`.
    A body that `may_name_params` must have passed `check_elements`. Raises `ApiError` 400.
    """
    if not may_name_params(data):
        return data
    try:
        body = json.loads(data)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        if "json" in content_type.lower():
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if _KEY in data or (b"vllm_xargs" in data and _ESCAPED in data):
            raise ApiError(400, f"{PARAMS} are not for clients to send") from error
        return data
    clean = without_params(body) if isinstance(body, dict) else body
    if clean is body:
        return data
    try:
        return json.dumps(clean).encode()
    except RecursionError as error:
        raise _too_deep() from error


def may_name_params(data: bytes) -> bool:
    """Whether the body must be read to be sure that it names no params."""
    # A key of ASCII letters can be spelt in JSON as it is, or with \u00.. for some of them;
    # other encodings than UTF-8 have zero bytes, for `{` at least.
    return _KEY in data or _ESCAPED in data or b"\0" in data


def with_priority(body: dict[str, Any], least: int) -> dict[str, Any]:
    """The body with a priority: the client's own, but none before `least`. Lower is earlier."""
    asked = body.get("priority")
    if isinstance(asked, int) and not isinstance(asked, bool):
        least = max(least, asked)
    return {**body, "priority": least}


def prefill_body(
    body: dict[str, Any],
    path: str = COMPLETION,
    *,
    asks_params: bool = True,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The prefill leg's body for one of `paths.PAIRED`. `asks_params`: for a lease, as all but
    ExampleConnector give. `more`: fields to add."""
    leg = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    if asks_params:
        leg[PARAMS] = REMOTE_DECODE
    leg |= {"stream": False, **(more or {})}
    if path == RESPONSES:
        return leg | {"max_output_tokens": 1, "store": False}
    leg["max_tokens"] = 1
    if path == MESSAGES:
        return leg
    leg["n"] = 1
    if "max_completion_tokens" in body:
        leg["max_completion_tokens"] = 1
    return leg


def source_body(body: Mapping[str, Any], ids: list[int]) -> dict[str, Any]:
    """What asks an engine for a lease on these tokens of a prompt, which its cache has."""
    leg = {key: body[key] for key in ("model", "cache_salt", "priority", "user") if key in body}
    return {**leg, "prompt": ids, "max_tokens": 1, "temperature": 0, PARAMS: REMOTE_DECODE}


def fetching(lent: Mapping[str, Any]) -> dict[str, Any]:
    """What a prefill leg adds to its params to fetch another engine's lease first. `lent`: the
    params with which that engine gave it."""
    return {"do_remote_prefill": True, TICKET: lent.get(TICKET)}


def decode_body(
    body: dict[str, Any], params: dict[str, Any] | None, more: Mapping[str, Any] = NOTHING_MORE
) -> dict[str, Any]:
    """The decode leg's body; without params the engine computes the prompt itself. `more`: fields
    to add."""
    if params is not None:
        return {**body, **more, PARAMS: params}
    return {**body, **more} if more else body


def continued_body(
    body: Mapping[str, Any], tokens: list[int], *, max_tokens: int, min_tokens: int
) -> dict[str, Any]:
    """The body of the completion that goes on behind these tokens: the prompt's and those sent."""
    leg: dict[str, Any] = {key: value for key, value in body.items() if key in CONTINUED}
    leg |= {"prompt": tokens, "stream": True, "return_token_ids": True}
    return leg | {"max_tokens": max_tokens, "min_tokens": min_tokens}


def detokenize_body(model: Any, tokens: list[int]) -> dict[str, Any]:
    """What asks an engine's `/detokenize` for the text of these tokens."""
    return {"model": model, "tokens": tokens}


def tokenize_body(body: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """What asks an engine's `/tokenize` for the token ids of this request's prompt; None if that
    would not tell them for certain."""
    text = {COMPLETION: "prompt", CHAT: "messages"}.get(path)
    if text is None or not isinstance(body.get(text), str if path == COMPLETION else list):
        return None
    if any(body.get(field) is not None for field in _NOT_TOKENIZED):
        return None
    if body.get("tools") and body.get("tool_choice", "auto") != "auto":
        return None
    fields = _TOKENIZED[path]
    return {name: body[name] for name in fields if body.get(name) is not None}


def last_of_stream(body: Mapping[str, Any], path: str) -> bytes | None:
    """Bytes that only the last event of a whole stream for this body has, `[DONE]` apart; None if
    only the path's last event tells."""
    prompt, options = body.get("prompt"), body.get("stream_options")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    if path not in (COMPLETION, CHAT) or body.get("n") not in (None, 1) or several:
        return None
    wants_usage = isinstance(options, dict) and options.get("include_usage")
    return b'"choices":[]' if wants_usage else b'"finish_reason":"'


def prefill_answer(answer: bytes) -> PrefillAnswer:
    """What a prefill engine answered."""
    try:
        read = _ANSWERS.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return PrefillAnswer(None, None)
    params = read.kv_transfer_params
    is_lease = isinstance(params, dict) and params.get("do_remote_prefill")
    return PrefillAnswer(
        params if is_lease else None, _prompt_tokens(read.usage), _cached_tokens(read.usage)
    )


def _cached_tokens(usage: Any) -> int | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) and cached >= 0 else None


def _prompt_tokens(usage: Any) -> int | None:
    if not isinstance(usage, dict):
        return None
    for names in _PROMPT_USAGE:
        counts = [usage[name] for name in names if isinstance(usage.get(name), int)]
        if counts:
            return int(sum(counts))
    return None
