"""One request through both legs: skip or prefill, decode, relay, and give back what is unused.

The upstream's status is known before the client's answer begins. Whatever ends a request
early (the client leaves, an engine refuses or dies) closes the upstream connection at once,
so the engine aborts, and releases a lease that nobody will fetch. A leg that fails before
anything of its answer was passed on is sent to another engine, once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple, TypeAlias

import aiohttp
from starlette.datastructures import Headers
from starlette.responses import Response
from yarl import URL

from disagg.config import LimitsSection
from disagg.router import legs, upstream
from disagg.router.errors import ApiError
from disagg.router.metrics import RouterMetrics
from disagg.router.pairing import Pairer, RequestInfo
from disagg.router.record import Record
from disagg.router.relay import Relayed
from disagg.router.topology import EngineEndpoint
from disagg.router.traffic import Traffic

logger = logging.getLogger(__name__)

RELEASE_S = 5.0
_ATTEMPTS = 2
Answer: TypeAlias = Response | Relayed


class Handed(NamedTuple):
    """What a prefill leg gave: the params for decode, and whom to give them back to."""

    prefill: EngineEndpoint
    params: dict[str, Any]


class Service:
    """Everything a request needs; one per app."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        pairer: Pairer,
        traffic: Traffic,
        metrics: RouterMetrics,
        limits: LimitsSection,
        *,
        strict: bool,
    ) -> None:
        self.client, self._pairer, self._traffic = client, pairer, traffic
        self.metrics = metrics
        self._limits, self._strict = limits, strict
        self._background: set[asyncio.Task[None]] = set()

    async def complete(
        self, path: str, body: dict[str, Any], headers: Headers, record: Record
    ) -> Answer:
        """Serve a completion or chat completion; raises `ApiError`."""
        body = legs.without_params(body)
        sent = upstream.to_engine(headers.raw, record.id)
        request = RequestInfo(path, body, headers)
        if not self._pairer.knows("decode"):
            raise ApiError(503, "no decode engine is known")
        handed = await self._prefill(request, sent, record)
        if isinstance(handed, Response):
            return handed
        try:
            answer = await self._decode(request, handed, sent, record)
        except BaseException:
            self._release(handed)
            raise
        if answer.status_code >= 400:
            self._release(handed)
        return answer

    async def forward(
        self, method: str, target: str, data: bytes, headers: Headers, record: Record
    ) -> Answer:
        """Pass any other request to a decode engine as it is, but without transfer params.

        `target`: raw path and query. Raises `ApiError`.
        """
        request = RequestInfo(target, {}, headers)
        engine = self._pairer.choose("decode", request)
        if engine is None:
            raise ApiError(503, "no decode engine is known")
        data = legs.passed_through(data, headers.get("content-type", ""))
        sent = upstream.to_engine(headers.raw, record.id)
        # Taken as encoded: tidying `..` would lead to paths that the app has refused.
        url = URL(f"{engine.url}{target}", encoded=True)
        call = self.client.request(method, url, data=data or None, headers=sent)
        return await self._relayed(call, engine, request, record, counts=False)

    async def close(self) -> None:
        """Let releases that are under way end."""
        if self._background:
            await asyncio.wait(self._background, timeout=RELEASE_S)

    # ---- the prefill leg -------------------------------------------------------------------

    async def _prefill(
        self, request: RequestInfo, headers: upstream.Headers, record: Record
    ) -> Handed | Response | None:
        """What to hand over, None if decode shall work alone, or an answer that is final."""
        reason = legs.local_reason(request.body)
        if reason is not None:
            self.metrics.local.labels(reason).inc()
            record.local = reason
            return None
        data = legs.encoded(legs.prefill_body(request.body))
        tried: list[EngineEndpoint] = []
        while len(tried) < _ATTEMPTS:
            engine = self._pairer.choose("prefill", request, tried)
            if engine is None:
                break
            if tried:
                self.metrics.retries.labels("prefill").inc()
                record.retries += 1
            tried.append(engine)
            record.prefill = engine.name
            try:
                return await self._prefill_on(engine, request, data, headers, record)
            except _EngineFailed as failure:
                logger.warning("prefill on %s failed: %s", engine.name, failure)
        self._alone("prefill_failed" if tried else "no_prefill_engine", record)
        return None

    async def _prefill_on(
        self,
        engine: EngineEndpoint,
        request: RequestInfo,
        data: bytes,
        headers: upstream.Headers,
        record: Record,
    ) -> Handed | Response | None:
        ended = self._traffic.begin(engine, request.tokens)
        try:
            call = upstream.post(self.client, engine, request.path, data, headers)
            answer = await self._head(call, self._limits.prefill_timeout_s, "prefill")
            content = await self._whole(answer)
        except ApiError as error:
            self._traffic.failed(engine)
            raise _EngineFailed(error.message) from error
        finally:
            ended()
            record.prefill_s = record.elapsed()
        self._judge(engine, answer.status)
        if 400 <= answer.status < 500:
            refusal = Response(content, answer.status)
            refusal.raw_headers = upstream.to_client(answer.raw_headers)
            return refusal
        if answer.status != 200:
            raise _EngineFailed(f"it answered {answer.status}")
        params = legs.params_of(content)
        if params is None:
            self._alone("no_params", record)
            return None
        return Handed(engine, params)

    def _judge(self, engine: EngineEndpoint, status: int) -> None:
        """500 says nothing of the engine: it may be this request's fault."""
        if status in (502, 503, 504):
            self._traffic.failed(engine)
        elif status != 500:
            self._traffic.succeeded(engine)

    def _alone(self, reason: str, record: Record) -> None:
        record.local = reason
        self.metrics.local.labels(reason).inc()
        if self._strict:
            raise ApiError(502, f"the prompt could not be handed over ({reason}); transfer.strict")

    async def _whole(self, answer: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(self._limits.between_bytes_timeout_s):
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(502, "the prefill engine's answer broke off") from error
        finally:
            answer.close()  # of no effect once it was read to its end

    # ---- the decode leg --------------------------------------------------------------------

    async def _decode(
        self,
        request: RequestInfo,
        handed: Handed | None,
        headers: upstream.Headers,
        record: Record,
    ) -> Relayed:
        data = legs.encoded(legs.decode_body(request.body, handed.params if handed else None))
        engine, tried = self._pairer.choose("decode", request), list[EngineEndpoint]()
        assert engine is not None
        while True:
            tried.append(engine)
            answer: Relayed | None = None
            failure: ApiError | None = None
            try:
                call = upstream.post(self.client, engine, request.path, data, headers)
                answer = await self._relayed(call, engine, request, record)
                if answer.status_code < 500:
                    return answer
            except ApiError as error:
                failure = error
            # Not after a time-out: whoever waited so long shall hear of it.
            again = len(tried) < _ATTEMPTS and (failure is None or failure.status != 504)
            other = self._pairer.choose("decode", request, tried) if again else None
            if other is None:
                if failure is not None:
                    raise failure
                assert answer is not None
                return answer
            if answer is not None:
                answer.discard()
            logger.warning("decode on %s failed, trying %s", engine.name, other.name)
            self.metrics.retries.labels("decode").inc()
            record.retries += 1
            engine = other

    async def _head(self, call: Any, timeout_s: float, role: str) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(timeout_s):
                answer: aiohttp.ClientResponse = await call
        except TimeoutError as error:
            raise ApiError(504, f"the {role} engine gave no answer in {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ApiError(503, f"the {role} engine cannot be reached") from error
        return answer

    async def _relayed(
        self,
        call: Any,
        engine: EngineEndpoint,
        request: RequestInfo,
        record: Record,
        *,
        counts: bool = True,
    ) -> Relayed:
        """The answer of a decode engine whose head has come; the caller must relay it.

        `counts`: towards the time to first token.
        """
        record.decode = engine.name
        ended = self._traffic.begin(engine, request.tokens)
        try:
            answer = await self._head(call, self._limits.first_byte_timeout_s, "decode")
        except BaseException as error:
            ended()
            if isinstance(error, ApiError):
                self._traffic.failed(engine)
            raise
        self._judge(engine, answer.status)

        def first_byte() -> None:
            record.first_byte_s = record.elapsed()
            if counts:
                self.metrics.ttft.observe(record.first_byte_s)

        return Relayed(
            answer,
            self._limits.between_bytes_timeout_s,
            first_byte=first_byte,
            ended=ended,
        )

    # ---- what nobody will fetch ------------------------------------------------------------

    def _release(self, handed: Handed | None) -> None:
        if handed is None:
            return
        task = asyncio.create_task(self._release_now(*handed))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release_now(self, prefill: EngineEndpoint, params: dict[str, Any]) -> None:
        outcome = "failed"
        try:
            async with asyncio.timeout(RELEASE_S):
                data = legs.encoded({legs.PARAMS: params})
                answer = await upstream.post(self.client, prefill, "/disagg/release", data)
                outcome = "released" if answer.status == 200 else "refused"
                answer.release()
        except (aiohttp.ClientError, TimeoutError):
            logger.warning("a lease of %s ends by its deadline", prefill.name)
        self.metrics.releases.labels(outcome).inc()


class _EngineFailed(Exception):
    """A prefill leg failed in a way that another engine may not."""
