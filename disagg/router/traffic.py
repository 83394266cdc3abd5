"""What this router has sent to each engine and was not answered yet, and how that went lately.

Each router process knows its own requests alone; with several of them the numbers are shares
that differ by chance, and choices stay sensible.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.router.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

# What a request costs besides its prompt, in prompt tokens.
_REQUEST_TOKENS = 256
_FAILURES = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


@dataclass
class _Record:
    """failures: in a row. `resting_until`: monotonic; after it one request may try."""

    failures: int = 0
    resting_until: float = 0.0


class Traffic:
    """Load and health of the engines, as this router sees them."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._cost: Counter[str] = Counter()
        self._records: dict[str, _Record] = {}

    # ---- load ------------------------------------------------------------------------------

    def begin(self, engine: EngineEndpoint, tokens: int) -> Callable[[], None]:
        """A request is with this engine until the returned function is called, once."""
        cost = tokens + _REQUEST_TOKENS
        gauge = self._metrics.in_flight.labels(engine.role)
        self._cost[engine.name] += cost
        gauge.inc()

        def end() -> None:
            self._cost[engine.name] -= cost
            gauge.dec()

        return end

    def cost(self, engine: EngineEndpoint) -> int:
        """What the engine has to do now, in prompt tokens."""
        return self._cost[engine.name]

    # ---- health ----------------------------------------------------------------------------

    def usable(self, engines: Sequence[EngineEndpoint]) -> list[EngineEndpoint]:
        """Those worth a try; all of them if none is."""
        now = time.monotonic()
        rested = [e for e in engines if self._record(e).resting_until <= now]
        return rested or list(engines)

    def trying(self, engine: EngineEndpoint) -> None:
        """A request is about to be sent: of a failing engine it is the trial, and the only one."""
        record = self._record(engine)
        if record.failures >= _FAILURES:
            record.resting_until = time.monotonic() + self._pause(record)

    def succeeded(self, engine: EngineEndpoint) -> None:
        """It answered."""
        self._records.pop(engine.name, None)
        self._metrics.engine_resting.labels(engine.name, engine.role).set(0)

    def failed(self, engine: EngineEndpoint) -> None:
        """It could not be reached, broke, or gave no answer in time."""
        record = self._record(engine)
        record.failures += 1
        if record.failures >= _FAILURES:
            record.resting_until = time.monotonic() + self._pause(record)
            self._metrics.engine_resting.labels(engine.name, engine.role).set(1)

    def _record(self, engine: EngineEndpoint) -> _Record:
        return self._records.setdefault(engine.name, _Record())

    @staticmethod
    def _pause(record: _Record) -> float:
        doublings = min(record.failures - _FAILURES, 10)
        return min(_PAUSE_S * float(2**doublings), _LONGEST_PAUSE_S)
