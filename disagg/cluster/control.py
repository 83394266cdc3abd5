"""Where `disagg scale` and `disagg apply` reach a deployment: a small named actor.

Whoever can reach Ray can reach it, and nobody else: who may run code there may change what runs.
It holds an order until the driver has taken it, and what is said of it until it is read. Decides
nothing. If it dies, whoever waits for an answer hears that; what was ordered goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg.config import Deployment, Role

NAME = "control"
TELL_S = 2.0
_KEPT = 1000


@dataclass(frozen=True)
class Scale:
    """So many engines in these pools."""

    replicas: Mapping[Role, int]


@dataclass(frozen=True)
class Apply:
    """All as in this deployment."""

    deployment: Deployment


Order = Scale | Apply


Word = Literal["done", "refused", "taken back"]


@dataclass(frozen=True)
class Outcome:
    """What became of an order, and why if it came to nothing. refused: before anything was done."""

    word: Word
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class News:
    """What was said since. outcome: None while the order is carried out."""

    lines: Sequence[str]
    after: int
    outcome: Outcome | None


@dataclass
class _Given:
    order: Order
    outcome: Outcome | None = None


class Control:
    """The actor: a mailbox between commands and the driver."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: list[_Given] = []
        self._waiting: asyncio.Queue[int] = asyncio.Queue()
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._said = 0
        self._changed = asyncio.Event()

    async def name(self) -> str:
        """The deployment's name."""
        return self._name

    # ---- commands ------------------------------------------------------------------------------

    async def give(self, order: Order) -> tuple[int, int]:
        """The order's number, and from where on to `follow` it."""
        self._orders.append(_Given(order))
        number = len(self._orders) - 1
        self._waiting.put_nowait(number)
        return number, self._said

    async def follow(self, number: int, after: int, wait_s: float) -> News:
        """What was said after line `after`, as soon as there is anything, for up to `wait_s`."""
        given = self._orders[number]
        if self._said == after and given.outcome is None:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                pass
        fresh = min(self._said - after, len(self._lines))
        lines = list(self._lines)[len(self._lines) - fresh :]
        return News(lines, self._said, given.outcome)

    # ---- the driver ----------------------------------------------------------------------------

    async def take(self) -> tuple[int, Order]:
        """The next order, when there is one."""
        number = await self._waiting.get()
        return number, self._orders[number].order

    async def say(self, line: str) -> None:
        """Something happened."""
        self._lines.append(line)
        self._said += 1
        self._wake()

    async def over(self, number: int, outcome: Outcome) -> None:
        """All that comes of this order has come."""
        self._orders[number].outcome = outcome
        self._wake()

    def _wake(self) -> None:
        self._changed.set()


class Mailbox:
    """The driver's end. The actor is started again if it dies."""

    def __init__(self, name: str, node_id: str) -> None:
        self._name, self._node_id = name, node_id
        self._actor: Any = None
        self.next: Any = None
        """Ray's promise of an order."""

    def open(self) -> None:
        """Start the actor. `next` stays None while Ray has not let go of the last one's name."""
        here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        options = {"name": NAME, "num_cpus": 0, "scheduling_strategy": here}
        try:
            self._actor = ray.remote(Control).options(**options).remote(self._name)
        except ValueError:
            return
        self.next = self._actor.take.remote()

    def take(self) -> tuple[int, Order] | None:
        """The order that `next` is there with; None if the actor died instead: `open` it again."""
        try:
            taken: tuple[int, Order] = ray.get(self.next)
        except RayError:
            self.close()
            return None
        self.next = self._actor.take.remote()
        return taken

    def say(self, line: str) -> None:
        """For whoever follows an order. Does not wait."""
        if self._actor is not None:
            self._actor.say.remote(line)

    def over(self, number: int, word: Word, problems: Sequence[str] = ()) -> None:
        """Answer an order. Does not wait."""
        if self._actor is not None:
            self._actor.over.remote(number, Outcome(word, tuple(problems)))

    def close(self) -> None:
        """End the actor; who follows an order hears that the deployment stopped."""
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = self.next = None


def deployments() -> dict[str, tuple[str, Any]]:
    """By run: the name of each deployment on the Ray that we are connected to, and its control."""
    found: dict[str, tuple[str, Any]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"] != NAME:
            continue
        try:
            control: Any = ray.get_actor(NAME, namespace=actor["namespace"])
            name: str = ray.get(control.name.remote(), timeout=TELL_S)
        except (ValueError, RayError, GetTimeoutError, AttributeError):
            continue  # it ends just now, or is somebody else's of the same name
        found[actor["namespace"]] = name, control
    return found
