"""Changes the engines to the wanted number and settings: adds, drains, and replaces one by one.

An engine that drains gets no new requests. It finishes its requests, decode engines fetch its
leases, and then it ends. A data parallel group does so as one. A new engine serves before the
engine that it replaces drains, unless there is no room for both. If a new engine does not start,
the change is undone. This module only decides: `Restarts` starts and ends the engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from disagg.cluster import placing, pools
from disagg.cluster.supervisor.config_diff import is_outdated
from disagg.cluster.supervisor.restarts import LOOK_S, EnginePlace, Restarts
from disagg.config import Deployment, Role
from disagg.engine.spec import EngineSpec

# Two load reports, so that they include a request that the router sent before it dropped the
# engine.
_IDLE_S = 2 * LOOK_S

Replica = list[EnginePlace]
"""An engine, or the ranks of a data parallel group."""


class Scaler:
    """Moves the engines towards `wanted`, step by step. `replica` makes the specs of one replica,
    from the index of its first engine."""

    def __init__(
        self,
        restarts: Restarts,
        wanted: Deployment,
        before: Deployment | None,
        replica: Callable[[Deployment, Role, int], list[EngineSpec]],
        tell: Callable[[str, str], None],
    ) -> None:
        self.wanted = wanted
        self.before = before
        """The deployment to return to if the current change fails; None if there is no change."""
        self.problem: str | None = None
        """Why the last change was undone."""
        self._restarts, self._replica, self._tell = restarts, replica, tell
        self._idle_since: dict[str, float] = {}
        self._waits = False

    @property
    def settled(self) -> bool:
        """Whether every engine is as wanted, or given up."""
        return all(self._settled(role) for role in pools.ROLES)

    def scale(self, replicas: Mapping[Role, int]) -> None:
        """Change the numbers of replicas."""
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
        serving = [one for one in self._staying("decode") if _serves(one)]
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
        for replica in self._replicas():
            if replica[0].leaving_at is not None:
                self._drain(replica)
        if self.before is not None and self.settled:
            self.before = None

    def _step(self, role: Role) -> None:
        there, wanted = self._staying(role), self.wanted.pool(role).replicas
        old = [one for one in there if _is_old(one, self.wanted)]
        if self._rolled_back(there, old):
            return
        for one in [one for one in old if one[0].given_up]:
            self._restarts.remove(one[0])
            return
        if len(there) < wanted:
            self._grow(role, wanted - len(there))
        elif old:
            self._roll(role, there, old, wanted)
        elif len(there) > wanted:
            # Engines that do not serve leave first, then those with the highest index.
            order = sorted(there, key=lambda one: (_serves(one), -one[0].engine.spec.index))
            for one in order[: len(there) - wanted]:
                self._retire(one)

    def _roll(
        self, role: Role, there: Sequence[Replica], old: Sequence[Replica], wanted: int
    ) -> None:
        """Replace the outdated engines, one replica at a time, pool after pool."""
        if any(p.leaving_at is not None or not p.serves for p in self._restarts.places):
            return
        if len(there) <= wanted and self._has_room(role):
            self._grow(role, 1)
        elif role == "prefill" or len(there) > 1:
            self._retire(old[0])
        elif not self._waits:  # without the last decode engine all requests would fail
            self._waits = True
            self._tell(f"{_names(old[0])} {_verb(old[0], 'wait')} for room for a replacement", "")

    def _rolled_back(self, there: Sequence[Replica], old: Sequence[Replica]) -> bool:
        """Undo the change if a new engine did not start. Returns whether it was undone."""
        failed = [
            one for one in there if one not in old and any(p.deaths and not p.up_at for p in one)
        ]
        if self.before is None or not failed:
            return False
        self.problem = str(failed[0][0].why).partition("; starting")[0]
        self._tell(f"the change is taken back: {self.problem}", "")
        self.wanted, self.before = self.before, None
        self._restarts.settings = self.wanted.engine
        for one in failed:
            self._restarts.remove(one[0])
        return True

    def _grow(self, role: Role, count: int) -> None:
        taken = {place.engine.spec.index for place in self._restarts.places if place.role == role}
        ranks, first = self.wanted.data_parallel_size(role), 0
        replicas = list[list[EngineSpec]]()
        while len(replicas) < count:
            indices = range(first, first + ranks)
            if taken.isdisjoint(indices):
                replicas.append(self._replica(self.wanted, role, first))
            first += ranks
        if started := self._restarts.add(replicas):
            self._tell(f"starting {', '.join(started)}", "")

    def _retire(self, one: Replica) -> None:
        if not any(place.serves for place in one):
            self._tell(f"{_names(one)} {_verb(one, 'end')}", "")
            self._restarts.remove(one[0])
            return
        self._tell(f"{_names(one)} {_verb(one, 'drain')}", "")
        for place in one:
            self._idle_since.pop(place.name, None)
        self._restarts.retire(one[0])

    def _drain(self, one: Replica) -> None:
        now, leaving_at = time.monotonic(), one[0].leaving_at
        assert leaving_at is not None
        idle = [self._is_idle(place, leaving_at) for place in one]
        if now - leaving_at > self._restarts.settings.drain_timeout_s:
            why = "before being idle (engine.drain_timeout_s)"
            self._tell(f"{_names(one)} {_verb(one, 'end')} {why}", "")
        elif not all(idle):
            return
        else:
            state = "is idle" if len(one) == 1 else "are idle"
            self._tell(f"{_names(one)} {state} and {_verb(one, 'end')}", "")
        self._restarts.remove(one[0])

    def _is_idle(self, place: EnginePlace, leaving_at: float) -> bool:
        """Counted by its reports: an engine that does not report is not idle."""
        load, asked_at = place.engine.load, place.engine.load_asked_at
        if load is None or not load.idle or asked_at < leaving_at:
            self._idle_since.pop(place.name, None)
            return False
        return asked_at - self._idle_since.setdefault(place.name, asked_at) >= _IDLE_S

    def _settled(self, role: Role) -> bool:
        of_role = [one for one in self._replicas() if one[0].role == role]
        return len(of_role) == self.wanted.pool(role).replicas and all(
            (_serves(one) or one[0].given_up) and not _is_old(one, self.wanted) for one in of_role
        )

    def _staying(self, role: Role) -> list[Replica]:
        of_role = [one for one in self._replicas() if one[0].role == role]
        return [one for one in of_role if one[0].leaving_at is None]

    def _replicas(self) -> list[Replica]:
        """The engines in their groups."""
        firsts = {place.group: place for place in self._restarts.places}
        return [self._restarts.group_of(place) for place in firsts.values()]

    def _has_room(self, role: Role) -> bool:
        return placing.has_room(placing.ResourceRequest.of(self.wanted, role), self._nodes())

    def _nodes(self) -> list[placing.Node]:
        return pools.populated(place.engine for place in self._restarts.places)


def _is_old(one: Replica, wanted: Deployment) -> bool:
    return is_outdated(one[0].engine.spec.deployment, wanted, one[0].role)


def _serves(one: Replica) -> bool:
    return all(place.serves for place in one)


def _verb(one: Replica, verb: str) -> str:
    return verb if len(one) > 1 else f"{verb}s"


def _names(one: Replica) -> str:
    return " and ".join(place.name for place in one)
