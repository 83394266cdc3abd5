"""What this router has sent to each engine and was not answered yet.

Each router process knows its own requests alone; with several of them the numbers are shares
that differ by chance, and choices stay sensible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, get_args

from disagg.config import Role
from disagg.router.pairing.prefill_backlog import PrefillBacklog, Speed
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

# What a request costs besides its prompt, in prompt tokens.
_REQUEST_TOKENS = 256


Left: TypeAlias = Callable[[Role], None]


@dataclass(slots=True)
class _EngineLoad:
    """One engine's."""

    reading: PrefillBacklog
    cost: int = 0
    requests: int = 0


@dataclass(slots=True)
class Seat:
    """A request's place at an engine, until `leave`, which may be called again."""

    engine: EngineEndpoint
    _cost: int
    _load: _EngineLoad
    _by_role: Counter[Role]
    _left: Left | None
    _is_taken: bool = True
    _tokens: int = 0

    def reads(self, tokens: int) -> None:
        """The engine has to read so long a prompt, until `has_read`, `answers` or `leave`."""
        self._tokens = tokens
        self._load.reading.begin(tokens)

    def has_read(self) -> None:
        """It has, just now, and did nothing else with it."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._load.reading.finish(tokens)

    def answers(self) -> None:
        """Its answer has begun, so that it must have read the prompt."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._load.reading.forget(tokens)

    def leave(self) -> None:
        """The engine has nothing more to do with the request."""
        self.answers()
        if not self._is_taken:
            return
        self._is_taken, role = False, self.engine.role
        self._load.cost -= self._cost
        self._load.requests -= 1
        self._by_role[role] -= 1
        if self._left is not None:
            self._left(role)


class InFlight:
    """The load of the engines."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._by_role: Counter[Role] = Counter()
        for role in get_args(Role):
            metrics.in_flight.labels(role).set_function(partial(self.of_role, role))
        self._speed = Speed()  # one for all: little is known of each, and pools are of one kind
        self._loads: dict[str, _EngineLoad] = {}

    def take(self, engine: EngineEndpoint, tokens: int, left: Left | None = None) -> Seat:
        """A seat for a request of so many prompt tokens; `left` is called when it is free again."""
        cost, load = tokens + _REQUEST_TOKENS, self._of(engine)
        load.cost += cost
        load.requests += 1
        self._by_role[engine.role] += 1
        return Seat(engine, cost, load, self._by_role, left)

    def cost(self, engine: EngineEndpoint) -> int:
        """What the engine has to do now, in prompt tokens."""
        return self._of(engine).cost

    def reading_s(self, engine: EngineEndpoint) -> float:
        """About how long it has to read what it was sent."""
        return self._of(engine).reading.left_s()

    def takes_s(self, tokens: int) -> float:
        """About how long an engine takes to read so many tokens; 0 while nothing is known."""
        return self._speed.takes(tokens)

    def requests(self, engine: EngineEndpoint) -> int:
        """How many requests have a seat there."""
        return self._of(engine).requests

    def of_role(self, role: Role) -> int:
        """How many requests have a seat at engines of this role."""
        return self._by_role[role]

    def _of(self, engine: EngineEndpoint) -> _EngineLoad:
        load = self._loads.get(engine.name)
        if load is None:
            load = self._loads[engine.name] = _EngineLoad(PrefillBacklog(self._speed))
        return load
