"""The decode leg: an engine's answer whose first bytes have come.

Until then nothing was passed on, so a leg that fails is sent to another engine, with the same
params; if there is no other, it waits until the engine is back. Only a time-out is not: whoever
waited so long shall hear of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import aiohttp

from disagg.config import LimitsSection
from disagg.router.api.errors import ApiError, EngineRefusal, Unreachable
from disagg.router.engines.health import Health
from disagg.router.pairing.admission import Admission
from disagg.router.pairing.in_flight import Seat
from disagg.router.request.plan import RequestPlan
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream.response import UpstreamResponse

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
_LONGEST_REFUSAL = 64 << 10
AnyAnswer: TypeAlias = aiohttp.ClientResponse | UpstreamResponse
Call: TypeAlias = Callable[[EngineEndpoint], Awaitable[AnyAnswer]]


@dataclass(slots=True)
class Opened:
    """An answer on its way. Whoever holds it must `close` it, in whatever way it ends."""

    answer: AnyAnswer
    seat: Seat
    health: Health = field(repr=False)
    first: bytes = b""
    _timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    _waits_since: float | None = None
    _silence_s: float = 0.0
    _is_events: bool | None = field(default=None, repr=False)

    @property
    def engine(self) -> EngineEndpoint:
        return self.seat.engine

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def raw_headers(self) -> Sequence[tuple[bytes, bytes]]:
        return self.answer.raw_headers

    @property
    def is_events(self) -> bool:
        """Whether it is an event stream that another event can follow."""
        if self._is_events is None:
            sent = {name.lower(): value for name, value in self.answer.raw_headers}
            is_stream = sent.get(b"content-type", b"").startswith(b"text/event-stream")
            self._is_events = is_stream and b"content-encoding" not in sent
        return self._is_events

    async def chunk(self, silence_s: float) -> bytes:
        """What has come since; empty at the end. What goes wrong becomes an `ApiError`."""
        self._waits_since, self._silence_s = time.monotonic(), silence_s
        is_ready = isinstance(self.answer, UpstreamResponse) and self.answer.is_ready
        if self._timer is None and not is_ready:
            self._timer = asyncio.get_running_loop().call_later(silence_s, self._look)
        try:
            return await self.answer.content.readany()
        except TimeoutError as error:
            self.health.failed(self.engine)
            raise ApiError(504, f"the engine was silent for {silence_s:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            self.health.failed(self.engine)
            raise ApiError(502, "the engine's answer broke off") from error
        finally:
            self._waits_since = None

    def _look(self) -> None:
        """Whether the engine is silent for too long. One timer for an answer: one for each chunk
        costs more than the chunk."""
        since = self._waits_since
        left = self._silence_s if since is None else since + self._silence_s - time.monotonic()
        if left <= 0:
            self.answer.content.set_exception(TimeoutError())
        else:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)

    def stop_watching(self) -> None:
        """Nobody waits; or a limit of another length begins."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Closing the connection is how the engine learns that nobody listens any more."""
        self.stop_watching()
        self.answer.close()
        self.seat.leave()


class DecodeLeg:
    """Opens answers."""

    def __init__(
        self,
        admission: Admission,
        health: Health,
        metrics: RouterMetrics,
        limits: LimitsSection,
    ) -> None:
        self._admission, self._health = admission, health
        self._metrics, self._limits = metrics, limits

    async def open(
        self,
        call: Call,
        seat: Seat,
        plan: RequestPlan,
        record: Record,
        *,
        partner: EngineEndpoint | None = None,
        attempts: int = _ATTEMPTS,
        limit_s: float | None = None,
    ) -> Opened:
        """The answer of the seat's engine, or of another one; never a 5xx. Gives the seat up if
        there is none. Raises `ApiError`, an engine's own words among them.

        `attempts`: how often the request may be sent; a request may be what ends an engine. `call`
        gives an answer whose head has come, in time, or raises `ApiError`. `partner`: the prefill
        engine that holds the prompt's KV, if any. `limit_s`: until the first bytes come.
        """
        tried: list[EngineEndpoint] = []
        sent, gives_up_at = 0, time.monotonic() + self._limits.queue_timeout_s
        while True:
            tried.append(seat.engine)
            record.decode = seat.engine.name
            opened: Opened | None = None
            failure: ApiError | None = None
            try:
                opened = await self._on(call, seat, limit_s or self._limits.first_byte_timeout_s)
                if opened.answer.status < 500:
                    return opened
            except ApiError as error:
                failure = error
            other: Seat | None = None
            sent += not isinstance(failure, Unreachable)
            is_late = failure is not None and failure.status == 504
            if sent < attempts and not is_late and time.monotonic() < gives_up_at:
                other = await self._elsewhere(plan, tried, partner, opened)
            if other is None:
                if opened is not None:
                    failure = await self._refusal(opened)
                assert failure is not None
                raise failure
            if opened is not None:
                opened.close()
            logger.warning("decode on %s failed, trying %s", seat.engine.name, other.engine.name)
            self._metrics.retries.labels("decode").inc()
            record.retries += 1
            seat = other

    async def _elsewhere(
        self,
        plan: RequestPlan,
        tried: list[EngineEndpoint],
        partner: EngineEndpoint | None,
        refused: Opened | None,
    ) -> Seat | None:
        if refused is not None:
            refused.seat.leave()  # else it might wait for its own
        seat = self._admission.seat
        try:
            other = await seat("decode", plan, tried, partner, is_admitted=True)
            if other is None and refused is None:
                tried.clear()
                other = await seat("decode", plan, tried, partner, is_admitted=True)
            return other
        except ApiError as error:
            if refused is None and error.status == 503:
                raise  # it says which engines are away
            return None  # why it was refused tells more than that others have no room
        except BaseException:
            if refused is not None:
                refused.close()
            raise

    async def _refusal(self, opened: Opened) -> ApiError:
        """An engine's 5xx as an error: in its own words if they are OpenAI's shape."""
        content, limit = opened.first, self._limits.between_bytes_timeout_s
        try:
            while len(content) < _LONGEST_REFUSAL and (more := await opened.chunk(limit)):
                content += more
        except ApiError:
            content = b""
        finally:
            opened.close()
        return EngineRefusal.of(opened.answer.status, content)

    async def _on(self, call: Call, seat: Seat, limit: float) -> Opened:
        began = time.monotonic()
        try:
            answer = await call(seat.engine)
        except BaseException as error:
            seat.leave()
            if isinstance(error, ApiError):
                self._health.failed(seat.engine)
            raise
        opened = Opened(answer, seat, self._health)
        self._health.answered(seat.engine, answer.status)
        try:
            left = limit - (time.monotonic() - began)
            opened.first = await opened.chunk(max(left, 0.001))
            opened.stop_watching()
        except BaseException:
            opened.close()
            raise
        return opened
