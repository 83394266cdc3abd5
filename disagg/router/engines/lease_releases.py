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
        """Wait for the releases under way."""
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
            logger.warning("a lease of %s was not released; it ends at its deadline", prefill.name)
        self._metrics.releases.labels(outcome).inc()
