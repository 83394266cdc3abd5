"""Which engines get requests, by the outcomes of their last requests and probes.

An engine that failed three requests in a row is paused; after each pause one request tries it. An
engine that misses two probes in a row gets no requests until it answers one. An engine that comes
back gets a growing share of the requests during its first 10 s.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

_FAILURES = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_MISSED_PROBES = 2
_WARM_UP_S, _FIRST_SHARE = 10.0, 0.1


@dataclass
class _Record:
    """failures: of requests, in a row. missed: probes, in a row. why: the last probe's problem.
    withheld: why the engine gets no requests yet. paused_until, back_at: monotonic times; back_at
    is None after the warm-up, and if the engine was never away."""

    failures: int = 0
    paused_until: float = 0.0
    is_on_trial: bool = False
    missed: int = 0
    why: str | None = None
    handoffs_fail: bool = False
    back_at: float | None = None
    withheld: str | None = None

    @property
    def is_down(self) -> bool:
        return self.missed >= _MISSED_PROBES

    @property
    def is_well(self) -> bool:
        """Whether the engine gets its full share of requests until its next failure."""
        in_service = self.withheld is None and self.back_at is None
        return in_service and self.failures < _FAILURES and not self.is_down


class Health:
    """The health of the engines, as seen by this router process. clock: monotonic seconds.
    is_known: whether an engine may get requests, or has left."""

    def __init__(
        self,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
        is_known: Callable[[EngineEndpoint], bool] = lambda engine: True,
    ) -> None:
        self._metrics, self._clock, self._is_known = metrics, clock, is_known
        self._records: defaultdict[str, _Record] = defaultdict(_Record)
        # All engines that are not well. Each request asks twice: usually this set is empty.
        self._unwell: set[str] = set()
        self._random = random.Random()

    def usable(self, engines: Sequence[EngineEndpoint]) -> Sequence[EngineEndpoint]:
        """The engines to choose from now. During its warm-up, an engine is left out at random."""
        if not self._unwell:
            return engines
        now = self._clock()
        up = [e for e in engines if self._is_up(e, now)]
        return [e for e in up if self._drawn_in_warm_up(e, now)] or up

    def unpaused(self, engines: Sequence[EngineEndpoint]) -> Sequence[EngineEndpoint]:
        """Those that no failed requests speak against just now, whatever probes say."""
        now = self._clock()
        return [engine for engine in engines if self._record(engine).paused_until <= now]

    def trying(self, engine: EngineEndpoint) -> None:
        """A request is about to be sent. To a failing engine it is the only trial for now."""
        if not self._unwell:
            return
        record = self._record(engine)
        if record.failures >= _FAILURES:
            record.is_on_trial = True
            record.paused_until = self._clock() + self._pause_s(record)

    def answered(self, engine: EngineEndpoint, status: int) -> None:
        """The engine answered a request. Status 500 does not count: the request may be wrong."""
        if status in (502, 503, 504):
            self.failed(engine)
        elif status != 500:
            record = self._record(engine)
            if record.failures >= _FAILURES:
                record.back_at = self._clock()
                self._show_paused(engine, paused=False)
            record.failures, record.paused_until = 0, 0.0

    def failed(self, engine: EngineEndpoint) -> None:
        """The engine was unreachable, broke off its answer, or was silent for too long."""
        if not self._is_known(engine):
            return  # an engine that has left may end before its last requests
        record = self._record(engine)
        if self._clock() < record.paused_until and not record.is_on_trial:
            return  # it was sent before the pause, with the others that failed
        record.is_on_trial = False
        record.failures += 1
        if record.failures >= _FAILURES:
            self._unwell.add(engine.name)
            record.paused_until = self._clock() + self._pause_s(record)
            self._show_paused(engine, paused=True)

    def probed(self, engine: EngineEndpoint, problem: str | None) -> None:
        """A probe's outcome: a problem, or None. An engine that was down may be tried at once."""
        record = self._record(engine)
        record.why = problem
        if problem is not None:
            record.missed += 1
            if record.is_down:
                self._unwell.add(engine.name)
            return
        if record.is_down:
            record.back_at = self._clock()
            record.paused_until = 0.0
        record.missed = 0

    def is_suspect(self, engine: EngineEndpoint) -> bool:
        """Whether the engine missed a probe, but not yet enough to count as down."""
        return 0 < self._record(engine).missed < _MISSED_PROBES

    def withhold(self, engine: EngineEndpoint, why: str) -> None:
        """Send it no requests, as long as other engines can serve, until `put_in_service`."""
        self._record(engine).withheld = why
        self._unwell.add(engine.name)

    def put_in_service(self, engine: EngineEndpoint) -> None:
        """Undo `withhold`."""
        if engine.name not in self._records:
            return  # it is gone
        record = self._record(engine)
        record.withheld = None
        if record.is_well:
            self._unwell.discard(engine.name)

    def set_handoffs_fail(self, engine: EngineEndpoint, fail: bool) -> None:
        """Whether handoffs to this decode engine fail."""
        self._record(engine).handoffs_fail = fail

    def forget(self, engine: EngineEndpoint) -> None:
        """The engine is gone. Another one of its name starts with a clean record."""
        self._unwell.discard(engine.name)
        if self._records.pop(engine.name, None) is not None:
            self._show_paused(engine, paused=False)

    def problem(self, engine: EngineEndpoint) -> str | None:
        """Why the engine is not ready, for people to read; None if it is."""
        record = self._record(engine)
        if record.why is not None:
            return record.why
        if record.failures >= _FAILURES:
            return f"{record.failures} requests in a row failed"
        return record.withheld or ("handoffs fail" if record.handoffs_fail else None)

    def _is_up(self, engine: EngineEndpoint, now: float) -> bool:
        record = self._record(engine)
        return record.withheld is None and not record.is_down and record.paused_until <= now

    def _drawn_in_warm_up(self, engine: EngineEndpoint, now: float) -> bool:
        record = self._record(engine)
        if record.back_at is None:
            return True
        share = _FIRST_SHARE + (1 - _FIRST_SHARE) * (now - record.back_at) / _WARM_UP_S
        if share >= 1:
            record.back_at = None
            if record.is_well:
                self._unwell.discard(engine.name)
        return self._random.random() < share

    def _show_paused(self, engine: EngineEndpoint, *, paused: bool) -> None:
        self._metrics.engine_resting.labels(engine.name, engine.role).set(paused)

    def _record(self, engine: EngineEndpoint) -> _Record:
        return self._records[engine.name]

    @staticmethod
    def _pause_s(record: _Record) -> float:
        doublings = min(record.failures - _FAILURES, 10)
        return min(_PAUSE_S * float(2**doublings), _LONGEST_PAUSE_S)
