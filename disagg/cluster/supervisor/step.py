"""What looks after a deployment while it serves: healing, scaling, and orders from outside.

Runs step by step in a thread (`supervision`), and holds nothing that its successor could not find
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from disagg.cluster import pools
from disagg.cluster.control import Order, Orders, Scale
from disagg.cluster.supervisor import config_diff
from disagg.cluster.supervisor.autoscaling import LOOK_S, Autoscaler, PoolLoad
from disagg.cluster.supervisor.restarts import Restarts
from disagg.cluster.supervisor.scaling import Scaler
from disagg.config import Deployment, Role

RAY_FAILS_S = 60.0
_PAUSE_S = 0.5


class Supervisor:
    """Of one deployment. `tell` gets what happened, and log lines where there are any."""

    def __init__(
        self,
        healer: Restarts,
        scaler: Scaler,
        orders: Orders,
        tell: Callable[[str, str], None],
        *,
        private: bool,
    ) -> None:
        self._healer, self._scaler, self._orders = healer, scaler, orders
        self._tell, self._private = tell, private
        self._given: dict[int, Order] = {}
        self._autoscalers: dict[Role, Autoscaler] = {}
        self._looked_at = 0.0
        self._ray_fails_since: float | None = None
        self._follow_sections()

    def step(self, timeout_s: float) -> str | None:
        """Look for up to `timeout_s` and do what is due.

        Returns why the deployment cannot go on, or None.
        """
        try:
            problem = self._step(timeout_s)
        except RayError as error:  # Ray itself is busy with a death; the next look will do
            return self._ray_failed(error)
        self._ray_fails_since = None
        return problem

    def _step(self, timeout_s: float) -> str | None:
        refs = self._healer.awaited()
        there = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]
        while (taken := self._orders.take()) is not None:
            self._take(*taken)
        problem = self._healer.happened(there)
        self._healer.look()
        self._autoscale()
        self._scaler.step()
        self._answer()
        return problem

    def _ray_failed(self, error: RayError) -> str | None:
        now = time.monotonic()
        if self._ray_fails_since is None:
            self._ray_fails_since = now
            self._tell(f"Ray did not answer: {type(error).__name__}", "")
        time.sleep(_PAUSE_S)
        lasting = now - self._ray_fails_since > RAY_FAILS_S
        return f"Ray did not answer for {RAY_FAILS_S:g} s: {error}" if lasting else None

    # ---- orders --------------------------------------------------------------------------------

    def _take(self, number: int, order: Order) -> None:
        try:
            problems = self._refused(order)
        except RayError as error:
            problems = [f"Ray did not answer ({type(error).__name__}); ask again"]
        if problems:
            self._orders.over(number, "refused", problems)
            return
        if isinstance(order, Scale):
            counts = ", ".join(f"{role}={count}" for role, count in order.replicas.items())
            self._tell(f"asked to scale: {counts}", "")
            self._scaler.scale(order.replicas)
        else:
            self._tell("asked to apply a changed file", "")
            self._scaler.apply(self._kept_counts(order.deployment))
            self._follow_sections()
        self._given[number] = order

    def _refused(self, order: Order) -> list[str]:
        running = self._scaler.wanted
        if isinstance(order, Scale):
            return [
                f"{role}: is autoscaled; change {role}.autoscale with: disagg apply FILE"
                for role in order.replicas
                if running.pool(role).autoscale is not None
            ] or self._too_many(running.with_replicas(order.replicas))
        if not self._scaler.settled:
            return ["a change is under way; wait until it is done (disagg status shows it)"]
        wanted = order.deployment
        if problems := config_diff.refused(running, wanted):
            return problems
        if problem := self._scaler.room_problem(wanted):
            return [problem]
        return self._too_many(wanted)

    def _too_many(self, wanted: Deployment) -> list[str]:
        """On a Ray of our own there is no hope for another node."""
        return pools.shortfalls(wanted) if self._private else []

    def _answer(self) -> None:
        if self._given and self._scaler.settled:
            problem, self._scaler.problem = self._scaler.problem, None
            for number, order in self._given.items():
                if problem is None or isinstance(order, Scale):
                    self._orders.over(number, "done")
                else:
                    self._orders.over(number, "taken back", [problem])
            self._given.clear()

    # ---- the autoscalers -----------------------------------------------------------------------

    def _follow_sections(self) -> None:
        """Have an autoscaler for each pool that wants one, with the YAML's numbers."""
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
        serving = [place for place in self._healer.places if place.role == role and place.serves]
        loads = [place.engine.load for place in serving if place.engine.load is not None]
        return PoolLoad(
            engines=len(serving),
            requests=sum(load.requests for load in loads),
            kv_usage=sum(load.kv_usage for load in loads),
        )

    def _kept_counts(self, wanted: Deployment) -> Deployment:
        """The file's, but where an autoscaler knows better."""
        kept: dict[Role, int] = {}
        for role in pools.ROLES:
            if (scale := wanted.pool(role).autoscale) is not None:
                now = self._scaler.wanted.pool(role).replicas
                kept[role] = min(max(now, scale.min_replicas), scale.max_replicas)
        return wanted.with_replicas(kept)
