"""The driver of one deployment, in the process of `disagg serve`: owns its engines' actors and
restarts its supervisor.

Ray ends an actor with the process that created it. So the driver creates all actors, at the
supervisor's request. The supervisor may die without them, and none of them outlives the driver.
Until a new supervisor runs, a `Fallback` does its work in the driver. The router, which may serve
several deployments, has an owner of its own (`router_owner.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg.cluster import pools
from disagg.cluster.control import NAME
from disagg.cluster.engines import Engine, EngineRecord, NotNow, engine_from
from disagg.cluster.supervisor.actor import SupervisorActor
from disagg.cluster.supervisor.fallback import Fallback
from disagg.cluster.supervisor.loop import (
    CreateEngine,
    DeploymentFailed,
    DeploymentState,
    EngineRemoved,
    EnginesChanged,
    Event,
    LogEvent,
    SendEngines,
)
from disagg.cluster.supervisor.restarts import SendToRouter, pause_s, pause_text
from disagg.cluster.supervisor.step import RAY_FAILS_S
from disagg.engine.spec import EngineInfo
from disagg.errors import StartupError
from disagg.router.topology import Away

_GRACE_S, _STOP_S = 3.0, 4.0
_REPORT_S, _LATE_S = 5.0, 30.0
# Longer than a step, which may wait for several processes that do not end, one after the other.
_STUCK_S = 300.0
_BEGIN_S = 120.0
_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 0.5, 30.0, 300.0


class Driver:
    """Owns the actors of one deployment.

    `send` sends its engines to the router. `tell(line, log_tail)` is called for each event;
    `log_tail` may be empty. Create the driver before the engines start, so that the supervisor's
    process is ready when they serve.
    """

    def __init__(
        self,
        deployment: str,
        run_id: str,
        node_id: str,
        send: SendToRouter,
        tell: Callable[[str, str], None],
    ) -> None:
        self.name = deployment
        self.engines: Sequence[EngineInfo] = ()
        """The engines that serve."""
        self._run_id, self._node_id = run_id, node_id
        self._send, self.tell = send, tell
        self._state: DeploymentState | None = None
        self._owned: dict[str, Engine] = {}
        self._deaths = 0
        self._up_at = self._restart_at = 0.0
        self._died_at: float | None = None
        self._ray_fails_since: float | None = None
        self._pid: Any = None
        self._next_report: Any = None
        self._reported = False
        self._asked_at = 0.0
        self._numbers = itertools.count()
        self._actor: Any = self._create_supervisor()
        self._fallback: Fallback | None = None
        self._next_actor: Any = None
        self._ready: Any = None
        self._created_at = 0.0

    @property
    def supervisor_pid(self) -> int | None:
        """The supervisor's process id; None if there is no supervisor."""
        if self._pid is None:
            return None
        pid: int = ray.get(self._pid, timeout=_BEGIN_S)
        return pid

    @property
    def awaited(self) -> Any | None:
        """Ray's reference for which `step` waits; None while there is a fallback."""
        return None if self._actor is None else self._next_report

    @property
    def owned(self) -> Sequence[Engine]:
        """All engines that exist."""
        return list(self._owned.values())

    def own(self, engines: Sequence[Engine]) -> None:
        """Take these engines over; `stop` ends them."""
        self._owned = {engine.name: engine for engine in engines}

    def begin(self, state: DeploymentState) -> None:
        """Start the supervisor on this deployment; returns when it works. Raises StartupError."""
        self._state = state
        self._begin()
        deadline = time.monotonic() + _BEGIN_S
        while not self.engines:
            problem = self.step(_PAUSE_S)
            if problem is not None or time.monotonic() > deadline:
                raise StartupError(problem or f"the supervisor did not begin in {_BEGIN_S:g} s")

    def step(self, timeout_s: float) -> str | None:
        """Carry out the supervisor's requests for up to `timeout_s`.

        Returns why the deployment cannot go on, or None.
        """
        try:
            problem = self._step(timeout_s)
        except RayError as error:  # Ray is busy with a death; the next step tries again
            return self._ray_failed(error)
        self._ray_fails_since = None
        return problem

    def _step(self, timeout_s: float) -> str | None:
        if self._actor is None:
            return self._step_of_fallback(timeout_s)
        try:
            if not ray.wait([self._next_report], timeout=timeout_s)[0]:
                # The first report waits for the supervisor's process to start, maybe while engines
                # start too.
                late_s = _LATE_S if self._reported else _BEGIN_S
                if time.monotonic() - self._asked_at > late_s:
                    self._lost(f"it gave no answer for {late_s:g} s")
                return None
            report = ray.get(self._next_report)
            self._reported = True
            self._ask_for_report()
        except RayError as error:
            self._lost(type(error).__name__)
            return None
        if self._died_at is not None:
            took_s = time.monotonic() - self._died_at
            self._died_at, self._up_at = None, time.monotonic()
            self.tell(f"the supervisor is back after {took_s:.1f} s", "")
        problems = [self._do(event) for event in report.events]
        if report.silent_s > _STUCK_S:
            self._lost(f"it did nothing for {_STUCK_S:g} s")
        return next((problem for problem in problems if problem), None)

    def _ray_failed(self, error: RayError) -> str | None:
        now = time.monotonic()
        self._ray_fails_since = self._ray_fails_since or now
        time.sleep(_PAUSE_S)
        lasting = now - self._ray_fails_since > RAY_FAILS_S
        return f"Ray did not answer for {RAY_FAILS_S:g} s: {error}" if lasting else None

    def close(self) -> None:
        """End the supervisor, so that it restarts nothing while the deployment stops."""
        for actor in (self._actor, self._next_actor):
            if actor is not None:
                ray.kill(actor)
        if self._fallback is not None:
            self._fallback.close()
        self._actor = self._next_actor = self._fallback = None

    def give_up(self) -> None:
        """End supervisor and engines, and let the router refuse requests for them."""
        self.close()
        self.engines = ()
        self._send((), {name: Away("given up", returns=False) for name in self._owned})
        stop([self])

    # ---- the supervisor's events ---------------------------------------------------------------

    def _do(self, event: Event) -> str | None:
        match event:
            case LogEvent():
                self.tell(event.what, event.log_tail)
            case EnginesChanged():
                assert self._state is not None
                self.engines = event.serving
                for info in event.serving:
                    if (engine := self._owned.get(info.name)) is not None:
                        engine.served = True
                self._state = replace(self._state, wanted=event.wanted, before=event.before)
            case EngineRemoved():
                self._owned.pop(event.name, None)
            case CreateEngine():
                self._answer(event.number, self._create_engine(event))
            case SendEngines():
                self._send(event.engines, event.down)
                self._answer(event.number, None)
            case DeploymentFailed():
                return event.why
        return None

    def _create_engine(self, event: CreateEngine) -> Any:
        name = event.spec.name
        if (last := self._owned.get(name)) is not None:
            ray.kill(last.actor)  # it is dead, or was created too late for the supervisor
        try:
            leader = pools.leader_of(event.spec, self._owned.values())
            actor = pools.create(event.spec, event.node_id, event.avoid)
        except (NotNow, RayError):
            return None
        record = EngineRecord(event.spec, actor, event.node_id, deaths=event.deaths, leader=leader)
        self._owned[name] = engine_from(record)
        return actor

    def _answer(self, number: int, actor: Any) -> None:
        if self._actor is not None:
            self._actor.made.remote(number, actor)
        elif self._fallback is not None:
            self._fallback.made(number, actor)

    # ---- the supervisor's actor ----------------------------------------------------------------

    def _create_supervisor(self) -> Any:
        here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        name = f"{NAME}{next(self._numbers)}"
        options = {
            "name": name,
            "namespace": self._run_id,
            "num_cpus": 0,
            "scheduling_strategy": here,
        }
        return ray.remote(SupervisorActor).options(**options).remote(self.name)

    def _begin(self) -> None:
        self._pid = self._actor.begin.remote(self._current_state())
        self._up_at, self._reported = time.monotonic(), False
        self._ask_for_report()

    def _current_state(self) -> DeploymentState:
        assert self._state is not None
        records = [engine.record for engine in self._owned.values()]
        return replace(self._state, engines=records)

    def _ask_for_report(self) -> None:
        self._next_report, self._asked_at = self._actor.report.remote(_REPORT_S), time.monotonic()

    def _lost(self, why: str) -> None:
        """End a supervisor that died or hangs, and start the fallback. Engines do not notice."""
        now = time.monotonic()
        self._deaths = 1 if now - self._up_at > _STEADY_S else self._deaths + 1
        self._died_at = self._died_at or now
        ray.kill(self._actor)
        self._actor = self._pid = None
        self.tell(f"the supervisor died: {why}; {self._schedule_restart()}", "")
        self._fallback = Fallback(self._current_state())

    def _schedule_restart(self) -> str:
        wait_s = pause_s(self._deaths, _PAUSE_S, _LONGEST_PAUSE_S)
        self._restart_at = time.monotonic() + wait_s
        return f"starting it again{pause_text(wait_s)}"

    def _step_of_fallback(self, timeout_s: float) -> str | None:
        """Carry out the fallback's requests, until another supervisor can begin."""
        assert self._fallback is not None
        ready = self._next_is_ready()
        if ready:
            self._fallback.stop()  # fallback and supervisor must never work at the same time
        problems = [self._do(event) for event in self._fallback.events(timeout_s)]
        if ready and (self._fallback.over or self._fallback.silent_s > _STUCK_S):
            self._actor, self._next_actor, self._fallback = self._next_actor, None, None
            self._begin()
        return next((problem for problem in problems if problem), None)

    def _next_is_ready(self) -> bool:
        """Whether the next supervisor's process is ready. Creates it when its pause is over."""
        now = time.monotonic()
        if self._next_actor is None:
            if now >= self._restart_at:
                self._next_actor, self._created_at = self._create_supervisor(), now
                self._ready = self._next_actor.__ray_ready__.remote()
            return False
        try:
            if ray.wait([self._ready], timeout=0)[0]:
                ray.get(self._ready)
                return True
            why = f"it took more than {_BEGIN_S:g} s" if now - self._created_at > _BEGIN_S else None
        except RayError as error:
            why = type(error).__name__
        if why is not None:
            ray.kill(self._next_actor)
            self._next_actor = None
            self._deaths += 1
            self.tell(f"the supervisor did not start: {why}; {self._schedule_restart()}", "")
        return False


def stop(drivers: Sequence[Driver]) -> None:
    """End the engines of all these drivers. Never raises."""
    engines = [engine for driver in drivers for engine in driver.owned]
    for driver in drivers:
        driver.own(())
    pools.stop(engines, _GRACE_S, _STOP_S, lambda line: drivers[0].tell(line, ""))
