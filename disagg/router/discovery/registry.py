"""The engines of a router now: found by its sources or added by operators, and how they leave.

An engine is its role and its URL. It keeps its name while the router lives; a new one gets the next
number. It serves while any source has it. Then it drains: it gets no new requests, and is gone when
its last request has ended and its last lease was fetched, or after `drain_s`. No request is ever
cut here: one that takes longer goes on, and continues elsewhere if its engine ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, get_args

from disagg.config import Role
from disagg.router.discovery.source import Source
from disagg.router.topology import Away, EngineEndpoint, parse_endpoint

logger = logging.getLogger(__name__)

OPERATORS = "operators"
CONFIGURED = "configured"
DRAINS = Away("drains", returns=False, leaves=True)
NONE_NOW = Away("has no engine now")
_LOOK_S = 0.2  # at the requests of engines that drain
_AGAIN_S = 5.0  # after a source that failed
_MOST_NAMES = 4096  # of engines that are gone
Key: TypeAlias = tuple[Role, str]


class Server(Protocol):
    """The router's server: `RouterServer` or `Processes`."""

    async def replace(
        self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]
    ) -> None: ...

    async def running(self) -> Mapping[str, int] | None: ...


@dataclass
class _Engine:
    """`drains_until`: monotonic; None while it serves. `is_told`: the server knows that it
    drains."""

    endpoint: EngineEndpoint
    drains_until: float | None = None
    is_told: bool = False
    sources: list[str] = field(default_factory=list)


class Registry:
    """`operators_add`: whether operators may add engines, so that a router without engines waits.
    `drain_s`: for which an engine that goes may finish its requests."""

    def __init__(
        self,
        configured: Sequence[EngineEndpoint],
        sources: Sequence[Source],
        *,
        drain_s: float,
        operators_add: bool = False,
    ) -> None:
        self._sources, self._drain_s = sources, drain_s
        self._awaited: set[Role] = {role for source in sources for role in source.roles}
        if sources or operators_add:
            self._awaited.add("decode")
        self._found: dict[str, dict[Key, EngineEndpoint]] = {}
        self._added: dict[Key, EngineEndpoint] = {}
        self._removed: set[Key] = set()
        """By operators; until no source has them any more."""
        self._engines: dict[Key, _Engine] = {}
        self._names: OrderedDict[Key, str] = OrderedDict()
        self._numbers: Counter[Role] = Counter()
        self._server: Server | None = None
        self._changed, self._lock = asyncio.Event(), asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self.report(CONFIGURED, configured)

    # ---- what the server is told ---------------------------------------------------------------

    @property
    def engines(self) -> list[EngineEndpoint]:
        """Those that get requests, by role and number."""
        serving = [one.endpoint for one in self._engines.values() if one.drains_until is None]
        return sorted(serving, key=lambda e: (e.role != "prefill", _number(e.name)))

    @property
    def down(self) -> dict[str, Away]:
        """Those that drain, and the roles without engines that wait for some, by name."""
        drains = [one.endpoint.name for one in self._engines.values() if one.drains_until]
        roles = {engine.role for engine in self.engines}
        empty = [role for role in get_args(Role) if role in self._awaited - roles]
        return {**dict.fromkeys(drains, DRAINS), **dict.fromkeys(empty, NONE_NOW)}

    def start(self, server: Server) -> None:
        """Keep the server's engines as the sources find them. The server has `engines` and `down`
        of now."""
        self._server = server
        self._tasks = [asyncio.create_task(self._keep_told())]
        self._tasks += [asyncio.create_task(self._run(source)) for source in self._sources]

    async def close(self) -> None:
        """Look no more; the server's engines stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what sources say ----------------------------------------------------------------------

    def report(self, source: str, engines: Collection[EngineEndpoint]) -> None:
        """These are all engines of this source."""
        self._found[source] = {(engine.role, engine.url): engine for engine in engines}
        self._settle()

    def _settle(self) -> None:
        """Draw the consequences of what is found and removed."""
        wanted: dict[Key, EngineEndpoint] = {}
        found_by = {**self._found, OPERATORS: self._added}
        for engines in found_by.values():
            wanted = {**engines, **wanted}
        self._removed &= wanted.keys()
        for key, found in wanted.items():
            if key not in self._removed:
                self._serves(key, found)
        for key, engine in self._engines.items():
            engine.sources = [name for name, engines in found_by.items() if key in engines]
            is_wanted = key in wanted and key not in self._removed
            if not is_wanted and engine.drains_until is None:
                logger.warning("%s drains: %s", engine.endpoint.name, engine.endpoint.url)
                engine.drains_until, engine.is_told = time.monotonic() + self._drain_s, False
                self._changed.set()

    def _serves(self, key: Key, found: EngineEndpoint) -> None:
        engine = self._engines.get(key)
        endpoint = replace(found, name=self._name(key))
        if engine is None:
            self._engines[key] = _Engine(endpoint)
            if self._server is not None:
                logger.warning("%s is new: %s", endpoint.name, endpoint.url)
        elif engine.endpoint != endpoint or engine.drains_until is not None:
            engine.endpoint, engine.drains_until = endpoint, None
        else:
            return
        self._changed.set()

    def _name(self, key: Key) -> str:
        name = self._names.get(key)
        if name is None:
            role = key[0]
            name = self._names[key] = f"{role}-{self._numbers[role]}"
            self._numbers[role] += 1
        self._names.move_to_end(key)
        gone = (one for one in self._names if one not in self._engines and one != key)
        if len(self._names) - len(self._engines) > _MOST_NAMES:
            del self._names[next(gone)]
        return name

    async def _run(self, source: Source) -> None:
        while True:
            try:
                await source.run(partial(self.report, source.name))
            except Exception:
                logger.exception("%s failed; the known engines stay", source.name)
            await asyncio.sleep(_AGAIN_S)

    # ---- what operators say --------------------------------------------------------------------

    async def listed(self) -> list[dict[str, Any]]:
        """All engines, for an operator: name, role, URL without secrets, state, who has it, and the
        requests that need it (None: not all router processes answer)."""
        running = await self._running()
        engines = sorted(
            self._engines.values(),
            key=lambda one: (one.endpoint.role != "prefill", _number(one.endpoint.name)),
        )
        return [_shown(engine, running) for engine in engines]

    async def add(self, role: Role, url: str) -> dict[str, Any]:
        """Add an engine, or take back its removal. Returns when it may get requests. Raises
        ConfigError."""
        given = parse_endpoint("", role, url, "url")
        key = role, given.url
        self._removed.discard(key)
        self._added[key] = given
        self._settle()
        await self._tell()
        return _shown(self._engines[key], await self._running())

    async def remove(self, name: str) -> dict[str, Any] | None:
        """Let an engine drain, whoever has it. Returns when it gets no new requests; None if there
        is no such engine."""
        for key, engine in self._engines.items():
            if engine.endpoint.name == name:
                self._added.pop(key, None)
                self._removed.add(key)
                self._settle()
                await self._tell()
                return _shown(engine, await self._running())
        return None

    # ---- keeping the server told ---------------------------------------------------------------

    async def _keep_told(self) -> None:
        while True:
            drains = any(one.drains_until is not None for one in self._engines.values())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if drains else None):
                    await self._changed.wait()
            try:
                await self._tell()
                await self._let_go()
            except Exception:
                logger.exception("the router was not told of its engines")
                await asyncio.sleep(_AGAIN_S)

    async def _tell(self) -> None:
        async with self._lock:
            if self._server is None or not self._changed.is_set():
                return
            self._changed.clear()
            draining = [one for one in self._engines.values() if one.drains_until is not None]
            try:
                await self._server.replace(self.engines, self.down)
            except BaseException:
                self._changed.set()
                raise
            for engine in draining:
                engine.is_told = True

    async def _let_go(self) -> None:
        """Forget the engines that have drained."""
        drains = {
            key: (engine, engine.drains_until)
            for key, engine in self._engines.items()
            if engine.drains_until is not None and engine.is_told
        }
        if not drains:
            return
        running = await self._running()
        now = time.monotonic()
        for key, (engine, until) in drains.items():
            if engine.drains_until != until:
                continue  # it came back meanwhile
            name = engine.endpoint.name
            left = None if running is None else running.get(name, 0)
            if left == 0:
                logger.warning("%s is drained", name)
            elif now >= until:
                logger.warning("%s is let go with %s requests", name, left or "some")
            else:
                continue
            del self._engines[key]
            self._changed.set()

    async def _running(self) -> Mapping[str, int] | None:
        """The requests that need each engine, by name; None if not all processes answer."""
        return {} if self._server is None else await self._server.running()


def _shown(engine: _Engine, running: Mapping[str, int] | None) -> dict[str, Any]:
    return {
        "name": engine.endpoint.name,
        "role": engine.endpoint.role,
        "url": engine.endpoint.url,
        "state": "serves" if engine.drains_until is None else DRAINS.why,
        "sources": engine.sources,
        "in_flight": None if running is None else running.get(engine.endpoint.name, 0),
    }


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
