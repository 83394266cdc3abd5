"""Streams that begin with the prefill engine's first token, before the handoff.

Decode then continues as it does for an engine that died: with a completion of the prompt's tokens
and this one. The lease has the KV of all of them but the last; `stream_state.Stream` shapes the
events. So only streams that another engine can continue exactly begin this way.

Once the client has a token, no HTTP status can follow. So a request that decode may refuse, and an
answer that is more or less than one token of text, take the usual way. There decode must draw that
same token: both legs get the same seed (`same_draw`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from disagg.router.api.bodies import PARAMS, REMOTE_DECODE_AND_TOKEN
from disagg.router.api.event_parser import END
from disagg.router.pairing.in_flight import Seat
from disagg.router.request.decode_leg import Opened
from disagg.router.request.plan import RequestPlan
from disagg.router.request.stream_state import HALF_A_CHARACTER
from disagg.router.topology import EngineEndpoint

PREFILL_FIELDS = {"return_token_ids": True, PARAMS: REMOTE_DECODE_AND_TOKEN}
"""What the prefill leg of such a stream adds to the request."""


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


def may_begin(plan: RequestPlan, reports: Mapping[str, str]) -> bool:
    """Whether a stream of this request may begin so. `reports`: by the decode engine, of itself."""
    return (
        plan.not_begun_at_prefill is None
        and (not plan.is_chat or reports.get("chats") == "plain")
        and reports.get("max_model_len", "").isdecimal()
    )


def same_draw(plan: RequestPlan) -> dict[str, Any]:
    """What both legs add so that both engines draw the same first token."""
    return {} if plan.is_greedy else {"seed": random.getrandbits(31)}


def begin(plan: RequestPlan, reports: Mapping[str, str], answer: bytes) -> bytes | None:
    """The first event (of a chat, two), with the prompt's tokens and its own, as an engine would
    have sent it; None if the stream should begin at decode. `answer`: the prefill engine's."""
    try:
        given = _ANSWERS.decode(answer)
        (choice,) = given.choices
    except (msgspec.MsgspecError, ValueError):
        return None
    text = _text(choice.message) if plan.is_chat else choice.text
    prompt = given.prompt_token_ids if plan.is_chat else choice.prompt_token_ids
    is_token = choice.finish_reason == "length" and len(choice.token_ids) == 1
    if not (is_token and text and prompt) or HALF_A_CHARACTER in text:
        return None
    # Decode accepts the rest if the client asks for more than this token, and as many fit.
    room = int(reports["max_model_len"]) - len(prompt)
    limit = plan.max_tokens(reports, len(prompt))
    if limit is None or not (2 <= limit <= room and 0 <= plan.min_tokens <= limit):
        return None
    names = {"id": given.id, "created": given.created, "model": given.model}
    if plan.is_chat:
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
