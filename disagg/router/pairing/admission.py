"""Admits requests: at once, after a wait in a bounded queue, or not at all.

The order is first come, first served. A request gets its seat at a decode engine before any work
is done for it, so the seats at decode engines bound the requests in flight. A request must never
wait without a deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from disagg.config import LimitsSection, Role
from disagg.router.api.errors import ApiError
from disagg.router.pairing.in_flight import InFlight, Seat
from disagg.router.pairing.policies import Pairer
from disagg.router.pairing.request_info import RequestInfo
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint


@dataclass(eq=False)
class _Waiting:
    request: RequestInfo
    tried: Collection[EngineEndpoint]
    partner: EngineEndpoint | None
    seat: asyncio.Future[Seat]
    since: float = field(default_factory=time.monotonic)


class Admission:
    """Gives out seats at engines, within the configured limits."""

    def __init__(
        self, pairer: Pairer, in_flight: InFlight, limits: LimitsSection, metrics: RouterMetrics
    ) -> None:
        self._pairer, self._in_flight, self._limits = pairer, in_flight, limits
        self._metrics = metrics
        self._queues: dict[Role, deque[_Waiting]] = {"prefill": deque(), "decode": deque()}
        self._last_wait_s = 0.0

    async def seat(
        self,
        role: Role,
        request: RequestInfo,
        tried: Collection[EngineEndpoint] = (),
        partner: EngineEndpoint | None = None,
    ) -> Seat | None:
        """A seat at an engine of this role that is not among `tried` and is compatible with
        `partner`. Waits in the queue for one; returns None if no such engine is up.

        A request that has tried engines was admitted before, so it goes to the head of the queue.
        Raises `ApiError` 429 if the queue is full, or the wait was too long.
        """
        queue = self._queues[role]
        if tried or not queue:
            seat = self.another(role, request, tried, partner)
            if seat is not None or not self._pairer.serves(role, tried, partner):
                return seat
        if not tried and len(queue) >= self._limits.max_queued:
            raise self._busy("too many requests are waiting already")
        waiting = _Waiting(request, tried, partner, asyncio.get_running_loop().create_future())
        (queue.appendleft if tried else queue.append)(waiting)
        self._metrics.queued.inc()
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                return await waiting.seat
        except TimeoutError as error:
            self._abandon(waiting)
            limit = self._limits.queue_timeout_s
            raise self._busy(f"no engine had a free seat for {limit:g} s") from error
        except BaseException:
            self._abandon(waiting)
            raise
        finally:
            self._last_wait_s = time.monotonic() - waiting.since
            self._metrics.queued.dec()
            self._metrics.queue_time.observe(self._last_wait_s)

    def another(
        self,
        role: Role,
        request: RequestInfo,
        tried: Collection[EngineEndpoint] = (),
        partner: EngineEndpoint | None = None,
    ) -> Seat | None:
        """A free seat at an engine that is not among `tried` and is compatible with `partner`;
        None if there is none. Does not wait."""
        limits = self._limits
        if role == "decode" and self._in_flight.of_role(role) >= limits.max_in_flight:
            return None
        room = limits.max_in_flight_per_engine
        engine = self._pairer.choose(role, request, tried, partner, room=room)
        if engine is None:
            return None
        return self._in_flight.take(engine, request.tokens, self._admit_waiting)

    def admit_waiting(self) -> None:
        """Try to seat the waiting requests: the engines have changed."""
        for role in self._queues:
            self._admit_waiting(role)

    def _admit_waiting(self, role: Role) -> None:
        queue, left = self._queues[role], list[_Waiting]()
        while queue:
            waiting = queue.popleft()
            if waiting.seat.done():
                continue
            seat = self.another(role, waiting.request, waiting.tried, waiting.partner)
            if seat is not None:
                waiting.seat.set_result(seat)
                continue
            left.append(waiting)
            if not waiting.tried:
                break  # first come, first served
        queue.extendleft(reversed(left))

    def _abandon(self, waiting: _Waiting) -> None:
        """Leave the queue. A seat assigned at the same moment goes to the next request."""
        if waiting.seat.done() and not waiting.seat.cancelled():
            waiting.seat.result().leave()
            return
        waiting.seat.cancel()
        for queue in self._queues.values():
            if waiting in queue:
                queue.remove(waiting)

    def _busy(self, why: str) -> ApiError:
        after = max(1, math.ceil(self._last_wait_s))
        return ApiError(429, f"the service is busy: {why}", {"Retry-After": str(after)})
