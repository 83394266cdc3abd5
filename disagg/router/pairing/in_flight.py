"""The requests that this router process has in flight at each engine.

Of other router processes it knows what they tell (`other_routers.py`). Room for requests is counted
by each process alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, get_args

from disagg.config import Role
from disagg.router.pairing.other_routers import Load, OtherRouters
from disagg.router.pairing.prefill_backlog import PrefillBacklog, Speed
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

# The cost of a request besides its prompt, in prompt tokens.
REQUEST_TOKENS = 256


OnFree: TypeAlias = Callable[[Role], None]


@dataclass(slots=True)
class _EngineLoad:
    """The load of one engine. `cost`: in prompt tokens."""

    url: str
    backlog: PrefillBacklog
    cost: int = 0
    requests: int = 0


@dataclass(slots=True)
class Seat:
    """A request's place at an engine, until `leave`, which may be called more than once."""

    engine: EngineEndpoint
    _cost: int
    _load: _EngineLoad
    _by_role: Counter[Role]
    _on_free: OnFree | None
    _is_taken: bool = True
    _tokens: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether this process has no other request at the engine."""
        return self._load.requests == 1

    def reads(self, tokens: int) -> None:
        """The engine has to compute so many tokens, until `has_read`, `answers` or `leave`."""
        self._tokens = tokens
        self._load.backlog.begin(tokens)

    def has_read(self) -> None:
        """The engine has just finished the prompt, and did no other work for this request."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._load.backlog.finish(tokens)

    def answers(self) -> None:
        """The answer has begun, so the engine finished the prompt some time ago."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._load.backlog.forget(tokens)

    def leave(self) -> None:
        """The engine is done with the request."""
        self.answers()
        if not self._is_taken:
            return
        self._is_taken, role = False, self.engine.role
        self._load.cost -= self._cost
        self._load.requests -= 1
        self._by_role[role] -= 1
        if self._on_free is not None:
            self._on_free(role)


class InFlight:
    """The load of each engine. `others`: what other router processes tell."""

    def __init__(self, metrics: RouterMetrics, others: OtherRouters | None = None) -> None:
        self._others = others or OtherRouters()
        self._by_role: Counter[Role] = Counter()
        for role in get_args(Role):
            metrics.in_flight.labels(role).set_function(partial(self.of_role, role))
        # One for all engines: those of a pool are equal, and each alone gives few measurements.
        self._speed = Speed()
        self._loads: dict[str, _EngineLoad] = {}

    def take(self, engine: EngineEndpoint, tokens: int, on_free: OnFree | None = None) -> Seat:
        """A seat for a request. `tokens`: what its prompt costs the engine (`Choice.work`).
        `on_free` is called when the seat is left."""
        cost, load = tokens + REQUEST_TOKENS, self._of(engine)
        load.cost += cost
        load.requests += 1
        self._by_role[engine.role] += 1
        return Seat(engine, cost, load, self._by_role, on_free)

    def cost(self, engine: EngineEndpoint) -> int:
        """The engine's work in flight, in prompt tokens, with that of other routers."""
        return self._of(engine).cost + self._others.cost(engine.url)

    def reading_s(self, engine: EngineEndpoint) -> float:
        """The estimated time until the engine has computed all prompts sent to it."""
        return self._of(engine).backlog.left_s() + self._others.reading_s(engine.url)

    def takes_s(self, tokens: int) -> float:
        """The estimated time to compute so many prompt tokens; 0 before the first measurement."""
        return self._speed.takes(tokens)

    @property
    def token_s(self) -> float:
        """What one more token of a prompt takes; 0 before the first measurement."""
        return self._speed.token_s

    def requests(self, engine: EngineEndpoint) -> int:
        """How many requests have a seat at this engine."""
        return self._of(engine).requests

    def by_engine(self) -> dict[str, int]:
        """How many requests have a seat at each engine that has any, by name."""
        return {name: load.requests for name, load in self._loads.items() if load.requests}

    def loads(self) -> dict[str, Load]:
        """The load that this process gives to each engine that has any, by URL."""
        return {
            load.url: Load(load.cost, round(load.backlog.left_s(), 3))
            for load in self._loads.values()
            if load.cost
        }

    def forget(self, engine: str) -> None:
        """The engine of this name is gone. Seats that are left there stay valid."""
        self._loads.pop(engine, None)

    def of_role(self, role: Role) -> int:
        """How many requests have a seat at engines of this role."""
        return self._by_role[role]

    def _of(self, engine: EngineEndpoint) -> _EngineLoad:
        load = self._loads.get(engine.name)
        if load is None:
            backlog = PrefillBacklog(self._speed)
            load = self._loads[engine.name] = _EngineLoad(engine.url, backlog)
        return load
