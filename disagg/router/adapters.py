"""LoRA adapters that were loaded while engines served: who comes later is asked to load them too.

What this router was asked to load, not what engines list: that may be theirs by their arguments,
which the next deployment need not have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from disagg.router import everywhere
from disagg.router.health import Health
from disagg.router.topology import EngineEndpoint

logger = logging.getLogger(__name__)

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_LOADS = "its adapters are being loaded"
_JSON = (("content-type", "application/json"),)
_ALREADY = "has already been loaded"


class Adapters:
    """What all engines have loaded, by name. `limit_s`: of one load. `on_ready` is called when an
    engine may get requests."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        health: Health,
        limit_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._client, self._health, self._limit_s = client, health, limit_s
        self._on_ready = on_ready
        self._loads: dict[str, bytes] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}

    def done(self, path: str, data: bytes) -> None:
        """All engines did what was asked of them."""
        name = _name_in(data)
        if path == LOAD and name is not None:
            self._loads[name] = data
        elif path == UNLOAD and name is not None:
            self._loads.pop(name, None)

    def welcome(self, engine: EngineEndpoint) -> None:
        """It is new: it gets nothing, if there are others, before it has what they have."""
        if self._loads:
            self._health.hold(engine, _LOADS)
            self._loading[engine.name] = asyncio.create_task(self._load(engine))

    async def close(self) -> None:
        """Load nothing more."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, engine: EngineEndpoint) -> None:
        try:
            for name, data in list(self._loads.items()):
                call = everywhere.ask_one(self._client, engine, LOAD, data, _JSON, self._limit_s)
                answer = await call
                said = everywhere.reason(bytes(answer.body))
                # Another process of the router's may have been faster.
                if answer.status_code >= 400 and _ALREADY not in said:
                    logger.warning("%s did not load adapter %s: %s", engine.name, name, said)
        finally:
            # Who has its name by now waits for loads of its own.
            if self._loading.get(engine.name) is asyncio.current_task():
                del self._loading[engine.name]
                self._health.release(engine)
                self._on_ready()


def _name_in(data: bytes) -> str | None:
    try:
        name = msgspec.json.decode(data)["lora_name"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None
