"""Streams that begin with the prefill engine's first token, before the handoff.

Decode then goes on as it does for an engine that died: with a completion of the prompt's tokens and
this one, whose KV but for its last token is the lease's (`migration.Stream` shapes its events). So
this is for the streams alone that another engine can continue exactly. Once the client has a token
no status can follow, so whatever decode might refuse is found out before: a request that it may
refuse, and an answer that is more or less than one token of text, take the usual way. There decode
must draw that same token: drawn anew, what no stream begins with would have to come twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from disagg.router.api.bodies import PARAMS, REMOTE_DECODE_AND_TOKEN
from disagg.router.api.event_stream import END
from disagg.router.api.paths import CHAT
from disagg.router.pairing.in_flight import Seat
from disagg.router.request.decode_leg import Opened
from disagg.router.request.resumable import limit_of
from disagg.router.request.stream_state import HALF_A_CHARACTER
from disagg.router.topology import EngineEndpoint

ASKED = {"return_token_ids": True, PARAMS: REMOTE_DECODE_AND_TOKEN}
"""What such a stream's prefill leg says beside the request."""
_STREAM_OPTIONS = {"include_usage", "continuous_usage_stats"}


@dataclass
class Begun:
    """As `Opened`, of a stream whose answer has its first event alone, until `go_on`.

    `give_back`: of what decode would need. `hold_s`: how long the first event may wait for what
    follows.
    """

    first: bytes
    seat: Seat
    decode: Callable[[], Awaitable[Opened]]
    give_back: Callable[[], None]
    hold_s: float = 0.0
    _is_over: bool = False

    status = 200
    raw_headers = ((b"content-type", b"text/event-stream; charset=utf-8"),)
    is_events = True

    @property
    def engine(self) -> EngineEndpoint:
        return self.seat.engine

    async def go_on(self, pass_first: Callable[[], Awaitable[None]]) -> Opened:
        """What follows the first event; `pass_first` sends that one. Raises `ApiError`, and what
        `pass_first` raises."""
        if not self.hold_s:
            await pass_first()
            return await self._open()
        opening = asyncio.create_task(self._open())
        try:
            await asyncio.wait([opening], timeout=self.hold_s)
            await pass_first()
            return await opening
        except BaseException:
            opening.cancel()
            opening.add_done_callback(_close)
            raise

    async def _open(self) -> Opened:
        self._is_over = True
        return await self.decode()

    def close(self) -> None:
        """Nobody wants the rest. Of no effect once decode was asked."""
        if not self._is_over:
            self._is_over = True
            self.seat.leave()
            self.give_back()


def _close(opening: asyncio.Future[Opened]) -> None:
    """Of an answer that came when nobody wanted it any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class _Choice(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    text: str | None = None
    message: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


_ANSWERS = msgspec.json.Decoder(_Answer)


def may_begin(path: str, body: Mapping[str, Any], said: Mapping[str, str]) -> bool:
    """Whether a stream of this request may begin so. `said`: by the decode engine, of itself."""
    options = body.get("stream_options") or {}
    return (
        (path != CHAT or said.get("chats") == "plain")
        and body.get("add_generation_prompt", True) is True  # else it is not the assistant's
        and isinstance(options, dict)
        and options.keys() <= _STREAM_OPTIONS
        and all(isinstance(value, bool) for value in options.values())
        and not options.get("continuous_usage_stats")
        and said.get("max_model_len", "").isdecimal()
    )


def drawn_alike(body: Mapping[str, Any]) -> dict[str, Any]:
    """What makes both engines draw the same first token: to be added to either's body."""
    return {} if body.get("temperature") == 0 else {"seed": random.getrandbits(31)}


def begin(
    path: str, body: Mapping[str, Any], said: Mapping[str, str], answer: bytes
) -> bytes | None:
    """The first event (of a chat, two), with the prompt's tokens and its own, as an engine would
    have sent it; None if decode had better begin. `answer`: the prefill engine's."""
    try:
        given = _ANSWERS.decode(answer)
        (choice,) = given.choices
    except (msgspec.MsgspecError, ValueError):
        return None
    is_chat = path == CHAT
    text = _text(choice.message) if is_chat else choice.text
    prompt = given.prompt_token_ids if is_chat else choice.prompt_token_ids
    is_token = choice.finish_reason == "length" and len(choice.token_ids) == 1
    if not (is_token and text and prompt) or HALF_A_CHARACTER in text:
        return None
    # Decode takes what the client asks for, if it is more than this token, and so many fit.
    room = int(said["max_model_len"]) - len(prompt)
    limit = limit_of(body, said, len(prompt), is_chat=is_chat)
    if limit is None or not (2 <= limit <= room and 0 <= body.get("min_tokens", 0) <= limit):
        return None
    names = {"id": given.id, "created": given.created, "model": given.model}
    if is_chat:
        names["object"] = "chat.completion.chunk"
        role = {"delta": {"role": "assistant", "content": ""}, **_LATER}
        said_first = {"delta": {"content": text}, **_LATER, "token_ids": choice.token_ids}
        return _event({**names, "choices": [role], "prompt_token_ids": prompt}) + _event(
            {**names, "choices": [said_first]}
        )
    names["object"] = "text_completion"
    ids = {"prompt_token_ids": prompt, "token_ids": choice.token_ids}
    return _event({**names, "choices": [{"text": text, **_LATER, "stop_reason": None, **ids}]})


_LATER = {"index": 0, "logprobs": None, "finish_reason": None}


def _text(message: Mapping[str, Any] | None) -> str | None:
    """Of a message that is nothing but text."""
    if message is None or any(message.get(key) for key in ("reasoning", "tool_calls", "refusal")):
        return None
    content = message.get("content")
    return content if isinstance(content, str) else None


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + END
