"""One step of the supervisor: restarts, scaling, and commands of the command line.

`SupervisorLoop` calls it in a thread. It must never hold state that the next supervisor cannot find
out, except pending commands: these are dropped when the supervisor dies.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from disagg.cluster import pools
from disagg.cluster.control import Command, Commands, Scale
from disagg.cluster.supervisor import config_diff
from disagg.cluster.supervisor.autoscaling import LOOK_S, Autoscaler, PoolLoad
from disagg.cluster.supervisor.restarts import Restarts
from disagg.cluster.supervisor.scaling import Scaler
from disagg.config import Deployment, Role

RAY_FAILS_S = 60.0
_PAUSE_S = 0.5


class Supervisor:
    """The supervisor of one deployment. `tell(line, log_tail)` is called for each event."""

    def __init__(
        self,
        restarts: Restarts,
        scaler: Scaler,
        commands: Commands,
        tell: Callable[[str, str], None],
        *,
        private: bool,
    ) -> None:
        self._restarts, self._scaler, self._commands = restarts, scaler, commands
        self._tell, self._private = tell, private
        self._running: dict[int, Command] = {}
        self._autoscalers: dict[Role, Autoscaler] = {}
        self._looked_at = 0.0
        self._ray_fails_since: float | None = None
        self._update_autoscalers()

    def step(self, timeout_s: float) -> str | None:
        """Wait up to `timeout_s` for an event, then do everything that is due.

        Returns why the deployment cannot go on, or None.
        """
        try:
            problem = self._step(timeout_s)
        except RayError as error:  # Ray is busy with a death; the next step tries again
            return self._ray_failed(error)
        self._ray_fails_since = None
        return problem

    def _step(self, timeout_s: float) -> str | None:
        if refs := self._restarts.awaited():
            refs = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]
        else:  # all engines wait for their restart
            time.sleep(timeout_s)
        while (taken := self._commands.take()) is not None:
            self._start_command(*taken)
        problem = self._restarts.handle(refs)
        self._restarts.check()
        self._autoscale()
        self._scaler.step()
        self._finish_commands()
        return problem

    def _ray_failed(self, error: RayError) -> str | None:
        now = time.monotonic()
        if self._ray_fails_since is None:
            self._ray_fails_since = now
            self._tell(f"Ray did not answer: {type(error).__name__}", "")
        time.sleep(_PAUSE_S)
        lasting = now - self._ray_fails_since > RAY_FAILS_S
        return f"Ray did not answer for {RAY_FAILS_S:g} s: {error}" if lasting else None

    # ---- commands ------------------------------------------------------------------------------

    def _start_command(self, number: int, command: Command) -> None:
        try:
            problems = self._problems(command)
        except RayError as error:
            problems = [f"Ray did not answer ({type(error).__name__}); try again"]
        if problems:
            self._commands.finish(number, "refused", problems)
            return
        if isinstance(command, Scale):
            counts = ", ".join(f"{role}={count}" for role, count in command.replicas.items())
            self._tell(f"command: scale {counts}", "")
            self._scaler.scale(command.replicas)
        else:
            self._tell("command: apply a changed file", "")
            self._scaler.apply(self._with_autoscaled_counts(command.deployment))
            self._update_autoscalers()
        self._running[number] = command

    def _problems(self, command: Command) -> list[str]:
        running = self._scaler.wanted
        if isinstance(command, Scale):
            return [
                f"{role}: the pool is autoscaled; change {role}.autoscale with: disagg apply FILE"
                for role in command.replicas
                if running.pool(role).autoscale is not None
            ] or self._too_many(running.with_replicas(command.replicas))
        if not self._scaler.settled:
            return ["another change is not finished; wait for it (disagg status shows it)"]
        wanted = command.deployment
        if problems := config_diff.refused(running, wanted):
            return problems
        if problem := self._scaler.room_problem(wanted):
            return [problem]
        return self._too_many(wanted)

    def _too_many(self, wanted: Deployment) -> list[str]:
        """The resources that are short. Only a private Ray can never get another node."""
        return pools.shortfalls([wanted], pools.resources()) if self._private else []

    def _finish_commands(self) -> None:
        if self._running and self._scaler.settled:
            problem, self._scaler.problem = self._scaler.problem, None
            for number, command in self._running.items():
                if problem is None or isinstance(command, Scale):
                    self._commands.finish(number, "done")
                else:
                    self._commands.finish(number, "taken back", [problem])
            self._running.clear()

    # ---- the autoscalers -----------------------------------------------------------------------

    def _update_autoscalers(self) -> None:
        """Create an autoscaler for each pool with an `autoscale` section; drop the others."""
        for role in pools.ROLES:
            section = self._scaler.wanted.pool(role).autoscale
            if section is None:
                self._autoscalers.pop(role, None)
            elif role not in self._autoscalers or self._autoscalers[role].settings != section:
                self._autoscalers[role] = Autoscaler(section)

    def _autoscale(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        for role, autoscaler in self._autoscalers.items():
            replicas = self._scaler.wanted.pool(role).replicas
            decision = autoscaler.look(now, self._load(role), replicas)
            if decision is not None:
                change = f"{role} {replicas} -> {decision.replicas}"
                self._tell(f"autoscaler: {change}: {decision.why}", "")
                self._scaler.scale({role: decision.replicas})

    def _load(self, role: Role) -> PoolLoad:
        serving = [place for place in self._restarts.places if place.role == role and place.serves]
        loads = [
            (place.engine.load, place.engine.spec.ranks)
            for place in serving
            if place.engine.load is not None
        ]
        # The ranks of a group count as one engine. Groups that are replaced may have another size.
        return PoolLoad(
            engines=len({place.group for place in serving}),
            requests=sum(load.requests for load, _ in loads),
            kv_usage=sum(load.kv_usage / ranks for load, ranks in loads),
        )

    def _with_autoscaled_counts(self, wanted: Deployment) -> Deployment:
        """The wanted deployment, in which autoscaled pools keep their current number of engines."""
        kept: dict[Role, int] = {}
        for role in pools.ROLES:
            if (scale := wanted.pool(role).autoscale) is not None:
                now = self._scaler.wanted.pool(role).replicas
                kept[role] = min(max(now, scale.min_replicas), scale.max_replicas)
        return wanted.with_replicas(kept)
