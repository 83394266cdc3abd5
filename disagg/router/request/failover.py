"""Another engine continues a stream whose engine died.

The rest is a request like any other, with a prefill leg if that pays. It is the completion behind
the tokens sent (`stream_state.py`), if the text sent is exactly that of these tokens. Or it is the
whole request again (`replay.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import aiohttp
import msgspec
from starlette.responses import Response

from disagg.config import RouterSection
from disagg.router.api import bodies
from disagg.router.api.bodies import NOTHING_MORE
from disagg.router.api.errors import ApiError
from disagg.router.engines.compatibility import Compatibility
from disagg.router.pairing.admission import Admission
from disagg.router.request.decode_leg import Opened
from disagg.router.request.legs import Legs
from disagg.router.request.plan import RequestPlan
from disagg.router.request.replay import Replay
from disagg.router.request.stream_state import HALF_A_CHARACTER, Stream
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import client as upstream

logger = logging.getLogger(__name__)

Movable: TypeAlias = Stream | Replay
GoesOn: TypeAlias = Callable[[Movable, Opened], Awaitable[Opened | None]]
"""Opens the rest of an answer that broke off; None if no engine can continue it."""

_DETOKENIZE_S = 10.0
# How many tokens may be without text yet: those of a character in the making.
_MOST_BACK = 8


async def untold(
    stream: Stream, left_out: set[int], text_of: Callable[[list[int]], Awaitable[str]]
) -> int | None:
    """How many of the last tokens have no text yet; None if the text is not the tokens'."""
    begun = await _opened_with(stream, left_out, text_of)
    if begun is None:
        return None
    tokens = stream.tokens()[begun:]
    before = stream.before(begun)
    for back in range(min(_MOST_BACK, len(tokens)) + 1):
        told = [token for token in tokens[: len(tokens) - back] if token not in left_out]
        text = await text_of([*before, *told]) if told else ""
        if stream.is_text_of(text, behind_opening=begun > 0):
            return back
    return None


async def _opened_with(
    stream: Stream, left_out: set[int], text_of: Callable[[list[int]], Awaitable[str]]
) -> int | None:
    """How many tokens an opening text accounts for that begins with the prompt, as vLLM 0.32 has
    it where the prompt ends in half a character; 0 if there is none, None if it is not theirs."""
    opening = stream.opening
    if opening is None or not (await text_of(stream.before())).endswith(HALF_A_CHARACTER):
        return 0
    begun, text = opening
    own = await text_of([token for token in stream.tokens()[:begun] if token not in left_out])
    return begun if text.endswith(own.lstrip(HALF_A_CHARACTER)) else None


class Failover:
    """Opens the rest of streams."""

    def __init__(
        self,
        legs: Legs,
        client: aiohttp.ClientSession,
        admission: Admission,
        compatibility: Compatibility,
        metrics: RouterMetrics,
        settings: RouterSection,
    ) -> None:
        self._legs, self._client = legs, client
        self._admission, self._compatibility = admission, compatibility
        self._metrics, self._limit = metrics, settings.migration_limit

    def of(
        self, plan: RequestPlan, header: bytes, record: Record, more: Mapping[str, Any]
    ) -> GoesOn:
        """For this request's answer. `more`: fields that its decode leg added."""

        async def go_on(stream: Movable, broken: Opened) -> Opened | None:
            if stream.migrations >= self._limit:
                return None
            opened = None
            try:
                opened = await self._open(stream, broken.engine, plan, header, record, more)
            except ApiError as error:
                logger.warning("request %s cannot be continued: %s", record.id, error)
            done = "anew" if stream.asks_anew else "continued"
            self._metrics.migrations.labels("failed" if opened is None else done).inc()
            record.migrations += opened is not None
            return opened

        return go_on

    async def _open(
        self,
        stream: Movable,
        dead: EngineEndpoint,
        plan: RequestPlan,
        header: bytes,
        record: Record,
        more: Mapping[str, Any],
    ) -> Opened:
        seat = await self._admission.seat("decode", plan, [dead], is_admitted=True)
        if seat is None:
            raise ApiError(503, "there is no other decode engine")
        begins: Callable[[], None] = stream.begins_anew
        try:
            if isinstance(stream, Stream) and not stream.asks_anew:
                back = await self._unsent(stream, seat.engine, plan)
                body = stream.rest(back, self._compatibility.said(seat.engine))
                if body is None:
                    raise ApiError(502, "no other engine can give the rest of this answer")
                plan, more = plan.rest(body), NOTHING_MORE
                begins = partial(stream.goes_on, back)
        except BaseException:
            seat.leave()
            raise
        opened = await self._legs.open(plan, seat, header, record, more)
        if isinstance(opened, Response):
            raise ApiError(502, f"prefill answered {opened.status_code}")
        if opened.answer.status != 200 or not opened.is_events:
            opened.close()
            raise ApiError(502, f"{opened.engine.name} answered {opened.answer.status}")
        begins()
        return opened

    async def _unsent(self, stream: Stream, engine: EngineEndpoint, plan: RequestPlan) -> int:
        """How many of the last tokens have no text yet. Raises `ApiError` if the text is not the
        tokens'."""

        async def text_of(tokens: list[int]) -> str:
            return await self._text(tokens, engine, plan)

        back = await untold(stream, set(), text_of)
        if back is not None:
            return back
        # Answers leave special tokens out, /detokenize does not.
        special = {
            token for token in stream.silent() if HALF_A_CHARACTER not in await text_of([token])
        }
        back = await untold(stream, special, text_of) if special else None
        if back is None:
            raise ApiError(502, "the text sent is not that of its tokens")
        return back

    async def _text(self, tokens: list[int], engine: EngineEndpoint, plan: RequestPlan) -> str:
        data = bodies.encoded(bodies.detokenize_body(plan.model, tokens))
        call = upstream.post(self._client, engine, "/detokenize", data)
        answer = await upstream.head(call, _DETOKENIZE_S, "decode")
        try:
            async with asyncio.timeout(_DETOKENIZE_S):
                content: Any = msgspec.json.decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise ApiError(502, "the decode engine does not detokenize") from error
        finally:
            answer.close()
        text = content.get("prompt") if isinstance(content, dict) else None
        if not isinstance(text, str):
            raise ApiError(502, "the decode engine does not detokenize")
        return text
