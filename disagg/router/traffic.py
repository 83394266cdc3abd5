"""What this router has sent to each engine and was not answered yet.

Each router process knows its own requests alone; with several of them the numbers are shares
that differ by chance, and choices stay sensible.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

from disagg.config import Role
from disagg.router.metrics import RouterMetrics
from disagg.router.reading import Reading, Speed
from disagg.router.topology import EngineEndpoint

# What a request costs besides its prompt, in prompt tokens.
_REQUEST_TOKENS = 256


@dataclass
class Seat:
    """A request's place at an engine, until `leave`, which may be called again."""

    engine: EngineEndpoint
    _leave: Callable[[], None] | None
    _reading: Reading
    _tokens: int = 0

    def reads(self, tokens: int) -> None:
        """The engine has to read so long a prompt, until `has_read`, `answers` or `leave`."""
        self._tokens = tokens
        self._reading.begin(tokens)

    def has_read(self) -> None:
        """It has, just now, and did nothing else with it."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._reading.finish(tokens)

    def answers(self) -> None:
        """Its answer has begun, so that it must have read the prompt."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._reading.forget(tokens)

    def leave(self) -> None:
        """The engine has nothing more to do with the request."""
        self.answers()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Traffic:
    """The load of the engines."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._cost: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._by_role: Counter[Role] = Counter()
        for role in get_args(Role):
            metrics.in_flight.labels(role).set_function(partial(self.of_role, role))
        speed = Speed()  # one for all: little is known of each, and pools are of one kind
        self._reading: defaultdict[str, Reading] = defaultdict(lambda: Reading(speed))

    def take(
        self, engine: EngineEndpoint, tokens: int, left: Callable[[Role], None] | None = None
    ) -> Seat:
        """A seat for a request of so many prompt tokens; `left` is called when it is free again."""
        cost = tokens + _REQUEST_TOKENS

        def count(by: int) -> None:
            self._cost[engine.name] += by * cost
            self._requests[engine.name] += by
            self._by_role[engine.role] += by

        def leave() -> None:
            count(-1)
            if left is not None:
                left(engine.role)

        count(1)
        return Seat(engine, leave, self._reading[engine.name])

    def cost(self, engine: EngineEndpoint) -> int:
        """What the engine has to do now, in prompt tokens."""
        return self._cost[engine.name]

    def reading_s(self, engine: EngineEndpoint) -> float:
        """About how long it has to read what it was sent."""
        return self._reading[engine.name].left_s()

    def requests(self, engine: EngineEndpoint) -> int:
        """How many requests have a seat there."""
        return self._requests[engine.name]

    def of_role(self, role: Role) -> int:
        """How many requests have a seat at engines of this role."""
        return self._by_role[role]
