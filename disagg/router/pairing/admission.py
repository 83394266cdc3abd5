"""Admits requests: at once, after a wait in a bounded queue, or not at all.

The order is first come, first served for each client, and fair between clients (`fair_queue.py`).
A request gets its seat at a decode engine before any work is done for it, so the seats at decode
engines bound the requests in flight. While no decode engine is up, requests wait as well. A request
must never wait without a deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import get_args

from disagg.config import LimitsSection, Role
from disagg.router.api.errors import ApiError
from disagg.router.pairing.fair_queue import FairQueue, Served
from disagg.router.pairing.in_flight import REQUEST_TOKENS, InFlight, Seat
from disagg.router.pairing.policies import Pairer
from disagg.router.pairing.request_info import RequestInfo
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

_LOOK_S = 0.25
"""How often a queue is looked at, because an engine's pause may be over."""
_UNKNOWN_S = 5.0
"""What a client is told to wait for an engine of which nothing is known."""


@dataclass(eq=False)
class _Waiting:
    request: RequestInfo
    tried: Collection[EngineEndpoint]
    partner: EngineEndpoint | None
    is_admitted: bool
    seat: asyncio.Future[Seat]
    since: float = field(default_factory=time.monotonic)


class Admission:
    """Gives out seats at engines, within the configured limits."""

    def __init__(
        self,
        pairer: Pairer,
        in_flight: InFlight,
        limits: LimitsSection,
        metrics: RouterMetrics,
        served: Mapping[Role, Served],
    ) -> None:
        self._pairer, self._in_flight, self._limits = pairer, in_flight, limits
        self._metrics, self._served = metrics, served
        self._queues: dict[Role, FairQueue[_Waiting]] = {
            role: FairQueue(served[role]) for role in get_args(Role)
        }
        self._last_wait_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def seat(
        self,
        role: Role,
        request: RequestInfo,
        tried: Collection[EngineEndpoint] = (),
        partner: EngineEndpoint | None = None,
        *,
        is_admitted: bool = False,
    ) -> Seat | None:
        """A seat at an engine of this role that is not among `tried` and is compatible with
        `partner`. Waits in the queue for one; returns None if no such engine is up, nor will be.

        `is_admitted`: the request had a seat before, so it goes to the head of the queue. Raises
        `ApiError` 429 or, while no engine is up, 503 if the queue is full or the wait was too long.
        """
        queue = self._queues[role]
        if is_admitted or not queue:
            if not is_admitted:
                self._served[role].comes(request.client)
            seat = self._seat_now(role, request, tried, partner, is_admitted=is_admitted)
            if seat is not None or not self._pairer.awaits(role, tried, partner):
                return seat
        if not is_admitted and len(queue) >= self._limits.max_queued:
            self._make_room(role, queue, request)
        given = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request, tried, partner, is_admitted, given)
        if is_admitted:
            queue.push_first(waiting)
        else:
            queue.push(request.client, waiting)
        self._look_later()
        self._metrics.queued.inc()
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                return await waiting.seat
        except TimeoutError as error:
            self._abandon(waiting)
            limit = self._limits.queue_timeout_s
            raise self._refusal(role, f"no engine had a free seat for {limit:g} s") from error
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
        chosen = self._pairer.choose(role, request, tried, partner, room=room)
        if chosen is None:
            return None
        return self._in_flight.take(chosen.engine, chosen.work, self._admit_waiting)

    def admit_waiting(self) -> None:
        """Try to seat the waiting requests: the engines have changed."""
        for role in self._queues:
            self._admit_waiting(role)

    def _seat_now(
        self,
        role: Role,
        request: RequestInfo,
        tried: Collection[EngineEndpoint],
        partner: EngineEndpoint | None,
        *,
        is_admitted: bool,
    ) -> Seat | None:
        seat = self.another(role, request, tried, partner)
        if seat is not None and not is_admitted:
            self._served[role].seats(request.client, request.tokens + REQUEST_TOKENS)
        return seat

    def _admit_waiting(self, role: Role) -> None:
        queue = self._queues[role]
        if not queue:
            return  # as after most requests
        for waiting in queue.first():
            self._try(role, queue, waiting)  # each may wait for another engine
        while (found := queue.next()) is not None:
            if not self._try(role, queue, found[1]):
                break

    def _try(self, role: Role, queue: FairQueue[_Waiting], waiting: _Waiting) -> bool:
        """Whether it left the queue."""
        if not waiting.seat.done():
            seat = self._seat_now(
                role,
                waiting.request,
                waiting.tried,
                waiting.partner,
                is_admitted=waiting.is_admitted,
            )
            if seat is None:
                return False
            waiting.seat.set_result(seat)
        queue.remove(waiting)
        return True

    def _abandon(self, waiting: _Waiting) -> None:
        """Leave the queue. A seat assigned at the same moment goes to the next request."""
        given = waiting.seat
        if given.done() and not given.cancelled() and given.exception() is None:
            given.result().leave()
            return
        given.cancel()
        for queue in self._queues.values():
            queue.remove(waiting)

    def _make_room(self, role: Role, queue: FairQueue[_Waiting], request: RequestInfo) -> None:
        refusal = self._refusal(role, "too many requests are waiting already")
        other = queue.to_give_way(request.client)
        if other is None or other.seat.done():
            raise refusal
        queue.remove(other)
        other.seat.set_exception(refusal)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self.admit_waiting()
        if any(self._queues.values()):
            self._look_later()

    def _refusal(self, role: Role, why: str) -> ApiError:
        if self._pairer.serves(role):
            return ApiError(429, f"the service is busy: {why}", _after(self._last_wait_s))
        words, back_s = self._pairer.absence(role)
        if back_s is not None:
            words += f"; back in about {math.ceil(max(1.0, back_s))} s"
        retry = _after(_UNKNOWN_S if back_s is None else back_s)
        return ApiError(503, f"no {role} engine is up ({words}): {why}", retry)


def _after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
