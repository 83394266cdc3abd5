"""On which node an engine should run: Ray decides, this says what would be good.

A prefill and a decode engine on one node hand over by a faster way, and two engines of one role on
two nodes do not die together. So an engine goes where the fewest of its own role are, and among
those where the most of the other role are. One whose ranks may be on several nodes asks for a
bundle each, and gets all of them or none.
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
class Ask:
    """What one engine asks of Ray, by Ray's names. `bundles`: each is on one node; more than one
    if `spread`, and then the first has the engine itself. `labels`: of these nodes."""

    bundles: tuple[Mapping[str, float], ...]
    labels: Mapping[str, str]
    spread: bool = False

    @classmethod
    def of(cls, deployment: Deployment, role: Role) -> Ask:
        """What an engine of this role asks for."""
        resources = deployment.pool(role).resources
        own = {"CPU": resources.num_cpus, **resources.custom}
        if not deployment.spreads_ranks(role):
            return cls((_some(own | {"GPU": resources.num_gpus}),), resources.labels)
        # vLLM wants one GPU in each.
        others = ({"GPU": 1.0},) * (int(resources.num_gpus) - 1)
        return cls((_some(own | {"GPU": 1.0}), *others), resources.labels, spread=True)

    @property
    def total(self) -> dict[str, float]:
        """All of it."""
        total: Counter[str] = Counter()
        for bundle in self.bundles:
            total.update(bundle)
        return dict(total)


@dataclass
class Node:
    """A living Ray node. free: resources nobody has asked for. engines: of ours, by role."""

    node_id: str
    address: str
    free: dict[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    engines: Counter[Role] = field(default_factory=Counter)
    port: int = 0
    """Where its raylet listens."""
    reached: bool = False
    """By `is_gone`, once."""

    def take(self, asked: Mapping[str, float], role: Role) -> None:
        """An engine more, which Ray need not know of yet."""
        self.give(asked)
        self.engines[role] += 1

    def give(self, asked: Mapping[str, float]) -> None:
        """So much less is free."""
        for name, amount in asked.items():
            self.free[name] = self.free.get(name, 0.0) - amount

    def answers(self) -> bool:
        """Whether its raylet takes connections; Ray itself knows of a death a minute later."""
        try:
            socket.create_connection((self.address, self.port), _ANSWERS_S).close()
        except OSError:
            return False
        return True

    def is_gone(self) -> bool:
        """Whether its raylet certainly is, whose actors end with it: its host refuses what it
        took before. Of a host that says nothing, or that a firewall speaks for, only Ray knows."""
        try:
            socket.create_connection((self.address, self.port), _REFUSES_S).close()
        except ConnectionRefusedError:
            return self.reached
        except OSError:
            return False
        self.reached = True
        return False

    def fits(self, asked: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        """Whether it has that much, and these labels."""
        enough = all(self.free.get(name, 0.0) >= amount for name, amount in asked.items())
        return enough and all(_is(self.labels.get(name), value) for name, value in labels.items())


def nodes() -> list[Node]:
    """The living nodes of the cluster, without our engines."""
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


def choose(ask: Ask, role: Role, among: Sequence[Node], avoid: str | None = None) -> Node | None:
    """The best node that has room for all of it now, other than the one to avoid; None if none
    has."""
    asked = ask.total
    fitting = [node for node in among if node.node_id != avoid and node.fits(asked, ask.labels)]

    def rank(node: Node) -> tuple[float, ...]:
        own, others = node.engines[role], sum(node.engines.values()) - node.engines[role]
        return own, -others, -node.free.get("GPU", 0.0), -node.free.get("CPU", 0.0)

    return min(fitting, key=rank, default=None)


def has_room(ask: Ask, among: Sequence[Node], avoid: str | None = None) -> bool:
    """Whether the nodes, but for the one to avoid, have room for all bundles now."""
    left = [replace(node, free=dict(node.free)) for node in among if node.node_id != avoid]
    for bundle in ask.bundles:
        node = next((node for node in left if node.fits(bundle, ask.labels)), None)
        if node is None:
            return False
        node.give(bundle)
    return True


def missing(ask: Ask, role: Role, among: Sequence[Node]) -> str:
    """Why no node can have such an engine: what it asks for, what is free, what to do."""
    asked, labels = ask.total, ask.labels
    names = list(asked)
    free = "; ".join(
        f"{node.address} {_amounts({name: node.free.get(name, 0.0) for name in names})}"
        + ("" if node.fits({}, labels) else " (other labels)")
        for node in among
    )
    wanted = " and ".join([_amounts(asked), *(f"{name}={value}" for name, value in labels.items())])
    where = "on one node"
    if ask.spread:
        where = f"in {len(ask.bundles)} bundles, the first of {_amounts(ask.bundles[0])}"
    advice = f"add a node or lower {role}.resources"
    if not ask.spread and 1 < asked.get("GPU", 0) <= sum(n.free.get("GPU", 0.0) for n in among):
        advice += ", or set distributed_executor_backend: ray, and its ranks may be on several"
    return f"needs {wanted} {where}; free: {free or 'no node'}; {advice}"


def _is(label: str | None, wanted: str) -> bool:
    """As Ray selects: a value, `in(a,b)`, or either behind `!`."""
    if wanted.startswith("!"):
        return not _is(label, wanted[1:])
    if wanted.startswith("in(") and wanted.endswith(")"):
        return label in [value.strip() for value in wanted[3:-1].split(",")]
    return label == wanted


def _some(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in amounts.items() if amount}


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"
