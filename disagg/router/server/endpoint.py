"""Serves one route, from a request's first byte to its answer's last: checks, metrics, logs.

Requests to the paired paths bypass FastAPI's middleware and routing, through which every chunk of
an answer would pass too. So this module must catch every error itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.router.api import paths
from disagg.router.api.errors import ApiError
from disagg.router.request.keep_alive import KeptAlive
from disagg.router.request.relay import Relayed
from disagg.router.server import operators
from disagg.router.server.api_keys import Caller, KeyRing, header
from disagg.router.server.client_disconnect import (
    CONNECTION,
    ClientLeft,
    Connection,
    WhileConnected,
)
from disagg.router.server.failures import Failures
from disagg.router.server.file_descriptors import FileDescriptors
from disagg.router.telemetry.access_log import ID_HEADER, AccessLog, Record, request_id
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.telemetry.tracing import Trace

_CLIENT_LEFT = 499
_ID = ID_HEADER.encode()
Answer: TypeAlias = Response | Relayed | KeptAlive
Work: TypeAlias = Callable[[Request, bytes, Record], Awaitable[Answer]]


class Endpoint:
    """One route as an ASGI app. `work` returns the answer; the endpoint sends and counts it.

    `metrics`: by the name of the deployment that served a request; "" if none did. `limit`: of the
    body, in bytes. `guarded`: the route has operators' paths too.
    """

    def __init__(
        self,
        route: str,
        work: Work,
        metrics: Mapping[str, RouterMetrics],
        failures: Failures,
        keys: KeyRing,
        limit: int,
        tracer: Any,
        log: AccessLog,
        descriptors: FileDescriptors,
        *,
        guarded: bool = False,
    ) -> None:
        self._guarded = guarded
        self._route, self._work, self._metrics = route, work, metrics
        self._keys, self._limit, self._tracer = keys, limit, tracer
        self._failures, self._log = failures, log
        self._descriptors = descriptors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Always answers. Raises an error that is a defect of the router, for uvicorn to log."""
        status: int | None = None
        why: str | None = None
        request = Request(scope, receive)
        record = Record(self._route, request_id(header(scope, _ID)))
        operator: Caller | None = None
        if self._log.shows_clients and scope["client"] is not None:
            record.client = scope["client"][0]
        trace: Trace | None = None
        if self._tracer is not None:
            trace = Trace(self._tracer, record, request.headers)
            record.trace = trace.headers
        try:
            try:
                caller = self._keys.check(scope)
                record.key_name = caller.name
                if self._guarded:
                    _refuse_websocket(scope)
                    if operators.is_operators(scope):
                        operators.check(caller, self._keys)
                        operator = caller
                data = await _body(receive, self._limit)
                self._descriptors.take_request()
                with WhileConnected(scope):
                    answer = await self._work(request, data, record)
                    status = answer.status_code
                    if record.metering is not None:
                        send = record.metering.wrap(send)
                    await _with_id(answer, record)(scope, receive, send)
            except ApiError as error:
                status, why = error.status, error.message
                answer = error.response(paths.style(scope["path"]))
                await _with_id(answer, record)(scope, receive, send)
        except ClientLeft:
            if status is None:  # in mid-answer it is the status already sent
                connection: Connection = scope["state"][CONNECTION]
                refusal = connection.refusal
                status, why = (refusal.status, refusal.message) if refusal else (_CLIENT_LEFT, None)
        except Exception:
            if status is None:
                answer = INTERNAL_ERROR.response(paths.style(scope["path"]))
                await _with_id(answer, record)(scope, receive, send)
            raise
        finally:
            status = status or 500
            if record.metering is not None:
                record.metering.finish()
            self._metrics[record.deployment].answered(self._route, status)
            self._log.write(record, status)
            if operator is not None:
                operators.audit(self._log, operator, scope, status)
            self._failures.note(status, record, why)
            if trace is not None:
                trace.end(status)


INTERNAL_ERROR = ApiError(500, "the router failed on this request; see its log")


def _with_id(answer: Answer, record: Record) -> Answer:
    """The answer with its request's id; the others add the id themselves."""
    if isinstance(answer, Response):
        answer.headers[ID_HEADER] = record.id
    return answer


def _refuse_websocket(scope: Scope) -> None:
    """`ApiError` 501 for a WebSocket handshake. Other offers to upgrade may be ignored, but a
    client that asks for a WebSocket can use nothing else."""
    if scope["method"] == "GET" and (header(scope, b"upgrade") or "").lower() == "websocket":
        raise ApiError(
            501, "the router does not relay WebSockets; use the HTTP API, or ask an engine itself"
        )


async def _body(receive: Receive, limit: int) -> bytes:
    pieces: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        pieces.append(message["body"])
        size += len(pieces[-1])
        more = message["more_body"]
        if size > limit:
            raise ApiError(413, f"the body is over {limit} bytes (router.limits.max_body_bytes)")
    return b"".join(pieces)
