"""A span for each handoff, in the trace of its request, if vLLM exports traces
(`otlp_traces_endpoint`). Prefill has one for each lease that grows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from disagg.connector.handoff.messages import GrownReport, LoadEvent

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

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
        self._span = _start(tracer, "handoff", headers)

    def followed(self, hidden: int) -> None:
        """It followed a lease that grew. hidden: bytes that came while the prompt was computed."""
        self._span.set_attribute("disagg.hidden_bytes", hidden)

    def add(self, events: Iterable[LoadEvent], tokens: int) -> None:
        """What happened to it, on all ranks. tokens: all that it brings."""
        for event in sorted(events, key=lambda one: one.at_ns):
            final = event.tokens if event.name == "grown" else event.tokens or tokens
            attributes: dict[str, int | float] = {
                "disagg.rank": event.rank,
                "disagg.epoch": event.epoch,
                "disagg.tokens": final,
            }
            if event.name == "chunk":
                attributes["disagg.bytes"] = event.num_bytes
                attributes["disagg.seconds"] = event.seconds
            self._span.add_event(event.name, attributes, event.at_ns)

    def end(self, outcome: str, transport: str, size: int, reason: str | None) -> None:
        """The load has ended on all ranks. size: bytes that moved."""
        self._span.set_attribute("disagg.outcome", outcome)
        self._span.set_attribute("disagg.transport", transport)
        self._span.set_attribute("disagg.bytes", size)
        if reason is not None:
            self._span.set_attribute("disagg.reason", reason)
        self._span.end()


class GrowthSpan:
    """One lease that grows, from its prompt's first step until `end`. headers: as above."""

    def __init__(self, tracer: Tracer, headers: Mapping[str, str]) -> None:
        self._span = _start(tracer, "growing lease", headers)
        self._ended_ns: int | None = None

    def grown(self, report: GrownReport) -> None:
        """So many tokens are final."""
        attributes = {"disagg.epoch": report.epoch, "disagg.tokens": report.tokens}
        self._span.add_event("step", attributes, report.at_ns)

    def stop(self) -> None:
        """It no longer grows. What the workers still report belongs to it."""
        self._ended_ns = time.time_ns()

    def end(self) -> None:
        """The workers have reported all."""
        self._span.end(self._ended_ns)


def _start(tracer: Tracer, name: str, headers: Mapping[str, str]) -> Span:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(headers)
    return tracer.start_span(name, context, start_time=time.time_ns())
