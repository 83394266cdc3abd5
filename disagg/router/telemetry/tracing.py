"""The router's own spans, if OpenTelemetry is installed and configured.

OpenTelemetry's environment variables configure it (`OTEL_EXPORTER_OTLP_ENDPOINT` and others).
Without them, the router makes no spans, and passes a client's W3C trace context to the engines
unchanged.
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
    """A tracer, if an endpoint is configured and the exporter is installed; else None."""
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
    """The span of one request, and below it the spans of its legs."""

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
        """The request is finished; its record has the attributes."""
        record = self._record
        self._span.set_attribute("http.response.status_code", status)
        for name, value in record.shown().items():
            self._span.set_attribute(f"disagg.{name}", value)
        # Decode's leg begins at the end of prefill's, unless both ran at once.
        begin = record.queued_s or 0.0
        both = record.followed in ("followed", "computed")
        for name, engine, end in (
            ("prefill", record.prefill, record.prefill_s),
            ("decode", record.decode, record.elapsed()),
        ):
            if engine is None or end is None:
                continue
            if name == "decode" and both and record.early_s is not None:
                begin = record.early_s
            span = self._tracer.start_span(name, self._context, start_time=self._at(begin))
            span.set_attribute("disagg.engine", engine)
            span.end(self._at(end))
            begin = end
        self._span.end(self._at(record.elapsed()))

    def _at(self, seconds: float) -> int:
        return self._began_ns + int(seconds * 1e9)
