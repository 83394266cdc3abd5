"""The supervisor's view of an engine's actor: its node, its stage, its load, why it ended.

Every wait for an engine has a deadline. This module must never create or end an actor.
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
from disagg.router.topology import name_in

ASK_S = 2.0
PLACING_S = 15.0


class NotNow(Exception):
    """An actor cannot be created at the moment. Try again soon."""


class NoRoom(NotNow):
    """No node has room. The message says what the user can do."""


@dataclass(frozen=True)
class EngineRecord:
    """An engine's actor and its history, for the next supervisor. node_id: the preferred node.
    served: whether it has served. deaths: deaths in a row before this start."""

    spec: EngineSpec
    actor: Any
    node_id: str | None
    served: bool = False
    deaths: int = 0
    leader: Any = None
    """The actor of the first rank of its data parallel group; None for that rank itself."""


@dataclass(eq=False)
class Engine:
    """One engine from its launch to its end."""

    spec: EngineSpec
    actor: Any
    """Ray's handle of the `EngineActor`."""
    started: Any
    launched_at: float
    _home: Any
    preferred_node: str | None = None
    leader: Any = None
    served: bool = False
    """Whether it has served, maybe under an earlier supervisor."""
    deaths: int = 0
    """Deaths in a row before this start."""
    load: EngineLoad | None = None
    """Its last answer about its load."""
    load_asked_at: float = 0.0
    """When that answer was asked for, in monotonic seconds."""
    vanished: bool = False
    """Its actor ended without a report, or does not answer. Its node may have died."""
    _found: EngineHome | None = None
    _progress: Any = None
    _load: Any = None
    _load_asked_at: float = 0.0
    _stage: str = "starting a process"
    info: EngineInfo | None = None
    ended: Any = None

    @property
    def name(self) -> str:
        """The engine's name, such as `prefill-0`."""
        return self.spec.name

    @property
    def label(self) -> str:
        """Its name beside engines of other deployments, such as `chat/prefill-0`."""
        return name_in(self.spec.deployment.group, self.name)

    @property
    def node_id(self) -> str | None:
        """The node it runs on; the preferred node before that is known."""
        home = self.home()
        return home.node_id if home else self.preferred_node

    @property
    def record(self) -> EngineRecord:
        """Its record for the next supervisor. Once it served, earlier deaths no longer count."""
        deaths = 0 if self.served else self.deaths
        return EngineRecord(
            self.spec, self.actor, self.preferred_node, self.served, deaths, self.leader
        )

    def home(self) -> EngineHome | None:
        """Where its process runs, or None if that is not known yet. Never waits."""
        if self._found is None:
            with contextlib.suppress(GetTimeoutError, RayError):
                self._found = ray.get(self._home, timeout=0)
        return self._found

    def stage(self) -> str:
        """The stage of its start. Never waits for an answer."""
        if self.info is not None:
            return "ready"
        if self.home() is None:
            if time.monotonic() - self.launched_at > PLACING_S:
                request = placing.ResourceRequest.of(self.spec.deployment, self.spec.role)
                return f"waiting: {placing.missing(request, self.spec.role, placing.nodes())}"
            return self._stage
        if self._progress is not None and ray.wait([self._progress], timeout=0)[0]:
            self._stage = _get(self._progress) or self._stage
            self._progress = None
        if self._progress is None:
            self._progress = self.actor.progress.remote()
        return self._stage

    @property
    def started_up(self) -> bool:
        """Whether its start has ended, with success or failure."""
        return self.info is not None or bool(ray.wait([self.started], timeout=0)[0])

    def serves(self, info: EngineInfo) -> None:
        """Mark it as serving, until `ended` is ready."""
        self.info, self.served = info, True
        self.ended = self.actor.ended.remote()

    def look(self, every_s: float) -> float:
        """Ask for its load if the last time was `every_s` seconds ago. Never waits.

        Returns the seconds since a question that its actor has not answered; 0 if there is none.
        """
        now = time.monotonic()
        if self._load is not None and ray.wait([self._load], timeout=0)[0]:
            with contextlib.suppress(RayError):  # the engine died; `ended` reports it
                self.load, self.load_asked_at = ray.get(self._load), self._load_asked_at
            self._load = None
        if self._load is None and now - self._load_asked_at >= every_s:
            self._load, self._load_asked_at = self.actor.load.remote(), now
        return 0.0 if self._load is None else now - self._load_asked_at

    @property
    def ran_on(self) -> str | None:
        """The node it ran on, which may differ from the preferred node."""
        home = self.home()
        return self.node_id if home is None else home.node_id

    def post_mortem(self, error: RayError) -> EngineFailure:
        """Why the actor itself ended, from its log."""
        home, self.vanished = self.home(), True
        if home is None:
            return EngineFailure(f"its actor did not start: {logs.describe(error)}", "")
        log = _read_log(home)
        if log is None:
            return EngineFailure(f"its node {home.address} does not answer", "")
        cause = (
            logs.root_cause(log, served=self.info is not None)
            or f"its process {home.pid} was killed"
        )
        return EngineFailure(cause, "\n".join(log.splitlines()[-TAIL_LINES:]))


def engine_from(record: EngineRecord) -> Engine:
    """The engine of an actor that was created. Begins its start, or joins it."""
    actor = record.actor
    start, home = actor.start.remote(record.leader), actor.home.remote()
    return Engine(
        record.spec,
        actor,
        start,
        time.monotonic(),
        home,
        record.node_id,
        record.leader,
        record.served,
        record.deaths,
    )


def outcome_of(engine: Engine, ref: Any) -> EngineInfo | EngineFailure:
    """The outcome of a start that has ended: `ref` is ready."""
    try:
        started: EngineInfo | EngineFailure = ray.get(ref)
    except RayError as error:
        return engine.post_mortem(error)
    return started


def too_slow(engine: Engine, timeout_s: float) -> EngineFailure:
    """The failure of an engine that did not start within `timeout_s`."""
    tail = _get(engine.actor.log_tail.remote()) or ""
    limit = f"{timeout_s:g} s (engine.startup_timeout_s)"
    return EngineFailure(f"it did not start within {limit}; last stage: {engine.stage()}", tail)


def why_ended(engine: Engine) -> EngineFailure:
    """Why an engine ended whose `ended` is ready."""
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
    """The last lines of its log; None if its node does not answer. Ray would wait for that node."""
    if home.node_id == ray.get_runtime_context().get_node_id():
        return logs.tail(Path(home.log_path), 10_000)
    if not any(node.node_id == home.node_id and node.answers() for node in placing.nodes()):
        return None
    from ray.util.state import get_log

    name = Path(home.log_path).name
    try:  # Ray's dashboard fetches it, and may not run
        return "".join(get_log(node_id=home.node_id, filename=name, tail=1000, timeout=5))
    except Exception as error:  # noqa: BLE001
        why = type(error).__name__
        return f"(its log {home.log_path} on {home.address} could not be read: {why})"
