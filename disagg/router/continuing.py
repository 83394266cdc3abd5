"""Lets another engine go on with a stream whose engine died.

The rest is a request like others: it gets a prefill leg if that pays, and the tokens sent are
part of its prompt. Nothing goes on unless the text sent is exactly that of the tokens sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import aiohttp
import msgspec
from starlette.responses import Response

from disagg.config import RouterSection
from disagg.router import legs, paths, upstream
from disagg.router.admission import Admission
from disagg.router.decode_leg import Opened
from disagg.router.errors import ApiError
from disagg.router.fits import Fits
from disagg.router.metrics import RouterMetrics
from disagg.router.migration import HALF_A_CHARACTER, Stream
from disagg.router.pairing import RequestInfo
from disagg.router.record import Record
from disagg.router.topology import EngineEndpoint
from disagg.router.traffic import Seat

logger = logging.getLogger(__name__)

_DETOKENIZE_S = 10.0
# How many tokens may be without text yet: those of a character in the making.
_MOST_BACK = 8


class Opens(Protocol):
    """Runs both legs; see `Service.open`."""

    async def open(
        self, request: RequestInfo, seat: Seat, header: bytes, record: Record
    ) -> Opened | Response: ...


class Continuing:
    """Opens the rest of streams."""

    def __init__(
        self,
        service: Opens,
        client: aiohttp.ClientSession,
        admission: Admission,
        fits: Fits,
        metrics: RouterMetrics,
        settings: RouterSection,
    ) -> None:
        self._service, self._client = service, client
        self._admission, self._fits = admission, fits
        self._metrics, self._limit = metrics, settings.migration_limit

    def of(
        self, request: RequestInfo, header: bytes, record: Record
    ) -> Callable[[Stream, Opened], Awaitable[Opened | None]]:
        """What opens the rest of this request's answer, or answers None if nothing can."""

        async def go_on(stream: Stream, broken: Opened) -> Opened | None:
            if stream.migrations >= self._limit:
                return None
            opened = None
            try:
                opened = await self._open(stream, broken.engine, request, header, record)
            except ApiError as error:
                logger.warning("request %s cannot go on: %s", record.id, error)
            self._metrics.migrations.labels("failed" if opened is None else "continued").inc()
            record.migrations += opened is not None
            return opened

        return go_on

    async def _open(
        self,
        stream: Stream,
        dead: EngineEndpoint,
        request: RequestInfo,
        header: bytes,
        record: Record,
    ) -> Opened:
        seat = await self._admission.seat("decode", request, [dead])
        if seat is None:
            raise ApiError(503, "no other decode engine is there")
        back = 0
        try:
            if stream.has_begun:
                back = await self._unsent(stream, seat.engine, request)
                body = stream.rest(back, self._fits.said(seat.engine))
                if body is None:
                    raise ApiError(502, "what is left of it no other engine can give")
                request = RequestInfo(paths.COMPLETION, body, request.headers)
        except BaseException:
            seat.leave()
            raise
        opened = await self._service.open(request, seat, header, record)
        if isinstance(opened, Response):
            raise ApiError(502, f"prefill answered {opened.status_code}")
        if opened.answer.status != 200 or not opened.is_events:
            opened.close()
            raise ApiError(502, f"{opened.engine.name} answered {opened.answer.status}")
        if stream.has_begun:
            stream.goes_on(back)
        else:
            stream.begins_anew()
        return opened

    async def _unsent(self, stream: Stream, engine: EngineEndpoint, request: RequestInfo) -> int:
        """How many of the last tokens have no text yet. Raises `ApiError` if the text is not the
        tokens'."""

        async def text_of(tokens: list[int]) -> str:
            return await self._text(tokens, engine, request)

        # Answers leave special tokens out, /detokenize does not.
        special: set[int] | None = None
        for before in stream.befores:
            back = await self._untold(stream, before, set(), text_of)
            if back is not None:
                return back
            if special is None:
                special = {
                    token
                    for token in stream.silent()
                    if HALF_A_CHARACTER not in await text_of([token])
                }
            back = await self._untold(stream, before, special, text_of) if special else None
            if back is not None:
                return back
        raise ApiError(502, "its text is not that of its tokens")

    @staticmethod
    async def _untold(
        stream: Stream,
        before: list[int],
        left_out: set[int],
        text_of: Callable[[list[int]], Awaitable[str]],
    ) -> int | None:
        for back in range(min(_MOST_BACK, len(stream.tokens())) + 1):
            tokens = [token for token in stream.tokens(back) if token not in left_out]
            if stream.is_text_of(await text_of([*before, *tokens]) if tokens else ""):
                return back
        return None

    async def _text(self, tokens: list[int], engine: EngineEndpoint, request: RequestInfo) -> str:
        data = legs.encoded({"model": request.body.get("model"), "tokens": tokens})
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
