"""The source leg: a lease on what another engine's cache holds of a prompt.

The source gets the prompt as far as it holds it, and one token more, as a prefill. So vLLM itself
finds the blocks in the cache, and keeps them while they are read; the source computes one token,
which the other engine then need not. Whatever goes wrong, that engine computes: a source leg never
fails a request, and has a limit (`Moves.limit_s`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from disagg.config import LimitsSection
from disagg.router.api import bodies, paths
from disagg.router.api.errors import ApiError
from disagg.router.engines.lease_releases import Prefilled
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.sharing import Sharing, Source
from disagg.router.request.plan import RequestPlan
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import client as upstream
from disagg.router.upstream import http1

logger = logging.getLogger(__name__)


class Lent(NamedTuple):
    """A source that answered, and the lease that it gave."""

    source: Source
    lease: Prefilled


class SourceLeg:
    """Asks sources. One per model."""

    def __init__(
        self,
        client: http1.Client,
        sharing: Sharing,
        in_flight: InFlight,
        metrics: RouterMetrics,
        limits: LimitsSection,
    ) -> None:
        self._client, self._sharing, self._in_flight = client, sharing, in_flight
        self._metrics, self._limits = metrics, limits

    async def run(
        self, plan: RequestPlan, engine: EngineEndpoint, header: bytes, record: Record
    ) -> Lent | None:
        """The lease that `engine` shall fetch first; None if it computes what it lacks itself."""
        source = self._sharing.source(plan, engine)
        return None if source is None else await self._ask(plan, source, header, record)

    def left(self, plan: RequestPlan) -> int:
        """How many of the prompt's tokens no engine's own cache holds."""
        if plan.blocks is None:
            return plan.tokens
        return plan.tokens - self._sharing.held_anywhere(plan.blocks, plan.model)

    async def _ask(
        self, plan: RequestPlan, source: Source, header: bytes, record: Record
    ) -> Lent | None:
        assert plan.blocks is not None
        data = bodies.encoded(bodies.source_body(plan.body, plan.blocks.ids(source.tokens + 1)))
        limit_s = self._sharing.moves.limit_s(source.lacking)
        limit_s = min(limit_s, self._limits.prefill_timeout_s)
        seat, began = self._in_flight.take(source.engine, 1), record.elapsed()
        try:
            async with asyncio.timeout(limit_s):
                answer = await upstream.post_leg(
                    self._client, source.engine, paths.COMPLETION, data, header, limit_s
                )
                try:
                    content = await answer.read()
                finally:
                    answer.close()
        except (ApiError, ConnectionError, TimeoutError) as error:
            # Its health is judged by requests that have time: this one has little.
            logger.info("no lease of %s: %s", source.engine.name, error)
            self._metrics.sources.labels("failed").inc()
            return None
        finally:
            seat.leave()
        params = bodies.prefill_answer(content).params if answer.status == 200 else None
        if params is None:
            self._metrics.sources.labels("refused").inc()
            return None
        self._sharing.moves.asked(record.elapsed() - began)
        self._metrics.sources.labels("leased").inc()
        self._metrics.shared_tokens.inc(source.lacking)
        record.source = source.engine.name
        return Lent(source, Prefilled(source.engine, params, b""))  # no answer to this prompt

    def fetched(self, tokens: int, seconds: float, computed: int) -> None:
        """An engine that had nothing else to do took so long to fetch `tokens` and to compute
        `computed` more."""
        self._sharing.moves.fetched(tokens, seconds - self._in_flight.takes_s(computed))
