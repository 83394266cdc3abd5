"""LoRA adapters that were loaded while engines served: who comes later is asked to load them too.

Engines with our routes say which ones they were asked to load, so that nobody else has to remember:
a router that was started anew, or another of its processes, knows as much. Not what they list as
models: that may be theirs by their arguments, which the next deployment need not have. Before
engines of others, it is what this router process was asked to load.
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
_LOADS = "its adapters are being loaded"
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
"""Bodies of requests to load, by the adapters' names."""


class LoraAdapters:
    """Has all engines load what the others have. `limit_s`: of one load. `on_ready` is called when
    an engine may get requests."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        health: Health,
        limit_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._client, self._health, self._limit_s = client, health, limit_s
        self._on_ready = on_ready
        self._loads: dict[str, bytes] = {}  # that we were asked for
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._leveling: asyncio.Task[None] | None = None

    def done(self, path: str, data: bytes) -> None:
        """All engines did what was asked of them."""
        name = _name_in(data)
        if path == LOAD and name is not None:
            self._loads[name] = data
        elif path == UNLOAD and name is not None:
            self._loads.pop(name, None)

    def welcome(self, engine: EngineEndpoint, others: Collection[EngineEndpoint]) -> None:
        """It is new, and `others` were there: it gets nothing, if there are others, before it has
        what they have."""
        if self._loads or others:
            self._hold(engine, self._load_others(engine, others))

    def level(self, topology: Topology) -> None:
        """Its engines were there before this router: see that all have what any has."""
        if len(topology.engines) > 1:
            self._leveling = asyncio.create_task(self._level(topology))

    async def close(self) -> None:
        """Load nothing more."""
        tasks = [*self._loading.values(), *([self._leveling] if self._leveling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what is missing ---------------------------------------------------------------------

    async def _level(self, topology: Topology) -> None:
        said = await self._said(topology.engines)
        every = _union(said.values())
        for engine, loads in said.items():
            missing = {name: every[name] for name in every.keys() - loads.keys()}
            if missing and engine in topology.engines:  # still
                self._hold(engine, self._load(engine, missing))

    async def _load_others(
        self, engine: EngineEndpoint, others: Collection[EngineEndpoint]
    ) -> None:
        # Who is still being told has not all of it.
        said = await self._said([one for one in others if one.name not in self._loading])
        await self._load(engine, _union(said.values()) if said else dict(self._loads))

    async def _said(self, engines: Collection[EngineEndpoint]) -> dict[EngineEndpoint, Loads]:
        """What each was asked to load, of those that say so."""
        answers = await asyncio.gather(*map(self._loaded, engines))
        pairs = zip(engines, answers, strict=True)
        return {engine: loads for engine, loads in pairs if loads is not None}

    async def _loaded(self, engine: EngineEndpoint) -> Loads | None:
        timeout = aiohttp.ClientTimeout(total=_ASK_S)
        try:
            async with self._client.get(f"{engine.url}{LOADED}", timeout=timeout) as answer:
                listed = _LISTS.decode(await answer.read()) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ConnectionError, msgspec.MsgspecError):
            return None
        if listed is None:
            return None
        return {load.lora_name: msgspec.json.encode(load) for load in listed}

    # ---- loading -------------------------------------------------------------------------------

    def _hold(self, engine: EngineEndpoint, work: Coroutine[Any, Any, None]) -> None:
        self._health.hold(engine, _LOADS)
        self._loading[engine.name] = asyncio.create_task(self._until_done(engine, work))

    async def _until_done(self, engine: EngineEndpoint, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            # Who has its name by now waits for loads of its own.
            if self._loading.get(engine.name) is asyncio.current_task():
                del self._loading[engine.name]
                self._health.release(engine)
                self._on_ready()

    async def _load(self, engine: EngineEndpoint, loads: Loads) -> None:
        for name, data in loads.items():
            answer = await broadcast.ask_one(self._client, engine, LOAD, data, _JSON, self._limit_s)
            said = broadcast.reason(bytes(answer.body))
            # Another process of the router's may have been faster.
            if answer.status_code >= 400 and _ALREADY not in said:
                logger.warning("%s did not load adapter %s: %s", engine.name, name, said)


def _union(all_loads: Collection[Loads]) -> dict[str, bytes]:
    return {name: data for loads in all_loads for name, data in loads.items()}


def _name_in(data: bytes) -> str | None:
    try:
        name = msgspec.json.decode(data)["lora_name"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None
