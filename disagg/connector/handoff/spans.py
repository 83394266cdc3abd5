"""A span for each handoff, in the trace of its request, if vLLM exports traces
(`otlp_traces_endpoint`)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

# vLLM sets it in its processes when traces are on, after it has set up their tracer.
_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def open_tracer() -> Tracer | None:
    """The tracer of this engine; None if it exports no traces."""
    if not os.environ.get(_ENDPOINT):
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        return None  # vLLM has said so
    return trace.get_tracer("disagg.connector")


class HandoffSpan:
    """One load, from now until `end`. headers: the request's W3C trace context."""

    def __init__(self, tracer: Tracer, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(headers)
        self._span = tracer.start_span("handoff", context, start_time=time.time_ns())

    def end(self, outcome: str, transport: str, size: int, reason: str | None) -> None:
        """The load has ended on all ranks. size: bytes that moved."""
        self._span.set_attribute("disagg.outcome", outcome)
        self._span.set_attribute("disagg.transport", transport)
        self._span.set_attribute("disagg.bytes", size)
        if reason is not None:
            self._span.set_attribute("disagg.reason", reason)
        self._span.end()
