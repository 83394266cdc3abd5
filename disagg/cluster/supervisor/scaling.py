"""Changes the engines to the wanted number and settings: adds, drains, and replaces one by one.

An engine that drains gets no new requests. It finishes its requests, decode engines fetch its
leases, and then it ends. A new engine serves before the engine that it replaces drains, unless
there is no room for both. If a new engine does not start, the change is undone. This module only
decides: `Restarts` starts and ends the engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from disagg.cluster import placing, pools
from disagg.cluster.supervisor.config_diff import is_outdated
from disagg.cluster.supervisor.restarts import LOOK_S, EnginePlace, Restarts
from disagg.config import Deployment, Role
from disagg.engine.spec import EngineSpec

# Two load reports, so that they include a request that the router sent before it dropped the
# engine.
_IDLE_S = 2 * LOOK_S


class Scaler:
    """Moves the engines towards `wanted`, step by step. `spec` makes an engine's spec."""

    def __init__(
        self,
        restarts: Restarts,
        wanted: Deployment,
        before: Deployment | None,
        spec: Callable[[Deployment, Role, int], EngineSpec],
        tell: Callable[[str, str], None],
    ) -> None:
        self.wanted = wanted
        self.before = before
        """The deployment to return to if the current change fails; None if there is no change."""
        self.problem: str | None = None
        """Why the last change was undone."""
        self._restarts, self._spec, self._tell = restarts, spec, tell
        self._idle_since: dict[str, float] = {}
        self._waits = False

    @property
    def settled(self) -> bool:
        """Whether every engine is as wanted, or given up."""
        return all(self._settled(role) for role in pools.ROLES)

    def scale(self, replicas: Mapping[Role, int]) -> None:
        """Change the numbers of engines."""
        self.wanted = self.wanted.with_replicas(replicas)
        if self.before is not None:
            self.before = self.before.with_replicas(replicas)

    def apply(self, deployment: Deployment) -> None:
        """Change the engines to match this deployment; `config_diff` has the limits."""
        self.before, self.problem, self._waits = self.wanted, None, False
        self.wanted = deployment
        self._restarts.settings = deployment.engine

    def room_problem(self, deployment: Deployment) -> str | None:
        """Why a change to this deployment would fail requests; None if it would not."""
        serving = [place for place in self._staying("decode") if place.serves]
        if len(serving) != 1 or not _is_old(serving[0], deployment):
            return None
        request, free = placing.ResourceRequest.of(deployment, "decode"), self._nodes()
        if placing.has_room(request, free):
            return None
        return (
            "decode has one engine, and its replacement must serve before it ends; the replacement "
            + placing.missing(request, "decode", free)
        )

    def step(self) -> None:
        """Do the changes that are possible now. Never waits for an engine."""
        for role in pools.ROLES:
            self._step(role)
        for place in list(self._restarts.places):
            if place.leaving_at is not None:
                self._drain(place)
        if self.before is not None and self.settled:
            self.before = None

    def _step(self, role: Role) -> None:
        places, wanted = self._staying(role), self.wanted.pool(role).replicas
        old = [place for place in places if _is_old(place, self.wanted)]
        if self._rolled_back(role, places, old):
            return
        for place in [place for place in old if place.given_up]:
            self._restarts.remove(place)
            return
        if len(places) < wanted:
            self._grow(role, wanted - len(places))
        elif old:
            self._roll(role, places, old, wanted)
        elif len(places) > wanted:
            # Engines that do not serve leave first, then those with the highest index.
            order = sorted(places, key=lambda place: (place.serves, -place.engine.spec.index))
            for place in order[: len(places) - wanted]:
                self._retire(place)

    def _roll(
        self, role: Role, places: list[EnginePlace], old: list[EnginePlace], wanted: int
    ) -> None:
        """Replace the outdated engines, one at a time, pool after pool."""
        if any(p.leaving_at is not None or not p.serves for p in self._restarts.places):
            return
        if len(places) <= wanted and self._has_room(role):
            self._grow(role, 1)
        elif role == "prefill" or len(places) > 1:
            self._retire(old[0])
        elif not self._waits:  # without the last decode engine all requests would fail
            self._waits = True
            self._tell(f"{old[0].name} waits until there is room for its replacement", "")

    def _rolled_back(self, role: Role, places: list[EnginePlace], old: list[EnginePlace]) -> bool:
        """Undo the change if a new engine did not start. Returns whether it was undone."""
        failed = [p for p in places if p not in old and p.deaths and not p.up_at]
        if self.before is None or not failed:
            return False
        self.problem = f"engine {failed[0].name} {failed[0].why}".partition("; starting")[0]
        self._tell(f"the change is taken back: {self.problem}", "")
        self.wanted, self.before = self.before, None
        self._restarts.settings = self.wanted.engine
        for place in failed:
            self._restarts.remove(place)
        return True

    def _grow(self, role: Role, count: int) -> None:
        taken = {place.engine.spec.index for place in self._restarts.places if place.role == role}
        free = (index for index in range(len(taken) + count) if index not in taken)
        specs = [self._spec(self.wanted, role, next(free)) for _ in range(count)]
        if started := self._restarts.add(specs):
            self._tell(f"starting {', '.join(started)}", "")

    def _retire(self, place: EnginePlace) -> None:
        if not place.serves:
            self._tell(f"{place.name} ends", "")
            self._restarts.remove(place)
            return
        self._tell(f"{place.name} drains", "")
        self._idle_since.pop(place.name, None)
        self._restarts.retire(place)

    def _drain(self, place: EnginePlace) -> None:
        now, load, asked_at = time.monotonic(), place.engine.load, place.engine.load_asked_at
        assert place.leaving_at is not None
        if now - place.leaving_at > self._restarts.settings.drain_timeout_s:
            self._tell(f"{place.name} ends before it is idle (engine.drain_timeout_s)", "")
        elif load is None or not load.idle or asked_at < place.leaving_at:
            self._idle_since.pop(place.name, None)
            return
        elif asked_at - self._idle_since.setdefault(place.name, asked_at) < _IDLE_S:
            return  # counted by its reports: an engine that does not report is not idle
        else:
            self._tell(f"{place.name} is idle and ends", "")
        self._restarts.remove(place)

    def _settled(self, role: Role) -> bool:
        of_role = [place for place in self._restarts.places if place.role == role]
        return len(of_role) == self.wanted.pool(role).replicas and all(
            (place.serves or place.given_up) and not _is_old(place, self.wanted)
            for place in of_role
        )

    def _staying(self, role: Role) -> list[EnginePlace]:
        places = self._restarts.places
        return [p for p in places if p.role == role and p.leaving_at is None]

    def _has_room(self, role: Role) -> bool:
        return placing.has_room(placing.ResourceRequest.of(self.wanted, role), self._nodes())

    def _nodes(self) -> list[placing.Node]:
        return pools.populated(place.engine for place in self._restarts.places)


def _is_old(place: EnginePlace, wanted: Deployment) -> bool:
    return is_outdated(place.engine.spec.deployment, wanted, place.role)
