"""Starts engines as Ray actors, all at once, and reports which engine failed and why.

Ray places the engines, by the resources and labels of the YAML and by the preference of `placing`.
Every wait here has a deadline. A remote traceback must never reach the user: a failure is a
StartupError with the engine's name, one line with the cause, and the end of its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from disagg.cluster import placing
from disagg.cluster.engines import (
    Engine,
    EngineRecord,
    NoRoom,
    NotNow,
    engine_from,
    outcome_of,
    too_slow,
)
from disagg.config import Deployment, Role
from disagg.engine import guardian
from disagg.engine.actor import DecodeEngine, PrefillEngine
from disagg.engine.spec import EngineFailure, EngineInfo, EngineSpec
from disagg.errors import StartupError

POLL_S = 0.5
ROLES: tuple[Role, Role] = ("prefill", "decode")
_ACTORS = {"prefill": PrefillEngine, "decode": DecodeEngine}
_NODE_LABEL = "ray.io/node-id"  # Ray sets it on each node


Create = Callable[[EngineSpec, str | None, str | None], Any]
"""Creates an engine's actor. Prefers the first node, and never uses the second. Raises NotNow."""


@dataclass(frozen=True)
class Run:
    """The values that all engines of one run of a deployment share."""

    run_id: str
    storage_path: str
    loopback: bool
    secret: str
    engine_key: str

    def replica(self, deployment: Deployment, role: Role, index: int) -> list[EngineSpec]:
        """The specs of one replica: an engine, or the ranks of a group. `index`: of the first."""
        return [
            EngineSpec(
                deployment,
                role,
                index + rank,
                self.run_id,
                self.storage_path,
                self.loopback,
                self.secret,
                self.engine_key,
                rank,
            )
            for rank in range(deployment.data_parallel_size(role))
        ]

    def specs(self, deployment: Deployment) -> list[EngineSpec]:
        """The specs of all replicas of both pools."""
        return [
            spec
            for role in ROLES
            for number in range(deployment.pool(role).replicas)
            for spec in self.replica(deployment, role, number * deployment.data_parallel_size(role))
        ]


def resources() -> Mapping[str, float]:
    """All resources of this Ray, by name."""
    found: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found


def shortfalls(deployments: Sequence[Deployment], have: Mapping[str, float]) -> list[str]:
    """One line for each resource of which the deployments together need more than there is."""
    wanted: dict[str, float] = {}
    for deployment in deployments:
        for role in ROLES:
            replicas = deployment.pool(role).replicas
            for resource, amount in placing.ResourceRequest.of(deployment, role).total.items():
                wanted[resource] = wanted.get(resource, 0) + amount * replicas
    return [
        f"the engines ask for {amount:g} {resource}, this machine has "
        f"{have.get(resource, 0):g}; lower replicas or resources in the YAML"
        for resource, amount in wanted.items()
        if amount > have.get(resource, 0)
    ]


def create(spec: EngineSpec, node_id: str | None, avoid: str | None = None) -> Any:
    """The `Create` of the driver. Ray ends the actor when this process ends."""
    asked = spec.pool.resources
    others = {} if avoid is None else {_NODE_LABEL: f"!{avoid}"}
    options: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
    spread = _request(spec).spread
    if spread and spec.ranks > 1:
        options = {"scheduling_strategy": _bundle_of_rank(spec, others)}
        spread = False
    elif spread:
        # Each rank takes one of the group's GPUs. vLLM finds the group through the actor.
        group = PlacementGroupSchedulingStrategy(_bundles(spec, others), 0, True)
        options = {"scheduling_strategy": group}
    elif node_id is not None:
        # If the node's room is taken meanwhile, Ray uses another node. With Ray's node affinity,
        # even a soft one, the actor would wait for this node.
        options = {
            "label_selector": {_NODE_LABEL: node_id} | asked.labels,
            "fallback_strategy": [{"label_selector": others | asked.labels}],
        }
    elif asked.labels:
        options = {"label_selector": others | asked.labels}
    try:
        return (
            ray.remote(_ACTORS[spec.role])
            .options(
                name=spec.name,
                namespace=spec.run_id,
                num_cpus=asked.num_cpus,
                num_gpus=0 if spread else asked.num_gpus,
                resources=asked.custom,
                max_restarts=0,
                **options,
            )
            .remote(spec)
        )
    except ValueError as error:  # Ray has not yet released the name of the previous actor
        _remove_group(spec)
        raise NotNow(str(error)) from error


def _bundle_of_rank(spec: EngineSpec, others: dict[str, str]) -> PlacementGroupSchedulingStrategy:
    """Its own bundle of the group's, which the first rank requests for all. Raises NotNow."""
    if spec.rank == 0:
        return PlacementGroupSchedulingStrategy(_bundles(spec, others), 0)
    try:
        group = ray.util.get_placement_group(_group_name(spec))
    except ValueError as error:
        raise NotNow(str(error)) from error
    return PlacementGroupSchedulingStrategy(group, spec.rank)


def _bundles(spec: EngineSpec, others: dict[str, str]) -> PlacementGroup:
    """A placement group for ranks that may run on several nodes, on as few nodes as possible.

    Removes the previous one. Raises NotNow.
    """
    request = _request(spec)
    _remove_group(spec)
    try:
        group: PlacementGroup = ray.util.placement_group(
            [dict(bundle) for bundle in request.bundles],
            strategy="PACK",
            name=_group_name(spec),
            bundle_label_selector=[others | dict(request.labels)] * len(request.bundles),
        )
    except (RayError, ValueError) as error:  # Ray has not yet released the previous group's name
        raise NotNow(str(error)) from error
    return group


def _remove_group(spec: EngineSpec) -> None:
    """Remove the engine's placement group, if any: it holds its resources after the actor's end."""
    if not _request(spec).spread or spec.rank:
        return
    try:
        ray.util.remove_placement_group(ray.util.get_placement_group(_group_name(spec)))
    except (RayError, ValueError):  # there is no such group
        return


def _group_name(spec: EngineSpec) -> str:
    return f"{spec.run_id}/{spec.group}"  # all deployments of one `disagg serve` share Ray's names


def _request(spec: EngineSpec) -> placing.ResourceRequest:
    return placing.ResourceRequest.of(spec.deployment, spec.role)


def launch(
    wanted: Sequence[EngineSpec],
    present: Iterable[Engine] = (),
    avoid: str | None = None,
    create: Create = create,
) -> list[Engine]:
    """Create all actors and begin all starts. Returns at once. Raises NotNow.

    The first rank of a data parallel group must be among `wanted`, before the others, or there
    already. `present`: the other engines. `avoid`: a node that may be dead while Ray does not know
    it. An actor started there would hang until Ray knows. So an engine without another node waits
    for one.
    """
    present = list(present)
    nodes = populated(present)
    if not any(node.node_id == avoid and not node.answers() for node in nodes):
        avoid = None
    launched = list[Engine]()
    for spec in wanted:
        launched.append(_launch(spec, nodes, avoid, create, [*present, *launched]))
    return launched


def populated(present: Iterable[Engine]) -> list[placing.Node]:
    """The cluster's nodes, with these engines counted."""
    nodes = placing.nodes()
    by_id = {node.node_id: node for node in nodes}
    for engine in present:
        node = by_id.get(engine.node_id or "")
        if node is None:
            continue
        if engine.home() is not None:
            node.engines[engine.spec.role] += 1
        else:
            node.take(_request(engine.spec).total, engine.spec.role)
    return nodes


def wait_ready(engines: Sequence[Engine], progress: Callable[[str], None]) -> list[EngineInfo]:
    """Wait until all engines serve. Raises StartupError for the first that fails."""
    began = time.monotonic()
    pending = {engine.started: engine for engine in engines}
    while pending:
        for ref in ray.wait(list(pending), timeout=POLL_S)[0]:
            engine = pending.pop(ref)
            started = outcome_of(engine, ref)
            if isinstance(started, EngineFailure):
                raise _did_not_start(engine, started)
            engine.serves(started)
        progress(" · ".join(f"{engine.label}: {engine.stage()}" for engine in engines))
        for engine in pending.values():
            timeout_s = engine.spec.deployment.engine.startup_timeout_s
            if time.monotonic() - began > timeout_s:
                raise _did_not_start(engine, too_slow(engine, timeout_s))
    return [engine.info for engine in engines if engine.info is not None]


def stop(
    engines: Sequence[Engine],
    grace_s: float,
    timeout_s: float,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Stop all engines and wait until their processes are gone. `tell` names what is slow. Raises
    nothing."""
    homes = [home for engine in engines if (home := engine.home())]
    # An engine that vanished, maybe with its node, will not answer.
    there = [engine for engine in engines if engine.started_up and not engine.vanished]
    asked = {engine.actor.stop.remote(grace_s): engine.name for engine in there}
    if asked:
        _, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        if late and tell is not None:
            names = ", ".join(sorted(asked[ref] for ref in late))
            tell(f"{names}: not ended within {timeout_s:g} s of the stop; killed")
    for engine in engines:
        ray.kill(engine.actor)
        _remove_group(engine.spec)
    here = ray.get_runtime_context().get_node_id()
    for home in homes:
        if home.node_id == here:  # on other nodes the guardian cleans up alone
            guardian.wait_gone(home.guardian_pid, home.pid)


def _launch(
    spec: EngineSpec,
    nodes: Sequence[placing.Node],
    avoid: str | None,
    create: Create,
    present: Sequence[Engine],
) -> Engine:
    if spec.rank:
        leader = leader_of(spec, present)
        return engine_from(EngineRecord(spec, create(spec, None, avoid), None, leader=leader))
    request, near = _request(spec), spec.deployment.engine.placement == "near"
    if avoid is not None and not placing.has_room(request, nodes, avoid):
        others = [node for node in nodes if node.node_id != avoid]
        lacks = placing.missing(request, spec.role, others)
        raise NoRoom(f"its node does not answer, so it waits for another node: {lacks}")
    node = None
    if not request.spread and (avoid is not None or near):
        node = placing.choose(request, spec.role, nodes, avoid)
    if node is not None:
        node.take(request.total, spec.role)
    node_id = node.node_id if node else None
    return engine_from(EngineRecord(spec, create(spec, node_id, avoid), node_id))


def leader_of(spec: EngineSpec, engines: Iterable[Engine]) -> Any:
    """The actor of the first rank of its data parallel group; None for that rank. Raises NotNow."""
    if spec.rank == 0:
        return None
    for engine in engines:
        if (engine.spec.run_id, engine.name) == (spec.run_id, spec.group):
            return engine.actor
    raise NotNow(f"{spec.group} is not there")


def _did_not_start(engine: Engine, failure: EngineFailure) -> StartupError:
    return StartupError(f"engine {engine.label} did not start: {failure.cause}", failure.log_tail)
