"""Gives back leases that nobody will fetch, behind the answer's back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

import aiohttp

from disagg.router.api import bodies
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import client as upstream

logger = logging.getLogger(__name__)

RELEASE_S = 5.0


class Prefilled(NamedTuple):
    """What a prefill leg gave: the params for decode, whom to give them back to, and its whole
    answer."""

    prefill: EngineEndpoint
    params: dict[str, Any]
    answer: bytes


class LeaseReleases:
    """Those under way. A lease that cannot be given back ends by its deadline."""

    def __init__(self, client: aiohttp.ClientSession, metrics: RouterMetrics) -> None:
        self._client, self._metrics = client, metrics
        self._background: set[asyncio.Task[None]] = set()

    def give_back(self, prefilled: Prefilled | None) -> None:
        """Returns at once."""
        if prefilled is None:
            return
        task = asyncio.create_task(self._release(prefilled.prefill, prefilled.params))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Let those under way end."""
        if self._background:
            await asyncio.wait(self._background, timeout=RELEASE_S)

    async def _release(self, prefill: EngineEndpoint, params: dict[str, Any]) -> None:
        outcome = "failed"
        try:
            async with asyncio.timeout(RELEASE_S):
                data = bodies.encoded({bodies.PARAMS: params})
                answer = await upstream.post(self._client, prefill, "/disagg/release", data)
                outcome = "released" if answer.status == 200 else "refused"
                answer.release()
        except (aiohttp.ClientError, TimeoutError):
            logger.warning("a lease of %s ends by its deadline", prefill.name)
        self._metrics.releases.labels(outcome).inc()
