"""One supervisor at work, and what it and the driver tell each other.

Ray ends an actor with the process that made it, so engines and router are made by the driver
(`owner.py`), at the supervisor's wish. It asks for actors, and says what happened, by events.
Runs in the supervisor's actor, and in the driver itself until there is a new one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from disagg.cluster import pools
from disagg.cluster.control import Orders
from disagg.cluster.engines import Held, NotNow, engine_of
from disagg.cluster.router_handle import RouterHandle, RouterSpec
from disagg.cluster.supervisor.restarts import Restarts
from disagg.cluster.supervisor.scaling import Scaler
from disagg.cluster.supervisor.step import Supervisor
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
    """To be answered with `made`. deaths: in a row."""

    number: int
    spec: EngineSpec
    node_id: str | None
    avoid: str | None
    deaths: int


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


class SupervisorLoop:
    """`post` gets the events, in the thread that `run`s; all else may be called from any other."""

    def __init__(self, orders: Orders, post: Callable[[Event], None]) -> None:
        self._orders, self._post = orders, post
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._stepped_at = time.monotonic()
        self._stopped = threading.Event()

    @property
    def silent_s(self) -> float:
        """Seconds since its last step, or since it was made."""
        return time.monotonic() - self._stepped_at

    def made(self, number: int, actor: Any) -> None:
        """The actor that was asked for; None: not now."""
        if (asked := self._asked.pop(number, None)) is not None:
            asked.set_result(actor)

    def stop(self) -> None:
        """Have `run` return after its step."""
        self._stopped.set()

    def run(self, given: Inheritance) -> None:
        """Look after this until it is hopeless, or until `stop`."""

        def tell(what: str, log_tail: str) -> None:
            self._post(Said(what, log_tail))
            self._orders.say(what)

        router = RouterHandle(given.router, self._make_router)
        router.adopt(given.router_actor)
        healer = Restarts(
            [engine_of(held) for held in given.engines],
            router,
            given.wanted.engine,
            tell,
            self._make_engine,
            lambda name: self._post(Gone(name)),
        )
        healer.adopt()
        scaler = Scaler(healer, given.wanted, given.before, given.run.spec, tell)
        supervisor = Supervisor(healer, scaler, self._orders, tell, private=given.private)
        shown: Changed | None = None
        while True:
            now = Changed(tuple(healer.engines), scaler.wanted, scaler.before)
            if now != shown:
                shown = now
                self._post(now)
            if self._stopped.is_set():
                return
            if (problem := supervisor.step(_STEP_S)) is not None:
                self._post(Hopeless(problem))
                return
            self._stepped_at = time.monotonic()

    def _make_engine(
        self, spec: EngineSpec, node_id: str | None, avoid: str | None, deaths: int
    ) -> Any:
        return self._make(lambda number: MakeEngine(number, spec, node_id, avoid, deaths))

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
