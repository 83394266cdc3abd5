"""Orders for a deployment, and what is said of them; how a command finds the deployment on Ray.

Whoever can reach Ray can reach the supervisor's actor, and nobody else: who may run code there may
change what runs. Decides nothing.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from disagg.config import Deployment, Role

NAME = "supervisor-"
"""How the actors of supervisors are called, before a number."""
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
class CommandOutcome:
    """What became of an order, and why if it came to nothing. refused: before anything was done."""

    word: Word
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class News:
    """What was said since. outcome: None while the order is carried out."""

    lines: Sequence[str]
    after: int
    outcome: CommandOutcome | None


@dataclass
class _Given:
    order: Order
    outcome: CommandOutcome | None = None


class Orders:
    """What a supervisor hears of orders, and says of them: here of nobody's."""

    def take(self) -> tuple[int, Order] | None:
        """The next order, if there is one."""
        return None

    def say(self, line: str) -> None:
        """Something happened."""

    def over(self, number: int, word: Word, problems: Sequence[str] = ()) -> None:
        """All that comes of this order has come."""


class Control(Orders):
    """Between commands, on the actor's event loop, and the supervisor, in its thread.

    If the actor dies, whoever waits for an answer hears that; what was ordered goes on.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._orders: list[_Given] = []
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._said = 0
        self._changed = asyncio.Event()

    # ---- commands, on the loop -----------------------------------------------------------------

    def give(self, order: Order) -> tuple[int, int]:
        """The order's number, and from where on to `follow` it."""
        self._orders.append(_Given(order))
        number = len(self._orders) - 1
        self._waiting.put(number)
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

    # ---- the supervisor, from any thread -------------------------------------------------------

    def take(self) -> tuple[int, Order] | None:
        try:
            number = self._waiting.get_nowait()
        except queue.Empty:
            return None
        return number, self._orders[number].order

    def say(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._say, line)

    def over(self, number: int, word: Word, problems: Sequence[str] = ()) -> None:
        self._loop.call_soon_threadsafe(self._over, number, CommandOutcome(word, tuple(problems)))

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._said += 1
        self._changed.set()

    def _over(self, number: int, outcome: CommandOutcome) -> None:
        self._orders[number].outcome = outcome
        self._changed.set()


@dataclass(frozen=True)
class Deployments:
    """On one Ray. by_run: the name and the supervisor of each that serves. mute: runs whose
    supervisor does not answer, or not yet."""

    by_run: Mapping[str, tuple[str, Any]]
    mute: Sequence[str]


def deployments() -> Deployments:
    """Those on the Ray we are connected to."""
    by_run: dict[str, tuple[str, Any]] = {}
    mute = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if not actor["name"].startswith(NAME):
            continue
        run = actor["namespace"]
        try:
            supervisor: Any = ray.get_actor(actor["name"], run)
            name: str = ray.get(supervisor.name.remote(), timeout=TELL_S)
        except (ValueError, AttributeError):
            continue  # it ends just now, or is somebody else's
        except RayError:
            mute.append(run)
            continue
        by_run[run] = name, supervisor
    return Deployments(by_run, mute)
