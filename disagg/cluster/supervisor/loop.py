"""The supervisor's loop, and the events that it sends to the driver.

Ray ends an actor with the process that created it. So the driver (`cluster/driver.py`) creates the
actors of engines, at the supervisor's request. The router may be that of several deployments, so it
has one owner, in the driver's process. The loop requests actors, sends engines to the router and
reports changes by events. It runs in the supervisor's actor, and in the driver (`Fallback`) while
there is no supervisor.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from disagg.cluster import pools
from disagg.cluster.control import Commands
from disagg.cluster.engines import EngineRecord, NotNow, engine_from
from disagg.cluster.supervisor.restarts import Restarts
from disagg.cluster.supervisor.scaling import Scaler
from disagg.cluster.supervisor.step import Supervisor
from disagg.config import Deployment
from disagg.engine.spec import EngineInfo, EngineSpec
from disagg.router.topology import Away

_STEP_S = 0.5
_CREATE_S = 30.0
_SEND_S = 5.0


@dataclass(frozen=True)
class DeploymentState:
    """The state with which a new supervisor begins.

    wanted: the deployment to reach. before: the deployment to return to if the current change
    fails; None if there is no change. engines: those that exist. private: this deployment alone
    uses this Ray.
    """

    run: pools.Run
    wanted: Deployment
    before: Deployment | None
    engines: Sequence[EngineRecord]
    private: bool


@dataclass(frozen=True)
class LogEvent:
    """A line for the log of `disagg serve`. log_tail: an engine's last log lines, or empty."""

    what: str
    log_tail: str


@dataclass(frozen=True)
class CreateEngine:
    """Create an engine's actor, and answer with `made`. node_id: the preferred node. avoid: a node
    that must not be used. deaths: the engine's deaths in a row."""

    number: int
    spec: EngineSpec
    node_id: str | None
    avoid: str | None
    deaths: int


@dataclass(frozen=True)
class SendEngines:
    """Send the engines to the router, and answer with `made`. down: those that do not serve, by
    name."""

    number: int
    engines: Sequence[EngineInfo]
    down: Mapping[str, Away]


@dataclass(frozen=True)
class EngineRemoved:
    """An engine was ended and will not restart."""

    name: str


@dataclass(frozen=True)
class EnginesChanged:
    """serving: the engines that serve now. wanted, before: as in `DeploymentState`."""

    serving: Sequence[EngineInfo]
    wanted: Deployment
    before: Deployment | None


@dataclass(frozen=True)
class DeploymentFailed:
    """The deployment cannot go on."""

    why: str


Event = LogEvent | CreateEngine | SendEngines | EngineRemoved | EnginesChanged | DeploymentFailed


class SupervisorLoop:
    """`post` is called with each event, in the thread of `run`. The other methods may be called
    from any thread."""

    def __init__(self, commands: Commands, post: Callable[[Event], None]) -> None:
        self._commands, self._post = commands, post
        self._pending: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._stepped_at = time.monotonic()
        self._stopped = threading.Event()

    @property
    def silent_s(self) -> float:
        """Seconds since the last step, or since this object was created."""
        return time.monotonic() - self._stepped_at

    def made(self, number: int, actor: Any) -> None:
        """Answer request `number`: with its actor, or None if there is none now."""
        if (asked := self._pending.pop(number, None)) is not None:
            asked.set_result(actor)

    def stop(self) -> None:
        """Let `run` return after its current step."""
        self._stopped.set()

    def run(self, state: DeploymentState) -> None:
        """Supervise this deployment until it cannot go on, or until `stop`."""

        def tell(what: str, log_tail: str) -> None:
            self._post(LogEvent(what, log_tail))
            self._commands.say(what)

        restarts = Restarts(
            [engine_from(record) for record in state.engines],
            self._send,
            state.wanted.engine,
            tell,
            self._create_engine,
            lambda name: self._post(EngineRemoved(name)),
        )
        restarts.adopt()
        scaler = Scaler(restarts, state.wanted, state.before, state.run.replica, tell)
        supervisor = Supervisor(restarts, scaler, self._commands, tell, private=state.private)
        shown: EnginesChanged | None = None
        while True:
            now = EnginesChanged(tuple(restarts.engines), scaler.wanted, scaler.before)
            if now != shown:
                shown = now
                self._post(now)
            if self._stopped.is_set():
                return
            if (problem := supervisor.step(_STEP_S)) is not None:
                self._post(DeploymentFailed(problem))
                return
            self._stepped_at = time.monotonic()

    def _create_engine(
        self, spec: EngineSpec, node_id: str | None, avoid: str | None, deaths: int
    ) -> Any:
        make = partial(CreateEngine, spec=spec, node_id=node_id, avoid=avoid, deaths=deaths)
        actor = self._ask(make, _CREATE_S)
        if actor is None:
            raise NotNow
        return actor

    def _send(self, engines: Sequence[EngineInfo], down: Mapping[str, Away]) -> None:
        self._ask(partial(SendEngines, engines=tuple(engines), down=dict(down)), _SEND_S)

    def _ask(self, event: Callable[[int], Event], wait_s: float) -> Any:
        """Post an event with a number. Returns its answer, or None if there is none in time."""
        number, answer = next(self._numbers), Future[Any]()
        self._pending[number] = answer
        self._post(event(number))
        try:
            return answer.result(wait_s)
        except TimeoutError:
            self._pending.pop(number, None)
            return None
