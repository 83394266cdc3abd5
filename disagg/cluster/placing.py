"""Which node an engine prefers. Ray decides where it runs.

A prefill and a decode engine on one node use faster transports. Two engines of one role on two
nodes do not die together. So an engine prefers the node with the fewest engines of its own role,
and among those the node with the most engines of the other role. An engine whose ranks may run on
several nodes requests one bundle for each rank, and gets all bundles or none. So does a group of
data parallel ranks.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ray
from ray._private.state import available_resources_per_node

from disagg.config import Deployment, Role

_ANSWERS_S = 1.0
_REFUSES_S = 0.1


@dataclass(frozen=True)
class ResourceRequest:
    """The resources that one engine or one data parallel group requests, by Ray's names.

    bundles: each is placed on one node. There are several if `spread`: one for each rank. labels:
    labels that the nodes must have.
    """

    bundles: tuple[Mapping[str, float], ...]
    labels: Mapping[str, str]
    spread: bool = False

    @classmethod
    def of(cls, deployment: Deployment, role: Role) -> ResourceRequest:
        """The request of an engine of this role, or of its data parallel group."""
        resources = deployment.pool(role).resources
        own = {"CPU": resources.num_cpus, **resources.custom}
        if (ranks := deployment.data_parallel_size(role)) > 1:
            one = _some(own | {"GPU": resources.num_gpus})
            # Ray places no bundle of nothing; nor need it.
            return cls((one,) * ranks, resources.labels, spread=bool(one))
        if not deployment.spreads_ranks(role):
            return cls((_some(own | {"GPU": resources.num_gpus}),), resources.labels)
        # vLLM requires one GPU in each bundle.
        others = ({"GPU": 1.0},) * (int(resources.num_gpus) - 1)
        return cls((_some(own | {"GPU": 1.0}), *others), resources.labels, spread=True)

    @property
    def total(self) -> dict[str, float]:
        """The sum of all bundles."""
        total: Counter[str] = Counter()
        for bundle in self.bundles:
            total.update(bundle)
        return dict(total)


@dataclass
class Node:
    """A living Ray node. free: resources that are not taken. engines: number of our engines, by
    role."""

    node_id: str
    address: str
    free: dict[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    engines: Counter[Role] = field(default_factory=Counter)
    port: int = 0
    """The port of its raylet."""
    reached: bool = False
    """Whether `is_gone` has once connected to its raylet."""

    def take(self, asked: Mapping[str, float], role: Role) -> None:
        """Count one more engine, which Ray may not know yet."""
        self.give(asked)
        self.engines[role] += 1

    def give(self, asked: Mapping[str, float]) -> None:
        """Subtract from the free resources."""
        for name, amount in asked.items():
            self.free[name] = self.free.get(name, 0.0) - amount

    def answers(self) -> bool:
        """Whether its raylet takes connections. Ray itself notices a dead node after a minute."""
        try:
            socket.create_connection((self.address, self.port), _ANSWERS_S).close()
        except OSError:
            return False
        return True

    def is_gone(self) -> bool:
        """Whether its raylet has certainly ended, and all its actors with it.

        That is so when the host refuses a connection that it took before. If the host does not
        answer, or a firewall refuses for it, only Ray can know.
        """
        try:
            socket.create_connection((self.address, self.port), _REFUSES_S).close()
        except ConnectionRefusedError:
            return self.reached
        except OSError:
            return False
        self.reached = True
        return False

    def fits(self, asked: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        """Whether it has these free resources and these labels."""
        enough = all(self.free.get(name, 0.0) >= amount for name, amount in asked.items())
        return enough and all(_is(self.labels.get(name), value) for name, value in labels.items())


def nodes() -> list[Node]:
    """The living nodes of the cluster. Their engines are not counted yet (see `populated`)."""
    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            dict(free.get(node["NodeID"], {})),
            node.get("Labels") or {},
            port=node["NodeManagerPort"],
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def choose(
    request: ResourceRequest, role: Role, among: Sequence[Node], avoid: str | None = None
) -> Node | None:
    """The best node with room for the whole request now, except the node to avoid; else None."""
    asked = request.total
    fitting = [node for node in among if node.node_id != avoid and node.fits(asked, request.labels)]

    def rank(node: Node) -> tuple[float, ...]:
        own, others = node.engines[role], sum(node.engines.values()) - node.engines[role]
        return own, -others, -node.free.get("GPU", 0.0), -node.free.get("CPU", 0.0)

    return min(fitting, key=rank, default=None)


def has_room(request: ResourceRequest, among: Sequence[Node], avoid: str | None = None) -> bool:
    """Whether the nodes, except the one to avoid, have room for all bundles now."""
    left = [replace(node, free=dict(node.free)) for node in among if node.node_id != avoid]
    for bundle in request.bundles:
        node = next((node for node in left if node.fits(bundle, request.labels)), None)
        if node is None:
            return False
        node.give(bundle)
    return True


def missing(request: ResourceRequest, role: Role, among: Sequence[Node]) -> str:
    """A message: the resources that the engine needs, what is free on each node, what to do."""
    asked, labels = request.total, request.labels
    names = list(asked)
    free = "; ".join(
        f"{node.address} {_amounts({name: node.free.get(name, 0.0) for name in names})}"
        + ("" if node.fits({}, labels) else " (other labels)")
        for node in among
    )
    wanted = " and ".join([_amounts(asked), *(f"{name}={value}" for name, value in labels.items())])
    where = "on one node"
    if request.spread:
        where = f"in {len(request.bundles)} bundles, the first of {_amounts(request.bundles[0])}"
    advice = f"add a node or lower {role}.resources"
    if not request.spread and 1 < asked.get("GPU", 0) <= sum(n.free.get("GPU", 0.0) for n in among):
        advice += ", or set distributed_executor_backend: ray to place its ranks on several nodes"
    return f"needs {wanted} {where}; free: {free or 'no node'}; {advice}"


def _is(label: str | None, wanted: str) -> bool:
    """Ray's label selector: a value, `in(a,b)`, or one of them after `!`."""
    if wanted.startswith("!"):
        return not _is(label, wanted[1:])
    if wanted.startswith("in(") and wanted.endswith(")"):
        return label in [value.strip() for value in wanted[3:-1].split(",")]
    return label == wanted


def _some(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in amounts.items() if amount}


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"
