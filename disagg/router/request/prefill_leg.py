"""The prefill leg of one request: whether there is one, on which engine, and what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from disagg.config import LimitsSection
from disagg.router.api import bodies
from disagg.router.api.errors import ApiError
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.engines.health import Health
from disagg.router.engines.lease_releases import LeaseReleases, Prefilled
from disagg.router.pairing.admission import Admission
from disagg.router.pairing.in_flight import Seat
from disagg.router.request.follow import EarlyDecode
from disagg.router.request.plan import RequestPlan
from disagg.router.request.source_leg import Lent, SourceLeg
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import client as upstream
from disagg.router.upstream import http1
from disagg.router.upstream.response import UpstreamResponse

logger = logging.getLogger(__name__)

_ATTEMPTS = 2


class PrefillLeg:
    """`strict`: a prompt that could not be handed off is an error. `gives_params`: the engines'
    connector answers params; without, decode finds the cache by itself. `caches`: to count
    what engines were expected to hold; None: nothing is expected. `sources`: for what other
    engines' caches hold of a prompt; with `releases`, of their leases."""

    def __init__(
        self,
        client: http1.Client,
        admission: Admission,
        health: Health,
        metrics: RouterMetrics,
        limits: LimitsSection,
        *,
        strict: bool,
        gives_params: bool,
        caches: EngineCaches | None = None,
        sources: SourceLeg | None = None,
        releases: LeaseReleases,
    ) -> None:
        self._sources, self._releases = sources, releases
        self._client, self._admission, self._health = client, admission, health
        self._metrics, self._limits = metrics, limits
        self._strict, self._gives_params, self._caches = strict, gives_params, caches

    async def run(
        self,
        plan: RequestPlan,
        decode: EngineEndpoint,
        header: bytes,
        record: Record,
        more: Mapping[str, Any],
        early: EarlyDecode | None = None,
    ) -> Prefilled | Response | None:
        """What decode fetches, None if decode computes the prompt, or an answer that is final.

        `decode`: the engine that will fetch. `more`: see `bodies.prefill_body`. `early`: the decode
        leg, if it may begin now. Raises `ApiError`.
        """
        gives = self._gives_params
        body = bodies.prefill_body(plan.body, plan.path, asks_params=gives, more=more)
        data, tried = bodies.encoded(body), list[EngineEndpoint]()
        seat = await self._admission.seat("prefill", plan, partner=decode)
        while seat is not None:
            tried.append(seat.engine)
            record.prefill = seat.engine.name
            lent = await self._lent(seat, plan, header, record)
            more_params = {} if lent is None else bodies.fetching(lent.lease.params)
            if early is not None:
                more_params |= early.begins(seat.engine)
            sent = data
            if more_params:
                params = {**body[bodies.PARAMS], **more_params}
                sent = bodies.encoded({**body, bodies.PARAMS: params})
            try:
                prefilled = await self._on(seat, plan, sent, header, record, lent)
            except _EngineFailed as failure:
                logger.warning("prefill on %s failed: %s", seat.engine.name, failure)
                if early is not None:
                    early.failed(seat.engine)
                self._give_back(lent)
            except BaseException:
                self._give_back(lent)
                raise
            else:
                if isinstance(prefilled, Response):
                    self._give_back(lent)  # refused before the engine saw it, perhaps
                return prefilled
            seat = None
            if len(tried) < _ATTEMPTS:
                seat = self._admission.another("prefill", plan, tried, decode)
            if seat is not None:
                self._metrics.retries.labels("prefill").inc()
                record.retries += 1
        self._alone("prefill_failed" if tried else "no_prefill_engine", record)
        return None

    async def _lent(
        self, seat: Seat, plan: RequestPlan, header: bytes, record: Record
    ) -> Lent | None:
        """What the engine shall fetch first, if there is such a lease."""
        if self._sources is None:
            return None
        try:
            return await self._sources.run(plan, seat.engine, header, record)
        except BaseException:
            seat.leave()
            raise

    def _give_back(self, lent: Lent | None) -> None:
        """Release the lease: the engine that should fetch it may never have."""
        if lent is not None:
            self._releases.give_back(lent.lease)

    def skip(self, reason: str, record: Record) -> None:
        """Decode works alone."""
        record.local = reason
        self._metrics.local.labels(reason).inc()

    def _alone(self, reason: str, record: Record) -> None:
        self.skip(reason, record)
        if self._strict:
            raise ApiError(502, f"the prompt could not be handed off ({reason}); transfer.strict")

    async def _on(
        self,
        seat: Seat,
        plan: RequestPlan,
        data: bytes,
        header: bytes,
        record: Record,
        lent: Lent | None,
    ) -> Prefilled | Response | None:
        began = record.elapsed()
        expected = self._expected(plan, seat.engine)
        moved = 0 if lent is None else lent.source.lacking
        reads, is_alone = max(0, plan.tokens - (expected or 0) - moved), seat.is_alone
        seat.reads(reads)
        try:
            limit = self._limits.prefill_timeout_s
            answer = await upstream.post_leg(
                self._client, seat.engine, plan.path, data, header, limit
            )
            content = await self._whole(answer)
            if answer.status == 200 and lent is None:
                seat.has_read()
            elif answer.status == 200 and self._sources is not None and is_alone:
                self._sources.fetched(moved, record.elapsed() - began, reads)
        except ApiError as error:
            self._health.failed(seat.engine)
            raise _EngineFailed(error.message) from error
        finally:
            seat.leave()
            record.prefill_s = record.elapsed()
            self._metrics.prefill_time.observe(record.prefill_s - began)
        self._health.answered(seat.engine, answer.status)
        if 400 <= answer.status < 500:
            refusal = Response(content, answer.status)
            refusal.raw_headers = upstream.to_client(answer.raw_headers)
            return refusal
        if answer.status != 200:
            raise _EngineFailed(f"it answered {answer.status}")
        params, prompt_tokens, cached = bodies.prefill_answer(content)
        if prompt_tokens is not None:
            plan.has(prompt_tokens)
        if expected is not None and cached is not None:
            self._metrics.cache_expected.inc(expected + moved)
            self._metrics.cache_reported.inc(cached)
            self._metrics.cache_prompts.inc(max(cached, prompt_tokens or plan.tokens))
        if not self._gives_params:
            return None
        if params is None:
            self._alone("no_params", record)
            return None
        return Prefilled(seat.engine, params, content)

    def _expected(self, plan: RequestPlan, engine: EngineEndpoint) -> int | None:
        """Tokens of the prompt that the engine holds, if that can be known."""
        if self._caches is None or plan.blocks is None:
            return None
        held = self._caches.held(plan.blocks, plan.model, engine.name)
        return held.tokens

    async def _whole(self, answer: UpstreamResponse) -> bytes:
        try:
            if answer.is_whole:
                return await answer.read()
            async with asyncio.timeout(self._limits.between_bytes_timeout_s):
                return await answer.read()
        except (ConnectionError, TimeoutError) as error:
            raise ApiError(502, "the prefill engine's answer broke off") from error
        finally:
            answer.close()  # of no effect once it was read to its end


class _EngineFailed(Exception):
    """In a way that another engine may not."""
