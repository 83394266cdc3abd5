"""Asks an engine for the token ids of a prompt that came as text or as a chat.

Only `cache_aware` with `pairing.tokenize: engine` does it. The ids choose an engine, and nothing
else: what the engines read is the client's own request. It takes 50 ms at most; without ids the
estimate decides.
"""

from __future__ import annotations

import asyncio
import random
from typing import Annotated

import aiohttp
import msgspec

from disagg.router.api import bodies
from disagg.router.engines.health import Health
from disagg.router.request.plan import RequestPlan
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint, Topology
from disagg.router.upstream import client as upstream

LIMIT_S = 0.05
_PATH = "/tokenize"
_MOST_BYTES = 16 << 20
_FAILURES = (
    aiohttp.ClientError,
    ConnectionError,
    TimeoutError,
    ValueError,
    msgspec.MsgspecError,
)


class _Answer(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


_ANSWERS = msgspec.json.Decoder(_Answer)


class Tokenize:
    """`limit_s`: of one request, its connection included."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        topology: Topology,
        health: Health,
        metrics: RouterMetrics,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._client, self._topology, self._health = client, topology, health
        self._metrics, self._limit_s = metrics, limit_s

    async def learn(self, plan: RequestPlan) -> None:
        """Give the plan its prompt's token ids, if an engine tells them in time."""
        if plan.blocks is not None or plan.has_media:
            return
        body = bodies.tokenize_body(plan.body, plan.path)
        engine = self._engine()
        if body is None or engine is None:
            self._metrics.tokenized.labels("not_asked").inc()
            return
        try:
            async with asyncio.timeout(self._limit_s):
                ids = await self._ask(engine, bodies.encoded(body))
        except _FAILURES:
            self._metrics.tokenized.labels("failed").inc()
            return
        self._metrics.tokenized.labels("known").inc()
        plan.reads(ids)

    def _engine(self) -> EngineEndpoint | None:
        for engines in (self._topology.of("prefill"), self._topology.of("decode")):
            if usable := self._health.usable(engines):
                return random.choice(usable)
        return None

    async def _ask(self, engine: EngineEndpoint, data: bytes) -> list[int]:
        answer = await upstream.post(self._client, engine, _PATH, data)
        async with answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            pieces, size = list[bytes](), 0
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                size += len(piece)
                if size > _MOST_BYTES:
                    raise ValueError("a long answer")
        return _ANSWERS.decode(b"".join(pieces)).tokens
