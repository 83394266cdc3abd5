"""Probes the engines periodically: whether they answer, and whether handoffs arrive.

An engine that answers /health may still fail every handoff. So the probe also reads the handoff
counters of decode engines. If some failed and none loaded since the last probe, the data path is
broken. Then the router makes small trial handoffs until one works.

Each probe opens a new connection. The engine's host accepts it at once however busy the engine is,
so a lost host is noticed soon. An engine that did not answer is probed again at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import aiohttp
import msgspec

from disagg.router.api import bodies
from disagg.router.api.errors import ApiError
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.telemetry.engine_metrics import Cached, OddMetrics, read_text
from disagg.router.topology import EngineEndpoint, Topology
from disagg.router.upstream import client as upstream

logger = logging.getLogger(__name__)

PROBE_S, _CONNECT_S = 2.0, 1.0
_TRIAL_S, _TRIAL_TOKENS = 30.0, 32
_FAMILY = "disagg_handoffs_total"
_COUNTER = _FAMILY + "{"
_VERSION = "vLLM's version"

_decode_texts = msgspec.json.Decoder(dict[str, str]).decode


class Probes:
    """One background task, from `start` to `close`."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        topology: Topology,
        health: Health,
        compatibility: Compatibility,
        interval_s: float,
    ) -> None:
        self._client, self._topology, self._health = client, topology, health
        self._compatibility = compatibility
        self._interval_s = interval_s
        self._counts: dict[str, dict[str, float]] = {}
        self._failing: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._recent = Cached(self._probe_now)

    def start(self) -> None:
        """Begin to probe."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop probing."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def probe_all(self) -> None:
        """Probe all engines once, unless that was done within the last second."""
        await self._recent.get(self._topology.engines)

    async def _probe_now(self) -> bool:
        await asyncio.gather(*map(self._probe, self._topology.engines))
        return True

    async def _run(self) -> None:
        while True:
            await self._probe_now()
            for engine in self._topology.of("decode"):
                if engine.name in self._failing:
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ApiError):
                        await self._trial_handoff(engine)
            # Random, so that several routers do not probe at the same moment.
            await asyncio.sleep(self._interval_s * random.uniform(0.8, 1.2))

    async def _probe(self, engine: EngineEndpoint) -> None:
        await self._ask(engine)
        while self._health.is_suspect(engine):
            await self._ask(engine)

    async def _ask(self, engine: EngineEndpoint) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE_S, sock_connect=_CONNECT_S)
        problem: str | None = "does not answer /health"
        try:
            async with self._get(engine, "/health", timeout) as answer:
                problem = None if answer.status == 200 else f"/health answers {answer.status}"
            if problem is None and not self._compatibility.knows(engine):
                self._compatibility.note(engine, await self._fingerprint(engine))
            if problem is None and engine.role == "decode":
                async with self._get(engine, "/metrics", timeout) as answer:
                    self._count_handoffs(engine, await read_text(answer))
        except (
            aiohttp.ClientError,
            TimeoutError,
            ConnectionError,
            ApiError,
            OddMetrics,
        ):
            pass  # it did not answer /health, or has no counters
        if problem is not None:
            self._compatibility.forget(engine)  # another engine may come back at this address
        self._health.probed(engine, problem)

    def _get(
        self, engine: EngineEndpoint, path: str, timeout: aiohttp.ClientTimeout | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._client.get(
            f"{engine.url}{path}",
            headers=engine.headers,
            timeout=timeout or self._client.timeout,
        )

    async def _fingerprint(self, engine: EngineEndpoint) -> dict[str, str]:
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        found: dict[str, str] = {}
        async with self._get(engine, "/version", timeout) as answer:
            if answer.status == 200:
                found[_VERSION] = _fields(await answer.read()).get("version", "")
        async with self._get(engine, "/v1/models", timeout) as answer:
            if answer.status == 200:
                models = await answer.read()
                found["model"] = _first_model(models)
                found |= _max_model_len(models)
        async with self._get(engine, "/disagg/fingerprint", timeout) as answer:
            if answer.status == 200:
                # It names the versions that exchange blocks, which may be several.
                found.pop(_VERSION, None)
                found |= _fields(await answer.read())
        return found

    async def _trial_handoff(self, decode: EngineEndpoint) -> None:
        """Hand off a few tokens; the next probe sees the outcome in the counters."""
        prefills = self._health.usable(self._topology.of("prefill"))
        if not prefills:
            return
        async with asyncio.timeout(_TRIAL_S):
            async with self._get(decode, "/v1/models") as answer:
                model = _first_model(await answer.read())
            prompt = [random.randrange(256) for _ in range(_TRIAL_TOKENS)]
            body = {"model": model, "prompt": prompt, "max_tokens": 1}
            data = bodies.encoded(bodies.prefill_body(body))
            path = "/v1/completions"
            async with await upstream.post(
                self._client, random.choice(prefills), path, data
            ) as first:
                params = bodies.prefill_answer(await first.read()).params
            data = bodies.encoded(bodies.decode_body(body, params))
            async with await upstream.post(self._client, decode, path, data) as second:
                await second.read()

    def _count_handoffs(self, engine: EngineEndpoint, text: str) -> None:
        counts, found = {"loaded": 0.0, "failed": 0.0}, list(_handoff_counts(text))
        if not found and _FAMILY not in text:
            return  # it says nothing about handoffs
        for outcome, count in found:
            if outcome in counts:
                counts[outcome] += count
        before = self._counts.get(engine.name, counts)
        self._counts[engine.name] = counts
        failing = engine.name in self._failing
        if counts["loaded"] != before["loaded"] or counts["failed"] < before["failed"]:
            failing = False
        elif counts["failed"] > before["failed"]:
            failing = True
        if failing != (engine.name in self._failing):
            logger.warning("handoffs to %s %s", engine.name, "fail" if failing else "work again")
        (self._failing.add if failing else self._failing.discard)(engine.name)
        self._health.set_handoffs_fail(engine, failing)


def _fields(answer: bytes) -> dict[str, str]:
    try:
        return _decode_texts(answer)
    except msgspec.MsgspecError:
        return {}


def _first_model(models: bytes) -> str:
    try:
        return str(msgspec.json.decode(models)["data"][0]["id"])
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError) as error:
        raise ApiError(502, "the engine lists no models") from error


def _max_model_len(models: bytes) -> dict[str, str]:
    """The most tokens that prompt and answer may have together, if the engine reports it."""
    length = msgspec.json.decode(models)["data"][0].get("max_model_len")
    return {"max_model_len": str(length)} if isinstance(length, int) else {}


def _handoff_counts(text: str) -> Iterator[tuple[str, float]]:
    """Outcomes and counts. Parses only the counter's lines: an engine's metrics have thousands."""
    at = text.find(_COUNTER)
    while at >= 0:
        end = text.find("\n", at)
        line = text[at:] if end < 0 else text[at:end]
        labels, _, value = line.rpartition(" ")
        with contextlib.suppress(IndexError, ValueError):
            count = float(value)
            if math.isfinite(count):
                yield labels.split('outcome="')[1].split('"')[0], count
        at = text.find(_COUNTER, at + 1)
