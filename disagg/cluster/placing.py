"""On which node an engine should run: Ray decides, this says what would be good.

A prefill and a decode engine on one node hand over by a faster way, and two engines of one role on
two nodes do not die together. So an engine goes where the fewest of its own role are, and among
those where the most of the other role are.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray._private.state import available_resources_per_node

from disagg.config import PoolSection, Role

_ANSWERS_S = 1.0
_REFUSES_S = 0.1


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
        for name, amount in asked.items():
            self.free[name] = self.free.get(name, 0.0) - amount
        self.engines[role] += 1

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


def resources(pool: PoolSection) -> dict[str, float]:
    """What one engine asks of Ray, by Ray's names."""
    asked = {"CPU": pool.resources.num_cpus, "GPU": pool.resources.num_gpus}
    return {name: amount for name, amount in (asked | pool.resources.custom).items() if amount}


def choose(
    pool: PoolSection, role: Role, among: Sequence[Node], avoid: str | None = None
) -> Node | None:
    """The best node that has room now, other than the one to avoid; None if none has."""
    asked = resources(pool)
    labels = pool.resources.labels
    fitting = [node for node in among if node.node_id != avoid and node.fits(asked, labels)]

    def rank(node: Node) -> tuple[float, ...]:
        own, others = node.engines[role], sum(node.engines.values()) - node.engines[role]
        return own, -others, -node.free.get("GPU", 0.0), -node.free.get("CPU", 0.0)

    return min(fitting, key=rank, default=None)


def missing(pool: PoolSection, role: Role, among: Sequence[Node]) -> str:
    """Why no node can have an engine of this pool: what it asks for, what is free, what to do."""
    asked, labels = resources(pool), pool.resources.labels
    names = list(asked)
    free = "; ".join(
        f"{node.address} {_amounts({name: node.free.get(name, 0.0) for name in names})}"
        + ("" if node.fits({}, labels) else " (other labels)")
        for node in among
    )
    wanted = " and ".join([_amounts(asked), *(f"{name}={value}" for name, value in labels.items())])
    return (
        f"needs {wanted} on one node; free: {free or 'no node'}; "
        f"add a node or lower {role}.resources"
    )


def _is(label: str | None, wanted: str) -> bool:
    # What Ray's operators (`!`, `in(…)`) let through is left to Ray.
    return label == wanted or wanted.startswith(("!", "in("))


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"
