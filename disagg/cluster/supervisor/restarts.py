"""Restarts engines when they die; the others keep serving.

A dead engine leaves the router's rotation first. It restarts at once after its first death, and
after a growing pause after each further death in a row. After `engine.max_restarts` deaths in a row
it is given up. The ranks of a data parallel group compute together: when one dies, the others would
wait for it for ever, so they end with it and restart with it. This module runs step by step in the
supervisor. It must never decide how many
engines there are: `scaling` does, and calls `add`, `retire` and `remove`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from disagg.cluster import placing, pools
from disagg.cluster.engines import Engine, NoRoom, NotNow, outcome_of, too_slow, why_ended
from disagg.config import EngineSection, Role
from disagg.engine.spec import EngineFailure, EngineInfo, EngineSpec
from disagg.router.topology import Away

GRACE_S = 3.0
STOP_S = 4.0
LOOK_S = 2.0
_STEADY_S = 300.0  # an engine that served this long did not die because of its start
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_NOT_NOW_S = 0.25
_NODES_S = 0.5
_ADOPT_S = 5.0
_CAUSE_S = 1.0
# What a rank says that lost its connection to another one: gloo's words, and NCCL's.
_LOST = ("closed by peer", "reset by peer", "remote process exited", "timed out")

CreateForRestart = Callable[[EngineSpec, str | None, str | None, int], Any]
"""Like `pools.Create`; the last argument is the engine's number of deaths in a row."""
SendToRouter = Callable[[Sequence[EngineInfo], Mapping[str, Away]], None]
"""The engines that serve, and those that do not, by name. Returns when the router has them."""


@dataclass(eq=False)
class EnginePlace:
    """An engine's place in its pool.

    deaths: deaths in a row. up_at: when it began to serve. restart_at: when it starts next; None
    unless it waits for that. why: why it does not serve; None if it serves. start_s: how long
    its last start took; None before the first one. leaving_at: since when it drains. avoid: a node
    that may be dead, on which it or another rank of its group ran. Times are monotonic seconds.
    """

    engine: Engine
    deaths: int = 0
    up_at: float = 0.0
    restart_at: float | None = None
    given_up: bool = False
    why: str | None = None
    start_s: float | None = None
    stage: str = ""
    leaving_at: float | None = None
    avoid: str | None = None

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def role(self) -> Role:
        return self.engine.spec.role

    @property
    def serves(self) -> bool:
        """Whether the router may send it requests."""
        return self.why is None and self.engine.info is not None and self.leaving_at is None

    @property
    def awaited(self) -> Any | None:
        """Ray's reference to wait for: the engine's start or its end. None if there is neither."""
        if self.given_up or self.restart_at is not None:
            return None
        return self.engine.ended if self.engine.info else self.engine.started

    @property
    def group(self) -> str:
        """The name of its data parallel group; its own if it is alone."""
        return self.engine.spec.group

    def away(self, now: float) -> Away:
        """Its state in the router's answers. Clients read them, so they do not get `why`."""
        if self.given_up:
            return Away("given up", returns=False)
        if self.leaving_at is not None:
            return Away("drains", returns=False)
        word = "starts again" if self.deaths else "starts"
        if self.start_s is None:
            return Away(word)
        begins = self.restart_at or self.engine.launched_at
        return Away(word, back_s=max(0.0, begins + self.start_s - now))


def pause_s(deaths: int, second_s: float, longest_s: float) -> float:
    """Seconds to wait before the next start, after this many deaths in a row.

    0 after the first death, then `second_s`, then twice as long after each further death.
    """
    return min(second_s * 2.0 ** (deaths - 2), longest_s) if deaths > 1 else 0.0


def pause_text(wait_s: float) -> str:
    """The pause for a message; empty if there is none."""
    return f" in {wait_s:g} s" if wait_s else ""


def _first_of(
    place: EnginePlace, failure: EngineFailure, others: Mapping[EnginePlace, Any]
) -> tuple[EnginePlace, EngineFailure]:
    """Which rank of a group died first, and why: the others only lost their connection to it.

    others: the other ranks, with Ray's references of their ends; None for one that did not serve.
    """
    if not any(words in failure.cause for words in _LOST):
        return place, failure
    ends = {ref: each for each, ref in others.items() if ref is not None}
    for ref in ray.wait(list(ends), num_returns=len(ends), timeout=_CAUSE_S)[0] if ends else ():
        found = why_ended(ends[ref].engine)
        if not any(words in found.cause for words in _LOST):
            return ends[ref], found
    return place, failure


class Restarts:
    """Watches and restarts a deployment's engines.

    `send` sends the engines to the router. `tell(line, log_tail)` is called for each event;
    `log_tail` may be empty. `create` creates an engine's actor. `removed` is called with the name
    of an engine that was ended for good.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        send: SendToRouter,
        settings: EngineSection,
        tell: Callable[[str, str], None],
        create: CreateForRestart,
        removed: Callable[[str], None],
    ) -> None:
        self.places = [EnginePlace(engine, engine.deaths, why="starts") for engine in engines]
        self.settings = settings
        self._send, self._tell = send, tell
        self._create, self._removed = create, removed
        self._nodes: dict[str, placing.Node] = {}
        self._nodes_at = 0.0

    @property
    def engines(self) -> list[EngineInfo]:
        """The engines that serve."""
        up = (place.engine.info for place in self.places if place.serves)
        return [info for info in up if info is not None]

    def adopt(self) -> None:
        """Find the engines that serve already, and send them to the router.

        Ends groups without all their ranks: the last supervisor died in the middle of their start
        or their end. The ranks that are there would wait for the others for ever.
        """
        for place in list(self.places):
            there = self.group_of(place)
            if place in there and len(there) < place.engine.spec.ranks:
                names = " and ".join(each.name for each in there)
                self._tell(f"{names} alone of a data parallel group: ended", "")
                self.remove(place)
        by_start = {place.engine.started: place for place in self.places}
        starts = list(by_start)
        for ref in ray.wait(starts, num_returns=len(starts), timeout=_ADOPT_S)[0]:
            place = by_start[ref]
            outcome = outcome_of(place.engine, ref)
            if isinstance(outcome, EngineInfo):
                place.engine.serves(outcome)
                place.why, place.up_at = None, time.monotonic()
                place.start_s = outcome.startup_s
        self._update_router()

    def awaited(self) -> list[Any]:
        """Ray's references to wait for. `handle` takes those that are ready."""
        return [place.awaited for place in self.places if place.awaited is not None]

    def handle(self, refs: Iterable[Any]) -> str | None:
        """Handle the references of `awaited` that are ready.

        Returns why the deployment cannot go on, or None.
        """
        places = {place.awaited: place for place in self.places if place.awaited is not None}
        for ref in refs:
            place = places[ref]
            # Else it was ended with another rank of its group.
            if place in self.places and place.awaited == ref:
                self._ended(place, ref)
        return self._failure()

    def check(self) -> None:
        """Check nodes and engines: due restarts, slow starts, hangs."""
        self._check_nodes()
        for place in list(self.places):
            if place in self.places:
                self._check(place)

    def add(self, replicas: Sequence[Sequence[EngineSpec]]) -> list[str]:
        """Start new engines, each with its group. Returns the names of those that could be created:
        of a group all, or none."""
        started = list[str]()
        for specs in replicas:
            places = list[EnginePlace]()
            try:
                for spec in specs:
                    engine = self._launch(spec, 0, self._present())
                    places.append(EnginePlace(engine, why="starts"))
                    self.places.append(places[-1])
            except NotNow:
                if places:
                    self.remove(places[0])
                continue
            started += [place.name for place in places]
        self._update_router()
        return started

    def retire(self, place: EnginePlace) -> None:
        """Let an engine and its group drain: the router sends them no new requests. `remove` one
        when all are idle."""
        for each in self.group_of(place):
            each.leaving_at = time.monotonic()
        self._update_router()

    def remove(self, place: EnginePlace) -> None:
        """End an engine and its group for good."""
        group = self.group_of(place)
        self.places = [each for each in self.places if each not in group]
        grace_s = GRACE_S if any(each.engine.info for each in group) else 0.0
        pools.stop([each.engine for each in group], grace_s, STOP_S)
        for each in group:
            self._removed(each.name)
        self._update_router()

    def group_of(self, place: EnginePlace) -> list[EnginePlace]:
        """The engine with the other ranks of its data parallel group, in their order."""
        group = [each for each in self.places if each.group == place.group]
        return sorted(group, key=lambda each: each.engine.spec.rank)

    def _present(self, but: EnginePlace | None = None) -> list[Engine]:
        return [place.engine for place in self.places if place is not but]

    def _launch(
        self, spec: EngineSpec, deaths: int, others: Sequence[Engine], avoid: str | None = None
    ) -> Engine:
        def create(spec: EngineSpec, node_id: str | None, avoid: str | None) -> Any:
            return self._create(spec, node_id, avoid, deaths)

        return pools.launch([spec], others, avoid, create)[0]

    # ---- engines -------------------------------------------------------------------------------

    def _ended(self, place: EnginePlace, ref: Any) -> None:
        """Handle the end of an engine's start, or of the engine."""
        engine = place.engine
        if engine.info is not None:
            self._died(place, why_ended(engine), "died")
            return
        outcome = outcome_of(engine, ref)
        if isinstance(outcome, EngineFailure):
            self._died(place, outcome, "died" if engine.served else "did not start")
            return
        engine.serves(outcome)
        place.why, place.up_at = None, time.monotonic()
        place.start_s = outcome.startup_s
        self._update_router()
        what = "is back" if place.deaths else "serves"
        self._tell(f"{place.name} {what}: {outcome.url}, up in {outcome.startup_s:.0f} s", "")

    def _died(self, place: EnginePlace, failure: EngineFailure, what: str) -> None:
        now = time.monotonic()
        if place.leaving_at is not None:
            self._tell(f"engine {place.name} {what} while it drained: {failure.cause}", "")
            self.remove(place)
            return
        steady = place.engine.info is not None and now - place.up_at > _STEADY_S
        deaths = 1 if steady else place.deaths + 1
        given_up = deaths > self.settings.max_restarts
        wait_s = pause_s(deaths, _PAUSE_S, _LONGEST_PAUSE_S)
        group = self.group_of(place)
        then = f"starting it again{pause_text(wait_s)}"
        if given_up:
            times = f"{deaths} times in a row" if deaths > 1 else "once"
            then = f"given up ({times}; engine.max_restarts)"
        ends = {each: each.engine.ended for each in group if each is not place}
        for each in group:
            each.deaths, each.given_up = deaths, given_up
            each.restart_at = None if given_up else now + wait_s
            each.why = what
        self._update_router()
        if len(group) > 1:
            place, failure = _first_of(place, failure, ends)
            others = [each.name for each in group if each is not place]
            with_it = f"{' and '.join(others)} of its data parallel group"
            then = f"{with_it} {'end' if len(others) > 1 else 'ends'} with it; {then}"
        gone = next((each.engine.ran_on for each in group if each.engine.vanished), None)
        why = f"engine {place.name} {what}: {failure.cause}; {then}"
        for each in group:
            each.why, each.avoid = why, gone
        self._tell(why, failure.log_tail)
        pools.stop([each.engine for each in group], 0.0, STOP_S)

    def _check_nodes(self) -> None:
        """Handle engines whose node has died. Ray reports them only after two to four seconds."""
        now = time.monotonic()
        if now < self._nodes_at:
            return
        self._nodes_at = now + _NODES_S
        here = ray.get_runtime_context().get_node_id()
        homes = {p: p.engine.home() for p in self.places if p.awaited is not None}
        elsewhere = {p: home.node_id for p, home in homes.items() if home and home.node_id != here}
        if not self._nodes.keys() >= set(elsewhere.values()):
            known = self._nodes
            self._nodes = {node.node_id: known.get(node.node_id, node) for node in placing.nodes()}
        asked = [node for node in self._nodes.values() if node.node_id in elsewhere.values()]
        gone = {node.node_id: node for node in asked if node.is_gone()}
        dead = {place: node_id for place, node_id in elsewhere.items() if node_id in gone}
        for place in dead:  # first all ranks of a group: nothing there answers a stop
            place.engine.vanished = True
        for place, node_id in dead.items():
            if place in self.places and place.awaited is not None:
                what = "died" if place.engine.served else "did not start"
                why = f"its node {gone[node_id].address} is gone"
                self._died(place, EngineFailure(why, ""), what)

    def _check(self, place: EnginePlace) -> None:
        now, settings = time.monotonic(), self.settings
        if place.restart_at is not None and now >= place.restart_at:
            first = self.group_of(place)[0]
            if first is not place and first.restart_at is not None:
                return  # the others join it
            spec, others = place.engine.spec, self._present(place)
            try:
                place.engine = self._launch(spec, place.deaths, others, place.avoid)
            except NotNow as error:
                place.restart_at = now + _NOT_NOW_S
                if isinstance(error, NoRoom) and place.stage != str(error):
                    place.stage = str(error)
                    self._tell(f"{place.name}: {place.stage}", "")
                return
            place.restart_at = None
        elif place.awaited is None:
            return
        elif place.engine.info is None:
            if now - place.engine.launched_at > settings.startup_timeout_s:
                late = too_slow(place.engine, settings.startup_timeout_s)
                self._died(place, late, "did not start")
            elif (stage := place.engine.stage()) != place.stage:
                place.stage = stage
                self._tell(f"{place.name}: {stage}", "")
        elif place.engine.look(LOOK_S) > settings.hang_timeout_s:
            limit = f"{settings.hang_timeout_s:g} s (engine.hang_timeout_s)"
            place.engine.vanished = True
            self._died(place, EngineFailure(f"its actor did not answer for {limit}", ""), "died")

    def _failure(self) -> str | None:
        decodes = [place for place in self.places if place.role == "decode"]
        if decodes and all(place.given_up for place in decodes):
            return "; ".join(dict.fromkeys(place.why for place in decodes if place.why))
        return None

    def _update_router(self) -> None:
        self._send(self.engines, self._down())

    def _down(self) -> dict[str, Away]:
        now = time.monotonic()
        return {place.name: place.away(now) for place in self.places if not place.serves}
