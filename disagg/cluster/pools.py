"""Starts engines as Ray actors, all at once, and says which one failed and why.

Placement is Ray's, by the resources and labels in the YAML and by what `placing` prefers. Nothing
here waits without a deadline, and
a remote trace never reaches the user: a failure is a StartupError with the engine's name,
one line that says why, and the end of its log.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg.cluster import placing
from disagg.config import Deployment, Role
from disagg.engine import guardian, logs
from disagg.engine.actor import TAIL_LINES, DecodeEngine, PrefillEngine
from disagg.engine.load import EngineLoad
from disagg.engine.spec import EngineFailure, EngineHome, EngineInfo, EngineSpec
from disagg.errors import StartupError

POLL_S = 0.5
ASK_S = 2.0
PLACING_S = 15.0
ROLES: tuple[Role, Role] = ("prefill", "decode")
_ACTORS = {"prefill": PrefillEngine, "decode": DecodeEngine}


@dataclass(eq=False)
class Engine:
    """An engine as the driver sees it, from its launch to its end."""

    spec: EngineSpec
    actor: Any
    """Ray's handle of an EngineActor."""
    started: Any
    launched_at: float
    _home: Any
    preferred_node: str | None = None
    load: EngineLoad | None = None
    """What it last said that it has to do."""
    load_asked_at: float = 0.0
    """When it was asked what it answered there, monotonic."""
    vanished: bool = False
    """Its actor is gone without a word, and its node may be."""
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

    def home(self) -> EngineHome | None:
        """Where it runs, if it runs already."""
        try:
            home: EngineHome = ray.get(self._home, timeout=0)
        except (GetTimeoutError, RayError):
            return None
        return home

    def stage(self) -> str:
        """What it is doing, without waiting for the answer."""
        if self.info is not None:
            return "ready"
        if self.home() is None:
            if time.monotonic() - self.launched_at > PLACING_S:
                pool = self.spec.pool
                return f"waiting: {placing.missing(pool, self.spec.role, placing.nodes())}"
            return self._stage
        if self._progress is not None and ray.wait([self._progress], timeout=0)[0]:
            self._stage = _get(self._progress) or self._stage
            self._progress = None
        if self._progress is None:
            self._progress = self.actor.progress.remote()
        return self._stage

    def serves(self, info: EngineInfo) -> None:
        """From now on, until `ended`."""
        self.info = info
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

    def post_mortem(self, error: RayError) -> EngineFailure:
        """Why the actor itself is gone, from what its log still says."""
        home, self.vanished = self.home(), True
        if home is None:
            return EngineFailure(f"its actor did not start: {logs.describe(error)}", "")
        log = _read_log(home)
        cause = logs.root_cause(log) or f"its process {home.pid} was killed"
        return EngineFailure(cause, "\n".join(log.splitlines()[-TAIL_LINES:]))


@dataclass(frozen=True)
class Run:
    """What all engines of one run of a deployment have in common."""

    run_id: str
    storage_path: str
    loopback: bool
    secret: str
    engine_key: str

    def spec(self, deployment: Deployment, role: Role, index: int) -> EngineSpec:
        """Of one engine."""
        return EngineSpec(
            deployment,
            role,
            index,
            self.run_id,
            self.storage_path,
            self.loopback,
            self.secret,
            self.engine_key,
        )

    def specs(self, deployment: Deployment) -> list[EngineSpec]:
        """One for each replica of both pools."""
        return [
            self.spec(deployment, role, index)
            for role in ROLES
            for index in range(deployment.pool(role).replicas)
        ]


def shortfalls(deployment: Deployment) -> list[str]:
    """What this one machine can never place of it: a line for each resource."""
    have = ray.cluster_resources()  # type: ignore[no-untyped-call]
    wanted: dict[str, float] = {}
    for role in ROLES:
        pool = deployment.pool(role)
        for resource, amount in placing.resources(pool).items():
            wanted[resource] = wanted.get(resource, 0) + amount * pool.replicas
    return [
        f"the engines ask for {amount:g} {resource}, this machine has "
        f"{have.get(resource, 0):g}; lower replicas or resources in the YAML"
        for resource, amount in wanted.items()
        if amount > have.get(resource, 0)
    ]


def launch(
    wanted: Sequence[EngineSpec], present: Iterable[Engine] = (), avoid: str | None = None
) -> list[Engine]:
    """Create all actors and begin all starts; returns at once.

    `present`: the other engines. `avoid`: a node that may be dead before Ray knows it.
    """
    nodes = populated(present)
    return [_launch(spec, nodes, avoid) for spec in wanted]


def populated(present: Iterable[Engine]) -> list[placing.Node]:
    """The cluster's nodes, with these engines on them."""
    nodes = placing.nodes()
    by_id = {node.node_id: node for node in nodes}
    for engine in present:
        node = by_id.get(engine.node_id or "")
        if node is None:
            continue
        if engine.home() is not None:
            node.engines[engine.spec.role] += 1
        else:
            node.take(placing.resources(engine.spec.pool), engine.spec.role)
    return nodes


def wait_ready(
    engines: Sequence[Engine], timeout_s: float, progress: Callable[[str], None]
) -> None:
    """Return when all engines serve. Raises StartupError for the first that fails."""
    deadline = time.monotonic() + timeout_s
    pending = {engine.started: engine for engine in engines}
    while pending:
        for ref in ray.wait(list(pending), timeout=POLL_S)[0]:
            engine = pending.pop(ref)
            started = outcome(engine, ref)
            if isinstance(started, EngineFailure):
                raise _did_not_start(engine, started)
            engine.serves(started)
        progress(" · ".join(f"{engine.name}: {engine.stage()}" for engine in engines))
        if pending and time.monotonic() > deadline:
            engine = next(iter(pending.values()))
            raise _did_not_start(engine, too_slow(engine, timeout_s))


def outcome(engine: Engine, ref: Any) -> EngineInfo | EngineFailure:
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


def stop(engines: Sequence[Engine], grace_s: float, timeout_s: float) -> None:
    """Stop all engines and wait until their processes are gone. Raises nothing."""
    homes = [home for engine in engines if (home := engine.home())]
    asked = [engine.actor.stop.remote(grace_s) for engine in engines if engine.info]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    for engine in engines:
        ray.kill(engine.actor)
    here = ray.get_runtime_context().get_node_id()
    for home in homes:
        if home.node_id == here:  # elsewhere the guardian does it alone
            guardian.wait_gone(home.guardian_pid, home.pid)


def _launch(spec: EngineSpec, nodes: Sequence[placing.Node], avoid: str | None) -> Engine:
    asked, near = spec.pool.resources, spec.deployment.engine.placement == "near"
    node = None
    if near and not asked.labels:
        node = placing.choose(spec.pool, spec.role, nodes, avoid)
    options: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
    if asked.labels:
        options = {"label_selector": asked.labels}
    elif node is not None:
        node.take(placing.resources(spec.pool), spec.role)
        # Soft: should someone else take the room meanwhile, another node will do.
        here = NodeAffinitySchedulingStrategy(node.node_id, soft=True)
        options = {"scheduling_strategy": here}
    actor: Any = (
        ray.remote(_ACTORS[spec.role])
        .options(
            name=spec.name,
            num_cpus=asked.num_cpus,
            num_gpus=asked.num_gpus,
            resources=asked.custom,
            max_restarts=0,
            **options,
        )
        .remote(spec)
    )
    return Engine(
        spec,
        actor,
        actor.start.remote(),
        time.monotonic(),
        actor.home.remote(),
        node.node_id if node else None,
    )


def _did_not_start(engine: Engine, failure: EngineFailure) -> StartupError:
    return StartupError(f"engine {engine.name} did not start: {failure.cause}", failure.log_tail)


def _get(ref: Any) -> str | None:
    try:
        answer: str = ray.get(ref, timeout=ASK_S)
    except (GetTimeoutError, RayError):
        return None
    return answer


def _read_log(home: EngineHome) -> str:
    if home.node_id == ray.get_runtime_context().get_node_id():
        return logs.tail(Path(home.log_path), 10_000)
    from ray.util.state import get_log

    name = Path(home.log_path).name
    try:  # by Ray's dashboard, which need not run, of a node that may be gone
        return "".join(get_log(node_id=home.node_id, filename=name, tail=1000, timeout=5))
    except Exception as error:  # noqa: BLE001
        why = type(error).__name__
        return f"(its log {home.log_path} on {home.address} could not be read: {why})"
