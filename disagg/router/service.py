"""One request through both legs: skip or prefill, decode, relay, and give back what is unused.

The upstream's status is known before the client's answer begins. Whatever ends a request
early (the client leaves, an engine refuses or dies) closes the upstream connection at once,
so the engine aborts, and releases a lease that nobody will fetch.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any, TypeAlias

import aiohttp
from starlette.datastructures import Headers
from starlette.responses import Response
from yarl import URL

from disagg.config import LimitsSection
from disagg.router import legs, upstream
from disagg.router.errors import ApiError
from disagg.router.metrics import RouterMetrics
from disagg.router.pairing import Pairer, Pairing, RequestInfo
from disagg.router.relay import Relayed
from disagg.router.topology import EngineEndpoint

logger = logging.getLogger(__name__)

RELEASE_S = 5.0
Answer: TypeAlias = Response | Relayed


class Service:
    """Everything a request needs; one per app."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        pairer: Pairer,
        metrics: RouterMetrics,
        limits: LimitsSection,
        *,
        strict: bool,
    ) -> None:
        self.client, self._pairer, self.metrics = client, pairer, metrics
        self._limits, self._strict = limits, strict
        self._background: set[asyncio.Task[None]] = set()

    async def complete(self, path: str, body: dict[str, Any], headers: Headers) -> Answer:
        """Serve a completion or chat completion; raises `ApiError`."""
        began = time.monotonic()
        body = legs.without_params(body)
        sent = upstream.to_engine(headers.raw, _request_id(headers))
        pairing = self._pairer.pair(RequestInfo(path, body))
        if pairing is None:
            raise ApiError(503, "no decode engine is known")
        params = await self._prefill(pairing, path, body, sent)
        if isinstance(params, Response):
            return params
        try:
            data = legs.encoded(legs.decode_body(body, params))
            call = upstream.post(self.client, pairing.decode, path, data, sent)
            answer = await self._relayed(call, began)
        except BaseException:
            self._release(pairing.prefill, params)
            raise
        if answer.status_code >= 400:
            self._release(pairing.prefill, params)
        return answer

    async def forward(self, method: str, target: str, data: bytes, headers: Headers) -> Answer:
        """Pass any other request to a decode engine as it is, but without transfer params.

        `target`: raw path and query. Raises `ApiError`.
        """
        engine = self._pairer.decode(RequestInfo(target, {}))
        if engine is None:
            raise ApiError(503, "no decode engine is known")
        data = legs.passed_through(data, headers.get("content-type", ""))
        sent = upstream.to_engine(headers.raw, _request_id(headers))
        # Taken as encoded: tidying `..` would lead to paths that the app has refused.
        url = URL(f"{engine.url}{target}", encoded=True)
        call = self.client.request(method, url, data=data or None, headers=sent)
        return await self._relayed(call, None)

    async def close(self) -> None:
        """Let releases that are under way end."""
        if self._background:
            await asyncio.wait(self._background, timeout=RELEASE_S)

    # ---- the prefill leg -------------------------------------------------------------------

    async def _prefill(
        self, pairing: Pairing, path: str, body: dict[str, Any], headers: upstream.Headers
    ) -> dict[str, Any] | Response | None:
        """The params to hand over, None if decode shall work alone, or an answer that is final."""
        reason = legs.local_reason(body)
        if reason is not None:
            self.metrics.local.labels(reason).inc()
            return None
        if pairing.prefill is None:
            self._alone("no_prefill_engine")
            return None
        data = legs.encoded(legs.prefill_body(body))
        try:
            with self.metrics.in_flight.labels("prefill").track_inprogress():
                call = upstream.post(self.client, pairing.prefill, path, data, headers)
                answer = await self._head(call, self._limits.prefill_timeout_s, "prefill")
                content = await self._whole(answer)
        except ApiError as error:
            logger.warning("prefill on %s failed: %s", pairing.prefill.name, error.message)
            self._alone("prefill_failed")
            return None
        if 400 <= answer.status < 500:
            refusal = Response(content, answer.status)
            refusal.raw_headers = upstream.to_client(answer.raw_headers)
            return refusal
        if answer.status != 200:
            logger.warning("prefill on %s answered %d", pairing.prefill.name, answer.status)
            self._alone("prefill_failed")
            return None
        params = legs.params_of(content)
        if params is None:
            self._alone("no_params")
        return params

    def _alone(self, reason: str) -> None:
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

    async def _head(self, call: Any, timeout_s: float, role: str) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(timeout_s):
                answer: aiohttp.ClientResponse = await call
        except TimeoutError as error:
            raise ApiError(504, f"the {role} engine gave no answer in {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ApiError(503, f"the {role} engine cannot be reached") from error
        return answer

    async def _relayed(self, call: Any, began: float | None) -> Relayed:
        """The answer of a decode engine whose head has come; the caller must relay it."""
        in_flight = self.metrics.in_flight.labels("decode")
        in_flight.inc()
        try:
            answer = await self._head(call, self._limits.first_byte_timeout_s, "decode")
        except BaseException:
            in_flight.dec()
            raise

        def first_byte() -> None:
            if began is not None:
                self.metrics.ttft.observe(time.monotonic() - began)

        return Relayed(
            answer,
            self._limits.between_bytes_timeout_s,
            first_byte=first_byte,
            ended=in_flight.dec,
        )

    # ---- what nobody will fetch ------------------------------------------------------------

    def _release(self, prefill: EngineEndpoint | None, params: dict[str, Any] | None) -> None:
        if prefill is None or params is None:
            return
        task = asyncio.create_task(self._release_now(prefill, params))
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


def _request_id(headers: Headers) -> str:
    return headers.get("x-request-id") or uuid.uuid4().hex
