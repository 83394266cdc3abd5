"""Follows the KV events of all engines that publish them, as engines come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import zmq.asyncio

from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.caches.events import EngineEvents, Source, Turns
from disagg.router.topology import EngineEndpoint


class Listeners:
    """One task for each engine. Only within a running event loop."""

    def __init__(self, caches: EngineCaches) -> None:
        self._caches, self._turns = caches, Turns(caches.index)
        self._context = zmq.asyncio.Context()
        self._tasks: dict[EngineEndpoint, asyncio.Task[None]] = {}
        self.events: dict[str, EngineEvents] = {}
        """By the engine's name."""

    def follow(self, engines: Sequence[EngineEndpoint]) -> None:
        """Follow these engines from now on, and no others."""
        wanted = [engine for engine in engines if engine.kv_events is not None]
        for engine in self._tasks.keys() - set(wanted):
            self._tasks.pop(engine).cancel()
            del self.events[engine.name]
            self._caches.leave(engine.name)
        for engine in wanted:
            if engine not in self._tasks:
                self._begin(engine)

    def _begin(self, engine: EngineEndpoint) -> None:
        assert engine.kv_events is not None
        source = Source(engine.kv_events, engine.kv_events_replay)
        picture = self._caches.join(engine.name)
        events = EngineEvents(engine.name, source, picture, self._turns, self._context)
        self.events[engine.name] = events
        self._tasks[engine] = asyncio.create_task(events.run())

    async def close(self) -> None:
        """Follow none any more."""
        tasks = list(self._tasks.values())
        self.follow(())
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._context.destroy(linger=0)
