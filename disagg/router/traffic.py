"""What this router has sent to each engine and was not answered yet.

Each router process knows its own requests alone; with several of them the numbers are shares
that differ by chance, and choices stay sensible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from disagg.config import Role
from disagg.router.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

# What a request costs besides its prompt, in prompt tokens.
_REQUEST_TOKENS = 256


@dataclass
class Seat:
    """A request's place at an engine, until `leave`, which may be called again. cost: of this
    request, in prompt tokens."""

    engine: EngineEndpoint
    cost: int
    _leave: Callable[[], None] | None

    def leave(self) -> None:
        """The engine has nothing more to do with the request."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Traffic:
    """The load of the engines."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._cost: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._by_role: Counter[Role] = Counter()
        self._elsewhere: Counter[str] = Counter()

    def take(
        self, engine: EngineEndpoint, tokens: int, left: Callable[[Role], None] | None = None
    ) -> Seat:
        """A seat for a request of so many prompt tokens; `left` is called when it is free again."""
        cost = tokens + _REQUEST_TOKENS
        gauge = self._metrics.in_flight.labels(engine.role)

        def count(by: int) -> None:
            self._cost[engine.name] += by * cost
            self._requests[engine.name] += by
            self._by_role[engine.role] += by
            gauge.inc(by)

        def leave() -> None:
            count(-1)
            if left is not None:
                left(engine.role)

        count(1)
        return Seat(engine, cost, leave)

    def cost(self, engine: EngineEndpoint) -> int:
        """What the engine has to do now, in prompt tokens."""
        return self._cost[engine.name]

    def cost_now(self, engine: EngineEndpoint) -> int:
        """The same, without what is not there yet."""
        return self._cost[engine.name] - self._elsewhere[engine.name]

    @contextmanager
    def elsewhere(self, seat: Seat) -> Iterator[None]:
        """While inside, another engine reads the prompt of the request that has this seat."""
        self._elsewhere[seat.engine.name] += seat.cost
        try:
            yield
        finally:
            self._elsewhere[seat.engine.name] -= seat.cost

    def requests(self, engine: EngineEndpoint) -> int:
        """How many requests have a seat there."""
        return self._requests[engine.name]

    def of_role(self, role: Role) -> int:
        """How many requests have a seat at engines of this role."""
        return self._by_role[role]
