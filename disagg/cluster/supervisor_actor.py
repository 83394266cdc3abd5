"""The supervisor's actor: looks after a deployment, in a thread of its own.

It may die at any time: Ray ends an actor with the process that made it, so engines and router are
made by the driver (`owner.py`), which also starts the next supervisor with all that this one knew.
It asks for actors, and says what happened, by events that the driver waits for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from disagg.cluster import pools
from disagg.cluster.control import Control, News, Order
from disagg.cluster.engines import Held, NotNow, engine_of
from disagg.cluster.healing import Healer
from disagg.cluster.router_life import Router, RouterSpec
from disagg.cluster.scaling import Scaler
from disagg.cluster.supervisor import Supervisor
from disagg.config import Deployment
from disagg.engine.spec import EngineInfo, EngineSpec

_STEP_S = 0.5
_MADE_S = 30.0


@dataclass(frozen=True)
class Inheritance:
    """All that a new supervisor is told: what there is, what there should be, and what a change
    that is under way would be taken back to. private: nobody else uses this Ray."""

    run: pools.Run
    wanted: Deployment
    before: Deployment | None
    engines: Sequence[Held]
    router: RouterSpec
    router_actor: Any
    private: bool


@dataclass(frozen=True)
class Said:
    """A line of what happened, and log lines where there are any."""

    what: str
    log_tail: str


@dataclass(frozen=True)
class MakeEngine:
    """To be answered with `made`."""

    number: int
    spec: EngineSpec
    node_id: str | None
    avoid: str | None


@dataclass(frozen=True)
class MakeRouter:
    """To be answered with `made`."""

    number: int
    spec: RouterSpec


@dataclass(frozen=True)
class Gone:
    """An engine was ended for good."""

    name: str


@dataclass(frozen=True)
class Changed:
    """serving: the engines that do, from now on."""

    serving: Sequence[EngineInfo]
    wanted: Deployment
    before: Deployment | None


@dataclass(frozen=True)
class Hopeless:
    """The deployment cannot go on."""

    why: str


Event = Said | MakeEngine | MakeRouter | Gone | Changed | Hopeless


@dataclass(frozen=True)
class Report:
    """silent_s: since the supervisor's last step."""

    events: Sequence[Event]
    silent_s: float


class SupervisorActor:
    """Made early; works from `begin` on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._stepped_at = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._control: Control | None = None

    # ---- the driver ----------------------------------------------------------------------------

    async def begin(self, given: Inheritance) -> int:
        """Look after this from now on. Returns the process id."""
        self._loop, self._control = asyncio.get_running_loop(), Control()
        self._stepped_at = time.monotonic()
        threading.Thread(target=self._run, args=(given,), name="supervisor", daemon=True).start()
        return os.getpid()

    async def report(self, wait_s: float) -> Report:
        """What happened since the last one, as soon as there is anything, for up to `wait_s`."""
        events = []
        try:
            events.append(await asyncio.wait_for(self._events.get(), wait_s))
        except TimeoutError:
            pass
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return Report(events, time.monotonic() - self._stepped_at)

    async def made(self, number: int, actor: Any) -> None:
        """The actor that was asked for; None: not now."""
        if (asked := self._asked.pop(number, None)) is not None:
            asked.set_result(actor)

    # ---- commands ------------------------------------------------------------------------------

    async def name(self) -> str:
        """The deployment's name."""
        self._begun()
        return self._name

    async def give(self, order: Order) -> tuple[int, int]:
        """See `Control`."""
        return self._begun().give(order)

    async def follow(self, number: int, after: int, wait_s: float) -> News:
        """See `Control`."""
        return await self._begun().follow(number, after, wait_s)

    def _begun(self) -> Control:
        if self._control is None:
            raise RuntimeError("the deployment does not serve yet")
        return self._control

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self, given: Inheritance) -> None:
        try:
            why = self._look_after(given)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)  # the next one may do better
        self._post(Hopeless(why))

    def _look_after(self, given: Inheritance) -> str:
        """Returns why the deployment cannot go on."""
        control = self._begun()

        def tell(what: str, log_tail: str) -> None:
            self._post(Said(what, log_tail))
            control.say(what)

        router = Router(given.router, self._make_router)
        router.adopt(given.router_actor)
        healer = Healer(
            [engine_of(held) for held in given.engines],
            router,
            given.wanted.engine,
            tell,
            self._make_engine,
            lambda name: self._post(Gone(name)),
        )
        healer.adopt()
        scaler = Scaler(healer, given.wanted, given.before, given.run.spec, tell)
        supervisor = Supervisor(healer, scaler, control, tell, private=given.private)
        shown: Changed | None = None
        while True:
            now = Changed(tuple(healer.engines), scaler.wanted, scaler.before)
            if now != shown:
                shown = now
                self._post(now)
            problem = supervisor.step(_STEP_S)
            if problem is not None:
                return problem
            self._stepped_at = time.monotonic()

    def _post(self, event: Event) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _make_engine(self, spec: EngineSpec, node_id: str | None, avoid: str | None) -> Any:
        return self._make(lambda number: MakeEngine(number, spec, node_id, avoid))

    def _make_router(self, spec: RouterSpec) -> Any:
        return self._make(lambda number: MakeRouter(number, spec))

    def _make(self, order: Callable[[int], Event]) -> Any:
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        self._post(order(number))
        try:
            actor = answer.result(_MADE_S)
        except TimeoutError:
            self._asked.pop(number, None)
            actor = None
        if actor is None:
            raise NotNow
        return actor
