"""The driver's part while a deployment serves: owns the actors, and brings back the supervisor.

Ray ends an actor with the process that made it. All are made here, at the supervisor's wish, so
that its death is nobody else's, and so that nothing outlives this process.
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

from disagg.cluster import pools, router_life
from disagg.cluster.control import NAME
from disagg.cluster.engines import Engine, Held, NotNow, engine_of
from disagg.cluster.healing import in_words, pause_s
from disagg.cluster.router_life import Router
from disagg.cluster.supervisor import RAY_FAILS_S
from disagg.cluster.supervisor_actor import (
    Changed,
    Event,
    Gone,
    Hopeless,
    Inheritance,
    MakeEngine,
    MakeRouter,
    Said,
    SupervisorActor,
)
from disagg.engine.spec import EngineInfo
from disagg.errors import StartupError

_GRACE_S, _STOP_S = 3.0, 4.0
_REPORT_S, _LATE_S = 5.0, 30.0
# A step may wait for processes that do not end, one after the other.
_STUCK_S = 300.0
_BEGIN_S = 120.0
_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 0.5, 30.0, 300.0


class Owner:
    """Of one deployment's actors. `tell` gets what happened, and log lines where there are any.

    Made before the engines start, so that the supervisor's process is there when they serve. A
    spare one waits: to start a process takes seconds, in which nobody would look after engines.
    """

    def __init__(
        self, deployment: str, node_id: str, router: Router, tell: Callable[[str, str], None]
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
        self._spare: Any = None

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
            self._again(timeout_s)
            return None
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
        if not self._deaths or not report.events:  # at the start, or in a quiet moment
            self._spare = self._spare or self._created()
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
        for actor in (self._actor, self._spare):
            if actor is not None:
                ray.kill(actor)
        self._actor = self._spare = None

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
        self._held[name] = engine_of(Held(order.spec, actor, order.node_id))
        return actor

    def _new_router(self, order: MakeRouter) -> Any:
        ray.kill(self._router.actor)
        try:
            self._router.actor = router_life.create(order.spec)
        except (NotNow, RayError):
            return None
        return self._router.actor

    def _made(self, number: int, actor: Any) -> None:
        if self._actor is not None:
            self._actor.made.remote(number, actor)

    # ---- its life ------------------------------------------------------------------------------

    def _created(self) -> Any:
        here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        name = f"{NAME}{next(self._numbers)}"
        options = {"name": name, "num_cpus": 0, "scheduling_strategy": here}
        return ray.remote(SupervisorActor).options(**options).remote(self._name)

    def _begin(self) -> None:
        assert self._given is not None
        held = [engine.held for engine in self._held.values()]
        given = replace(self._given, engines=held, router_actor=self._router.actor)
        self._pid = self._actor.begin.remote(given)
        self._up_at, self._reported = time.monotonic(), False
        self._ask()

    def _ask(self) -> None:
        self._next, self._asked_at = self._actor.report.remote(_REPORT_S), time.monotonic()

    def _lost(self, why: str) -> None:
        """It died, or is as good as dead; the engines do not notice."""
        now = time.monotonic()
        self._deaths = 1 if now - self._up_at > _STEADY_S else self._deaths + 1
        wait_s = pause_s(self._deaths, _PAUSE_S, _LONGEST_PAUSE_S)
        self._again_at = now + wait_s
        self._died_at = self._died_at or now
        self._tell(f"the supervisor died: {why}; starting it again{in_words(wait_s)}", "")
        ray.kill(self._actor)
        self._actor = self._pid = None

    def _again(self, timeout_s: float) -> None:
        time.sleep(max(0.0, min(timeout_s, self._again_at - time.monotonic())))
        if time.monotonic() < self._again_at:
            return
        self._actor, self._spare = self._spare or self._created(), None
        self._begin()
