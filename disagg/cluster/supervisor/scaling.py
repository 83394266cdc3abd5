"""Makes the engines as many, and as the YAML has them: adds, drains, replaces one by one.

An engine that goes gets nothing new, serves what it has, has its leases fetched, and only then
ends. A replacement serves before the one it replaces drains, unless there is no room for both. One
that does not start takes the change back. Decides; what is started and ended is the healer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from disagg.cluster import placing, pools
from disagg.cluster.supervisor.config_diff import is_outdated
from disagg.cluster.supervisor.restarts import LOOK_S, EnginePlace, Restarts
from disagg.config import Deployment, Role
from disagg.engine.spec import EngineSpec

# Several looks, so that a request which was on its way when the router heard of it has been seen.
_IDLE_S = 2 * LOOK_S


class Scaler:
    """Steps towards `wanted`. `spec` makes an engine of a role and an index."""

    def __init__(
        self,
        healer: Restarts,
        wanted: Deployment,
        before: Deployment | None,
        spec: Callable[[Deployment, Role, int], EngineSpec],
        tell: Callable[[str, str], None],
    ) -> None:
        self.wanted = wanted
        self.before = before
        """What a change that is under way would be taken back to."""
        self.problem: str | None = None
        """Why the last change was taken back."""
        self._healer, self._spec, self._tell = healer, spec, tell
        self._idle_since: dict[str, float] = {}
        self._waits = False

    @property
    def settled(self) -> bool:
        """Whether all is as wanted, or given up."""
        return all(self._settled(role) for role in pools.ROLES)

    def scale(self, replicas: Mapping[Role, int]) -> None:
        """As many engines from now on."""
        self.wanted = self.wanted.with_replicas(replicas)
        if self.before is not None:
            self.before = self.before.with_replicas(replicas)

    def apply(self, deployment: Deployment) -> None:
        """Engines as in this deployment from now on; see `changes` for what cannot change."""
        self.before, self.problem, self._waits = self.wanted, None, False
        self.wanted = deployment
        self._healer.settings = deployment.engine

    def room_problem(self, deployment: Deployment) -> str | None:
        """Why a change to this cannot go without failed requests, if it cannot."""
        serving = [place for place in self._staying("decode") if place.serves]
        if len(serving) != 1 or not _is_old(serving[0], deployment):
            return None
        ask, free = placing.Ask.of(deployment, "decode"), self._nodes()
        if placing.has_room(ask, free):
            return None
        return (
            "decode has one engine, and its successor must serve before it goes; it "
            + placing.missing(ask, "decode", free)
        )

    def step(self) -> None:
        """Do what can be done now; never waits for an engine."""
        for role in pools.ROLES:
            self._step(role)
        for place in list(self._healer.places):
            if place.leaving_at is not None:
                self._drain(place)
        if self.before is not None and self.settled:
            self.before = None

    def _step(self, role: Role) -> None:
        places, wanted = self._staying(role), self.wanted.pool(role).replicas
        old = [place for place in places if _is_old(place, self.wanted)]
        if self._taken_back(role, places, old):
            return
        for place in [place for place in old if place.given_up]:
            self._healer.remove(place)
            return
        if len(places) < wanted:
            self._grow(role, wanted - len(places))
        elif old:
            self._roll(role, places, old, wanted)
        elif len(places) > wanted:
            # What does not serve goes first, then the latest.
            order = sorted(places, key=lambda place: (place.serves, -place.engine.spec.index))
            for place in order[: len(places) - wanted]:
                self._retire(place)

    def _roll(
        self, role: Role, places: list[EnginePlace], old: list[EnginePlace], wanted: int
    ) -> None:
        """Engine by engine, and pool after pool: at most one is on its way."""
        if any(p.leaving_at is not None or not p.serves for p in self._healer.places):
            return
        if len(places) <= wanted and self._has_room(role):
            self._grow(role, 1)
        elif role == "prefill" or len(places) > 1:
            self._retire(old[0])
        elif not self._waits:  # for room: without its last decode engine all requests would fail
            self._waits = True
            self._tell(f"{old[0].name} waits for room for its successor", "")

    def _taken_back(self, role: Role, places: list[EnginePlace], old: list[EnginePlace]) -> bool:
        """Whether the change was given up, because an engine as wanted does not start."""
        failed = [p for p in places if p not in old and p.deaths and not p.up_at]
        if self.before is None or not failed:
            return False
        self.problem = f"engine {failed[0].name} {failed[0].why}".partition("; starting")[0]
        self._tell(f"the change is taken back: {self.problem}", "")
        self.wanted, self.before = self.before, None
        self._healer.settings = self.wanted.engine
        for place in failed:
            self._healer.remove(place)
        return True

    def _grow(self, role: Role, count: int) -> None:
        taken = {place.engine.spec.index for place in self._healer.places if place.role == role}
        free = (index for index in range(len(taken) + count) if index not in taken)
        specs = [self._spec(self.wanted, role, next(free)) for _ in range(count)]
        if started := self._healer.add(specs):
            self._tell(f"starting {', '.join(started)}", "")

    def _retire(self, place: EnginePlace) -> None:
        if not place.serves:
            self._tell(f"{place.name} goes", "")
            self._healer.remove(place)
            return
        self._tell(f"{place.name} drains", "")
        self._idle_since.pop(place.name, None)
        self._healer.retire(place)

    def _drain(self, place: EnginePlace) -> None:
        now, load, asked_at = time.monotonic(), place.engine.load, place.engine.load_asked_at
        assert place.leaving_at is not None
        if now - place.leaving_at > self._healer.settings.drain_timeout_s:
            self._tell(f"{place.name} goes before it is idle (engine.drain_timeout_s)", "")
        elif load is None or not load.idle or asked_at < place.leaving_at:
            self._idle_since.pop(place.name, None)
            return
        elif asked_at - self._idle_since.setdefault(place.name, asked_at) < _IDLE_S:
            return  # by its answers alone: a slow one is not taken for idle
        else:
            self._tell(f"{place.name} is idle and goes", "")
        self._healer.remove(place)

    def _settled(self, role: Role) -> bool:
        of_role = [place for place in self._healer.places if place.role == role]
        return len(of_role) == self.wanted.pool(role).replicas and all(
            (place.serves or place.given_up) and not _is_old(place, self.wanted)
            for place in of_role
        )

    def _staying(self, role: Role) -> list[EnginePlace]:
        places = self._healer.places
        return [p for p in places if p.role == role and p.leaving_at is None]

    def _has_room(self, role: Role) -> bool:
        return placing.has_room(placing.Ask.of(self.wanted, role), self._nodes())

    def _nodes(self) -> list[placing.Node]:
        return pools.populated(place.engine for place in self._healer.places)


def _is_old(place: EnginePlace, wanted: Deployment) -> bool:
    return is_outdated(place.engine.spec.deployment, wanted, place.role)
