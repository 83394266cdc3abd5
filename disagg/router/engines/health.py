"""Which engines are worth a request, by how they answered requests and probes lately.

An engine that failed three times in a row rests, and after each rest one request tries it. One
that answers no probes is left alone until it does. Whoever comes back gets little at first.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

_FAILURES = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_MISSED_PROBES = 2
_WARM_UP_S, _FIRST_SHARE = 10.0, 0.1


@dataclass
class _Record:
    """failures: of requests, in a row. resting_until: monotonic. missed: probes, in a row.
    why: the last probe's problem. back_at: when it returned to service, None if never away.
    held: why it is to get nothing yet."""

    failures: int = 0
    resting_until: float = 0.0
    missed: int = 0
    why: str | None = None
    handoffs_fail: bool = False
    back_at: float | None = None
    held: str | None = None

    @property
    def is_down(self) -> bool:
        return self.missed >= _MISSED_PROBES

    @property
    def is_well(self) -> bool:
        """Whether it may get any request, now and as long as nothing happens to it."""
        at_work = self.held is None and self.back_at is None
        return at_work and self.failures < _FAILURES and not self.is_down


class Health:
    """The engines' health, as this router process sees it."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._records: defaultdict[str, _Record] = defaultdict(_Record)
        # The others' records need not be looked at, which is done twice for each request.
        self._ailing: set[str] = set()
        self._random = random.Random()

    def usable(self, engines: Sequence[EngineEndpoint]) -> Sequence[EngineEndpoint]:
        """Those worth a try now; empty if none is. One that is just back is often left out."""
        if not self._ailing:
            return engines
        now = time.monotonic()
        up = [e for e in engines if self._is_up(e, now)]
        return [e for e in up if self._gets_its_turn(e, now)] or up

    def trying(self, engine: EngineEndpoint) -> None:
        """A request is about to be sent: of a failing engine it is the trial, and the only one."""
        if not self._ailing:
            return
        record = self._record(engine)
        if record.failures >= _FAILURES:
            record.resting_until = time.monotonic() + self._pause(record)

    def answered(self, engine: EngineEndpoint, status: int) -> None:
        """It answered a request; 500 says nothing of the engine, it may be the request's fault."""
        if status in (502, 503, 504):
            self.failed(engine)
        elif status != 500:
            record = self._record(engine)
            if record.failures >= _FAILURES:
                record.back_at = time.monotonic()
                self._show(engine, resting=False)
            record.failures, record.resting_until = 0, 0.0

    def failed(self, engine: EngineEndpoint) -> None:
        """It could not be reached, broke, or was silent too long."""
        record = self._record(engine)
        record.failures += 1
        if record.failures >= _FAILURES:
            self._ailing.add(engine.name)
            record.resting_until = time.monotonic() + self._pause(record)
            self._show(engine, resting=True)

    def probed(self, engine: EngineEndpoint, problem: str | None) -> None:
        """A probe's outcome; None is well. What is well again may be tried at once."""
        record = self._record(engine)
        record.why = problem
        if problem is not None:
            record.missed += 1
            if record.is_down:
                self._ailing.add(engine.name)
            return
        if record.is_down:
            record.back_at = time.monotonic()
            record.resting_until = 0.0
        record.missed = 0

    def is_doubtful(self, engine: EngineEndpoint) -> bool:
        """Whether it missed a probe, and another one would show that it is down."""
        return 0 < self._record(engine).missed < _MISSED_PROBES

    def hold(self, engine: EngineEndpoint, why: str) -> None:
        """Give it nothing as long as there are others, until `release`."""
        self._record(engine).held = why
        self._ailing.add(engine.name)

    def release(self, engine: EngineEndpoint) -> None:
        """The counterpart of `hold`."""
        if engine.name not in self._records:
            return  # it is gone
        record = self._record(engine)
        record.held = None
        if record.is_well:
            self._ailing.discard(engine.name)

    def handoffs(self, engine: EngineEndpoint, *, fail: bool) -> None:
        """Whether caches arrive at this decode engine."""
        self._record(engine).handoffs_fail = fail

    def forget(self, engine: EngineEndpoint) -> None:
        """It is gone; who gets its name starts with a clean record."""
        self._ailing.discard(engine.name)
        if self._records.pop(engine.name, None) is not None:
            self._show(engine, resting=False)

    def problem(self, engine: EngineEndpoint) -> str | None:
        """Why it is not ready, for people to read."""
        record = self._record(engine)
        if record.why is not None:
            return record.why
        if record.failures >= _FAILURES:
            return f"{record.failures} requests in a row failed"
        return record.held or ("handoffs fail" if record.handoffs_fail else None)

    def _is_up(self, engine: EngineEndpoint, now: float) -> bool:
        record = self._record(engine)
        return record.held is None and not record.is_down and record.resting_until <= now

    def _gets_its_turn(self, engine: EngineEndpoint, now: float) -> bool:
        record = self._record(engine)
        if record.back_at is None:
            return True
        share = _FIRST_SHARE + (1 - _FIRST_SHARE) * (now - record.back_at) / _WARM_UP_S
        if share >= 1:
            record.back_at = None
            if record.is_well:
                self._ailing.discard(engine.name)
        return self._random.random() < share

    def _show(self, engine: EngineEndpoint, *, resting: bool) -> None:
        self._metrics.engine_resting.labels(engine.name, engine.role).set(resting)

    def _record(self, engine: EngineEndpoint) -> _Record:
        return self._records[engine.name]

    @staticmethod
    def _pause(record: _Record) -> float:
        doublings = min(record.failures - _FAILURES, 10)
        return min(_PAUSE_S * float(2**doublings), _LONGEST_PAUSE_S)
