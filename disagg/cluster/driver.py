"""The driver's part while a deployment serves: owns the actors, and brings back the supervisor.

Ray ends an actor with the process that made it. All are made here, at the supervisor's wish, so
that its death is nobody else's, and so that nothing outlives this process. Until there is another
supervisor, a deputy looks after all from here.
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

from disagg.cluster import pools, router_handle
from disagg.cluster.control import NAME
from disagg.cluster.engines import Engine, Held, NotNow, engine_of
from disagg.cluster.router_handle import RouterHandle
from disagg.cluster.supervisor.actor import SupervisorActor
from disagg.cluster.supervisor.fallback import Fallback
from disagg.cluster.supervisor.loop import (
    Changed,
    Event,
    Gone,
    Hopeless,
    Inheritance,
    MakeEngine,
    MakeRouter,
    Said,
)
from disagg.cluster.supervisor.restarts import in_words, pause_s
from disagg.cluster.supervisor.step import RAY_FAILS_S
from disagg.engine.spec import EngineInfo
from disagg.errors import StartupError

_GRACE_S, _STOP_S = 3.0, 4.0
_REPORT_S, _LATE_S = 5.0, 30.0
# A step may wait for processes that do not end, one after the other.
_STUCK_S = 300.0
_BEGIN_S = 120.0
_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 0.5, 30.0, 300.0


class Driver:
    """Of one deployment's actors. `tell` gets what happened, and log lines where there are any.

    Made before the engines start, so that the supervisor's process is there when they serve.
    """

    def __init__(
        self, deployment: str, node_id: str, router: RouterHandle, tell: Callable[[str, str], None]
    ) -> None:
        self.engines: Sequence[EngineInfo] = ()
        """Those that serve."""
        self._name, self._node_id = deployment, node_id
        self._router, self._tell = router, tell
        self._given: Inheritance | None = None
        self._held: dict[str, Engine] = {}
        self._deaths = 0
        self._up_at = self._again_at = 0.0
        self._died_at: float | None = None
        self._ray_fails_since: float | None = None
        self._pid: Any = None
        self._next: Any = None
        self._reported = False
        self._asked_at = 0.0
        self._numbers = itertools.count()
        self._actor: Any = self._created()
        self._deputy: Fallback | None = None
        self._coming: Any = None
        self._ready: Any = None
        self._created_at = 0.0

    @property
    def supervisor_pid(self) -> int | None:
        """The supervisor's process, if there is one."""
        if self._pid is None:
            return None
        pid: int = ray.get(self._pid, timeout=_BEGIN_S)
        return pid

    def hold(self, engines: Sequence[Engine]) -> None:
        """End these with everything else."""
        self._held = {engine.name: engine for engine in engines}

    def begin(self, given: Inheritance) -> None:
        """Have these looked after; returns when they are. Raises StartupError."""
        self._given = given
        self._begin()
        deadline = time.monotonic() + _BEGIN_S
        while not self.engines:
            problem = self.step(_PAUSE_S)
            if problem is not None or time.monotonic() > deadline:
                raise StartupError(problem or f"the supervisor did not begin in {_BEGIN_S:g} s")

    def step(self, timeout_s: float) -> str | None:
        """Do for up to `timeout_s` what the supervisor wants.

        Returns why the deployment cannot go on, or None.
        """
        try:
            problem = self._step(timeout_s)
        except RayError as error:  # Ray itself is busy with a death; the next time will do
            return self._ray_failed(error)
        self._ray_fails_since = None
        return problem

    def _step(self, timeout_s: float) -> str | None:
        if self._actor is None:
            return self._step_of_deputy(timeout_s)
        try:
            if not ray.wait([self._next], timeout=timeout_s)[0]:
                # The first answer waits for a process that starts, maybe beside engines that do.
                late_s = _LATE_S if self._reported else _BEGIN_S
                if time.monotonic() - self._asked_at > late_s:
                    self._lost(f"it gave no answer for {late_s:g} s")
                return None
            report = ray.get(self._next)
            self._reported = True
            self._ask()
        except RayError as error:
            self._lost(type(error).__name__)
            return None
        if self._died_at is not None:
            took_s = time.monotonic() - self._died_at
            self._died_at, self._up_at = None, time.monotonic()
            self._tell(f"the supervisor is back after {took_s:.1f} s", "")
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
        """End the supervisor, so that it brings back nothing that is about to be ended."""
        for actor in (self._actor, self._coming):
            if actor is not None:
                ray.kill(actor)
        if self._deputy is not None:
            self._deputy.close()
        self._actor = self._coming = self._deputy = None

    def stop_engines(self) -> None:
        """End all engines. Raises nothing."""
        pools.stop(list(self._held.values()), _GRACE_S, _STOP_S)

    # ---- what the supervisor says --------------------------------------------------------------

    def _do(self, event: Event) -> str | None:
        match event:
            case Said():
                self._tell(event.what, event.log_tail)
            case Changed():
                assert self._given is not None
                self.engines = event.serving
                for info in event.serving:
                    if (held := self._held.get(info.name)) is not None:
                        held.served = True
                self._given = replace(self._given, wanted=event.wanted, before=event.before)
            case Gone():
                self._held.pop(event.name, None)
            case MakeEngine():
                self._made(event.number, self._engine(event))
            case MakeRouter():
                self._made(event.number, self._new_router(event))
            case Hopeless():
                return event.why
        return None

    def _engine(self, order: MakeEngine) -> Any:
        name = order.spec.name
        if (last := self._held.get(name)) is not None:
            ray.kill(last.actor)  # dead already, or made when nobody waited for it any more
        try:
            actor = pools.create(order.spec, order.node_id, order.avoid)
        except (NotNow, RayError):
            return None
        held = Held(order.spec, actor, order.node_id, deaths=order.deaths)
        self._held[name] = engine_of(held)
        return actor

    def _new_router(self, order: MakeRouter) -> Any:
        ray.kill(self._router.actor)
        try:
            self._router.actor = router_handle.create(order.spec)
        except (NotNow, RayError):
            return None
        return self._router.actor

    def _made(self, number: int, actor: Any) -> None:
        if self._actor is not None:
            self._actor.made.remote(number, actor)
        elif self._deputy is not None:
            self._deputy.made(number, actor)

    # ---- its life ------------------------------------------------------------------------------

    def _created(self) -> Any:
        here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        name = f"{NAME}{next(self._numbers)}"
        options = {"name": name, "num_cpus": 0, "scheduling_strategy": here}
        return ray.remote(SupervisorActor).options(**options).remote(self._name)

    def _begin(self) -> None:
        self._pid = self._actor.begin.remote(self._inheritance())
        self._up_at, self._reported = time.monotonic(), False
        self._ask()

    def _inheritance(self) -> Inheritance:
        assert self._given is not None
        held = [engine.held for engine in self._held.values()]
        return replace(self._given, engines=held, router_actor=self._router.actor)

    def _ask(self) -> None:
        self._next, self._asked_at = self._actor.report.remote(_REPORT_S), time.monotonic()

    def _lost(self, why: str) -> None:
        """It died, or is as good as dead; the engines do not notice."""
        now = time.monotonic()
        self._deaths = 1 if now - self._up_at > _STEADY_S else self._deaths + 1
        self._died_at = self._died_at or now
        ray.kill(self._actor)
        self._actor = self._pid = None
        self._tell(f"the supervisor died: {why}; {self._pause()}", "")
        self._deputy = Fallback(self._inheritance())

    def _pause(self) -> str:
        wait_s = pause_s(self._deaths, _PAUSE_S, _LONGEST_PAUSE_S)
        self._again_at = time.monotonic() + wait_s
        return f"starting it again{in_words(wait_s)}"

    def _step_of_deputy(self, timeout_s: float) -> str | None:
        """Do what the deputy wants, until another supervisor can begin."""
        assert self._deputy is not None
        there = self._is_there()
        if there:
            self._deputy.stop()  # never two at once
        problems = [self._do(event) for event in self._deputy.events(timeout_s)]
        if there and (self._deputy.over or self._deputy.silent_s > _STUCK_S):
            self._actor, self._coming, self._deputy = self._coming, None, None
            self._begin()
        return next((problem for problem in problems if problem), None)

    def _is_there(self) -> bool:
        """Whether the next supervisor is; it is made when its time has come."""
        now = time.monotonic()
        if self._coming is None:
            if now >= self._again_at:
                self._coming, self._created_at = self._created(), now
                self._ready = self._coming.__ray_ready__.remote()
            return False
        try:
            if ray.wait([self._ready], timeout=0)[0]:
                ray.get(self._ready)
                return True
            why = f"it took more than {_BEGIN_S:g} s" if now - self._created_at > _BEGIN_S else None
        except RayError as error:
            why = type(error).__name__
        if why is not None:
            ray.kill(self._coming)
            self._coming = None
            self._deaths += 1
            self._tell(f"the supervisor did not start: {why}; {self._pause()}", "")
        return False
