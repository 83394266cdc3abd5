"""Loads LoRA adapters that clients loaded at run time into engines that start later.

Engines with disagg's routes report the load requests that they got. So a restarted router, or
another router process, knows the adapters too. The engines' lists of models are not used: they
also contain adapters from the engine's own arguments. For engines without these routes, this
router process only knows the load requests that it saw itself.

Other admin calls are not replayed to new engines, nor after a router restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

import aiohttp
import msgspec

from disagg.router.engines import broadcast
from disagg.router.engines.health import Health
from disagg.router.topology import EngineEndpoint, Topology

logger = logging.getLogger(__name__)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LOADED = "/disagg/adapters"
_LOADING = "its adapters are being loaded"
_JSON = (("content-type", "application/json"),)
_ALREADY = "has already been loaded"
_ASK_S = 2.0


class _LoadAdapter(msgspec.Struct):
    lora_name: str
    lora_path: str
    is_3d_lora_weight: bool = False
    load_inplace: bool = False


_LISTS = msgspec.json.Decoder(list[_LoadAdapter])
Loads = Mapping[str, bytes]
"""Bodies of load requests, by adapter name."""


class LoraAdapters:
    """Makes all engines load the same adapters. `limit_s`: time limit of one load. `on_ready` is
    called when an engine may get requests."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        health: Health,
        limit_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._client, self._health, self._limit_s = client, health, limit_s
        self._on_ready = on_ready
        self._loads: dict[str, bytes] = {}  # that this process forwarded
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._equalizing: asyncio.Task[None] | None = None

    def done(self, path: str, data: bytes) -> None:
        """All engines accepted this request: remember a load, forget an unload."""
        name = _name_in(data)
        if path == LOAD and name is not None:
            self._loads[name] = data
        elif path == UNLOAD and name is not None:
            self._loads.pop(name, None)

    def engine_added(self, engine: EngineEndpoint, others: Collection[EngineEndpoint]) -> None:
        """Load the adapters of `others`, the engines that were there, into a new engine. Until
        then it gets no requests, if others can serve."""
        if self._loads or others:
            self._load_before_service(engine, self._load_from(engine, others))

    def equalize(self, topology: Topology) -> None:
        """At the router's start: make every engine load the adapters that any engine has."""
        if len(topology.engines) > 1:
            self._equalizing = asyncio.create_task(self._equalize(topology))

    async def close(self) -> None:
        """Stop all loading."""
        tasks = [*self._loading.values(), *([self._equalizing] if self._equalizing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- which adapters are missing ------------------------------------------------------------

    async def _equalize(self, topology: Topology) -> None:
        reported = await self._reported(topology.engines)
        every = _union(reported.values())
        for engine, loads in reported.items():
            missing = {name: every[name] for name in every.keys() - loads.keys()}
            if missing and engine in topology.engines:  # it may have gone meanwhile
                self._load_before_service(engine, self._load(engine, missing))

    async def _load_from(self, engine: EngineEndpoint, others: Collection[EngineEndpoint]) -> None:
        # An engine that is still loading does not report all adapters yet.
        reported = await self._reported([one for one in others if one.name not in self._loading])
        await self._load(engine, _union(reported.values()) if reported else dict(self._loads))

    async def _reported(self, engines: Collection[EngineEndpoint]) -> dict[EngineEndpoint, Loads]:
        """The load requests that each engine got; without the engines that do not report them."""
        answers = await asyncio.gather(*map(self._loaded, engines))
        pairs = zip(engines, answers, strict=True)
        return {engine: loads for engine, loads in pairs if loads is not None}

    async def _loaded(self, engine: EngineEndpoint) -> Loads | None:
        timeout = aiohttp.ClientTimeout(total=_ASK_S)
        try:
            async with self._client.get(
                f"{engine.url}{LOADED}", timeout=timeout, headers=engine.headers
            ) as answer:
                listed = _LISTS.decode(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ConnectionError, msgspec.MsgspecError):
            return None
        if listed is None:
            return None
        return {load.lora_name: msgspec.json.encode(load) for load in listed}

    # ---- loading -------------------------------------------------------------------------------

    def _load_before_service(self, engine: EngineEndpoint, work: Coroutine[Any, Any, None]) -> None:
        self._health.withhold(engine, _LOADING)
        self._loading[engine.name] = asyncio.create_task(self._until_done(engine, work))

    async def _until_done(self, engine: EngineEndpoint, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            # Else the engine was replaced: the one with its name now has its own task.
            if self._loading.get(engine.name) is asyncio.current_task():
                del self._loading[engine.name]
                self._health.put_in_service(engine)
                self._on_ready()

    async def _load(self, engine: EngineEndpoint, loads: Loads) -> None:
        for name, data in loads.items():
            answer = await broadcast.ask_one(self._client, engine, LOAD, data, _JSON, self._limit_s)
            message = broadcast.error_message(bytes(answer.body))
            # Another router process may have been faster.
            if answer.status_code >= 400 and _ALREADY not in message:
                logger.warning("%s did not load adapter %r: %r", engine.name, name[:200], message)


def _union(all_loads: Collection[Loads]) -> dict[str, bytes]:
    return {name: data for loads in all_loads for name, data in loads.items()}


def _name_in(data: bytes) -> str | None:
    try:
        name = msgspec.json.decode(data)["lora_name"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None
