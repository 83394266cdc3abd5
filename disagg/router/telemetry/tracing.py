"""Spans of the router's own, when OpenTelemetry is installed and told where to send them.

Told by its own environment variables (`OTEL_EXPORTER_OTLP_ENDPOINT` and the others). Otherwise a
client's W3C trace context goes to the engines as it came, and nothing else is done.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from disagg.router.telemetry.access_log import Record

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def open_tracer() -> Any | None:
    """A tracer, if spans are wanted and can be sent."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("no spans: %s (pip install opentelemetry-exporter-otlp)", error)
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", "disagg-router")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("disagg.router")


class Trace:
    """One request's span, and below it those of its legs."""

    def __init__(self, tracer: Any, record: Record, headers: Mapping[str, str]) -> None:
        self._tracer, self._record = tracer, record
        self._began_ns = time.time_ns()
        self.headers: dict[str, str] = {}
        from opentelemetry import trace
        from opentelemetry.propagate import extract, inject

        self._span = tracer.start_span(
            record.route,
            context=extract(headers),
            kind=trace.SpanKind.SERVER,
            start_time=self._began_ns,
        )
        self._context = trace.set_span_in_context(self._span)
        inject(self.headers, context=self._context)

    def end(self, status: int) -> None:
        """The request is over; its record says how it went."""
        record = self._record
        self._span.set_attribute("http.response.status_code", status)
        for name, value in record.shown().items():
            self._span.set_attribute(f"disagg.{name}", value)
        # Legs follow one another, so that their ends say where they began.
        begin = record.queued_s or 0.0
        for name, engine, end in (
            ("prefill", record.prefill, record.prefill_s),
            ("decode", record.decode, record.elapsed()),
        ):
            if engine is None or end is None:
                continue
            span = self._tracer.start_span(name, self._context, start_time=self._at(begin))
            span.set_attribute("disagg.engine", engine)
            span.end(self._at(end))
            begin = end
        self._span.end(self._at(record.elapsed()))

    def _at(self, seconds: float) -> int:
        return self._began_ns + int(seconds * 1e9)
