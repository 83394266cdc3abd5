"""An engine's actor as who looks after it sees it: where it is, what it does, why it ended.

Asks, and never waits for an engine without a deadline. Starts and ends none.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from disagg.cluster import placing
from disagg.engine import logs
from disagg.engine.actor import TAIL_LINES
from disagg.engine.load import EngineLoad
from disagg.engine.spec import EngineFailure, EngineHome, EngineInfo, EngineSpec

ASK_S = 2.0
PLACING_S = 15.0


class NotNow(Exception):
    """An actor cannot be created at the moment; ask again soon."""


class NoRoom(NotNow):
    """Not before a node has room. Says what people can do about it."""


@dataclass(frozen=True)
class Held:
    """An engine's actor, for someone else who shall look after it. node_id: that was preferred.
    served: it was seen to. deaths: in a row, before this start."""

    spec: EngineSpec
    actor: Any
    node_id: str | None
    served: bool = False
    deaths: int = 0


@dataclass(eq=False)
class Engine:
    """An engine as who looks after it sees it, from its launch to its end."""

    spec: EngineSpec
    actor: Any
    """Ray's handle of an EngineActor."""
    started: Any
    launched_at: float
    _home: Any
    preferred_node: str | None = None
    served: bool = False
    """Once, maybe under another's eyes."""
    deaths: int = 0
    """In a row, before this start."""
    load: EngineLoad | None = None
    """What it last said that it has to do."""
    load_asked_at: float = 0.0
    """When it was asked what it answered there, monotonic."""
    vanished: bool = False
    """Its actor is gone without a word, and its node may be."""
    _found: EngineHome | None = None
    _progress: Any = None
    _load: Any = None
    _load_asked_at: float = 0.0
    _stage: str = "starting a process"
    info: EngineInfo | None = None
    ended: Any = None

    @property
    def name(self) -> str:
        """`prefill-0`."""
        return self.spec.name

    @property
    def node_id(self) -> str | None:
        """Where it runs, or should."""
        home = self.home()
        return home.node_id if home else self.preferred_node

    @property
    def held(self) -> Held:
        """It, for someone else, who must not hold deaths of long ago against one that served."""
        deaths = 0 if self.served else self.deaths
        return Held(self.spec, self.actor, self.preferred_node, self.served, deaths)

    def home(self) -> EngineHome | None:
        """Where it runs, if it runs already."""
        if self._found is None:
            with contextlib.suppress(GetTimeoutError, RayError):
                self._found = ray.get(self._home, timeout=0)
        return self._found

    def stage(self) -> str:
        """What it is doing, without waiting for the answer."""
        if self.info is not None:
            return "ready"
        if self.home() is None:
            if time.monotonic() - self.launched_at > PLACING_S:
                ask = placing.Ask.of(self.spec.deployment, self.spec.role)
                return f"waiting: {placing.missing(ask, self.spec.role, placing.nodes())}"
            return self._stage
        if self._progress is not None and ray.wait([self._progress], timeout=0)[0]:
            self._stage = _get(self._progress) or self._stage
            self._progress = None
        if self._progress is None:
            self._progress = self.actor.progress.remote()
        return self._stage

    @property
    def started_up(self) -> bool:
        """Whether its start is over, well or not."""
        return self.info is not None or bool(ray.wait([self.started], timeout=0)[0])

    def serves(self, info: EngineInfo) -> None:
        """From now on, until `ended`."""
        self.info, self.served = info, True
        self.ended = self.actor.ended.remote()

    def look(self, every_s: float) -> float:
        """Ask for its load again if that was `every_s` ago; never waits.

        Returns the seconds for which its actor owes an answer.
        """
        now = time.monotonic()
        if self._load is not None and ray.wait([self._load], timeout=0)[0]:
            with contextlib.suppress(RayError):  # of one that died; `ended` says so
                self.load, self.load_asked_at = ray.get(self._load), self._load_asked_at
            self._load = None
        if self._load is None and now - self._load_asked_at >= every_s:
            self._load, self._load_asked_at = self.actor.load.remote(), now
        return 0.0 if self._load is None else now - self._load_asked_at

    @property
    def ran_on(self) -> str | None:
        """Its node, which need not be the one that was preferred."""
        home = self.home()
        return self.node_id if home is None else home.node_id

    def post_mortem(self, error: RayError) -> EngineFailure:
        """Why the actor itself is gone, from what its log still says."""
        home, self.vanished = self.home(), True
        if home is None:
            return EngineFailure(f"its actor did not start: {logs.describe(error)}", "")
        log = _read_log(home)
        if log is None:
            return EngineFailure(f"its node {home.address} does not answer", "")
        cause = logs.root_cause(log) or f"its process {home.pid} was killed"
        return EngineFailure(cause, "\n".join(log.splitlines()[-TAIL_LINES:]))


def engine_of(held: Held) -> Engine:
    """An engine that was created; its start is begun, or joined."""
    actor = held.actor
    start, home = actor.start.remote(), actor.home.remote()
    now, served, deaths = time.monotonic(), held.served, held.deaths
    return Engine(held.spec, actor, start, now, home, held.node_id, served, deaths)


def outcome_of(engine: Engine, ref: Any) -> EngineInfo | EngineFailure:
    """Of a start that `ref` says is over."""
    try:
        started: EngineInfo | EngineFailure = ray.get(ref)
    except RayError as error:
        return engine.post_mortem(error)
    return started


def too_slow(engine: Engine, timeout_s: float) -> EngineFailure:
    """What is wrong with one that does not come up."""
    tail = _get(engine.actor.log_tail.remote()) or ""
    limit = f"{timeout_s:g} s (engine.startup_timeout_s)"
    return EngineFailure(f"it did not come up in {limit} and was {engine.stage()}", tail)


def why_ended(engine: Engine) -> EngineFailure:
    """Of one whose `ended` is there."""
    try:
        failure: EngineFailure | None = ray.get(engine.ended)
    except RayError as error:
        failure = engine.post_mortem(error)
    return failure or EngineFailure("it stopped", "")


def _get(ref: Any) -> str | None:
    try:
        answer: str = ray.get(ref, timeout=ASK_S)
    except (GetTimeoutError, RayError):
        return None
    return answer


def _read_log(home: EngineHome) -> str | None:
    """Its end; None if its node does not answer, which Ray would wait for."""
    if home.node_id == ray.get_runtime_context().get_node_id():
        return logs.tail(Path(home.log_path), 10_000)
    if not any(node.node_id == home.node_id and node.answers() for node in placing.nodes()):
        return None
    from ray.util.state import get_log

    name = Path(home.log_path).name
    try:  # by Ray's dashboard, which need not run
        return "".join(get_log(node_id=home.node_id, filename=name, tail=1000, timeout=5))
    except Exception as error:  # noqa: BLE001
        why = type(error).__name__
        return f"(its log {home.log_path} on {home.address} could not be read: {why})"
