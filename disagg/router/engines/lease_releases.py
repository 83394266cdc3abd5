"""The leases at prefill engines: which are held for a decode engine, and the release of those whose
blocks no engine will fetch. It must never delay an answer."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any, NamedTuple

import aiohttp

from disagg.router.api import bodies
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import client as upstream

logger = logging.getLogger(__name__)

RELEASE_S = 5.0
_PAUSE_S = 0.05  # before the second attempt; then twice as long each time


class Prefilled(NamedTuple):
    """The result of a prefill leg. `params`: the `kv_transfer_params` for decode. `prefill`: the
    engine that holds the lease. `answer`: the engine's whole answer."""

    prefill: EngineEndpoint
    params: dict[str, Any]
    answer: bytes


class LeaseReleases:
    """The leases held and the releases under way. A lease that cannot be released ends at its
    deadline."""

    def __init__(self, client: aiohttp.ClientSession, metrics: RouterMetrics) -> None:
        self._client, self._metrics = client, metrics
        self._background: set[asyncio.Task[None]] = set()
        self._held: dict[int, Prefilled] = {}

    def hold(self, prefilled: Prefilled) -> None:
        """A decode engine is going to fetch; until `fetched` or the end of the release."""
        self._held[id(prefilled)] = prefilled

    def fetched(self, prefilled: Prefilled | None) -> None:
        """The decode engine has what it needs."""
        self._held.pop(id(prefilled), None)

    def by_engine(self) -> Counter[str]:
        """How many leases each prefill engine holds for requests of this process, by name."""
        return Counter(one.prefill.name for one in self._held.values())

    def give_back(self, prefilled: Prefilled | None) -> None:
        """Release the lease in the background; returns at once."""
        if prefilled is None:
            return
        task = asyncio.create_task(self._release(prefilled.prefill, prefilled.params))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda _: self.fetched(prefilled))

    async def close(self) -> None:
        """Wait for the releases under way; each has a deadline."""
        if self._background:
            await asyncio.wait(self._background)

    async def _release(self, prefill: EngineEndpoint, params: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(RELEASE_S):
                outcome = await self._sent(prefill, bodies.encoded({bodies.PARAMS: params}))
        except TimeoutError:
            outcome = "failed"
            logger.warning("a lease of %s was not released; it ends at its deadline", prefill.name)
        self._metrics.releases.labels(outcome).inc()

    async def _sent(self, prefill: EngineEndpoint, data: bytes) -> str:
        """Send it until the engine answers: it may be busy, or have just closed an idle connection.
        A lease that is released twice is released."""
        pause = _PAUSE_S
        while True:
            try:
                answer = await upstream.post(self._client, prefill, "/disagg/release", data)
                answer.release()
                return "released" if answer.status == 200 else "refused"
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(pause)
                pause *= 2
