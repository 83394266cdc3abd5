"""The span of a handoff, in the trace of its request."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from unit.connector.handoff.test_block_digests import request
from unit.connector.handoff.test_consumer_scheduler import LENGTH, Consumer, lease

from disagg.connector.handoff.messages import LoadReport
from disagg.connector.handoff.spans import open_tracer

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What is exported, where vLLM exports traces."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    return exporter


def loads(outcome: str, reason: str | None, headers: dict[str, str] | None) -> None:
    consumer, asked = Consumer(), request()
    asked.trace_headers = headers
    consumer.arrives(asked, lease(asked))
    consumer.allocates(asked, LENGTH - 1)
    reports = [
        LoadReport(asked.request_id, "loaded", "tcp", 1000, 0.5, None),
        LoadReport(asked.request_id, outcome, "tcp", 500, 0.5, reason),
    ]
    consumer.half.update(reports, [asked.request_id])


@pytest.mark.parametrize(("outcome", "reason"), [("loaded", None), ("failed", "peer_lost")])
def test_a_load_is_a_span_of_its_request(
    spans: InMemorySpanExporter, outcome: str, reason: str | None
) -> None:
    loads(outcome, reason, HEADERS)
    (span,) = spans.get_finished_spans()
    assert span.name == "handoff"
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
    expected = {"disagg.outcome": outcome, "disagg.transport": "tcp", "disagg.bytes": 1500}
    assert span.attributes == expected | ({"disagg.reason": reason} if reason else {})
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time >= span.start_time


def test_a_request_without_a_trace_has_no_span(spans: InMemorySpanExporter) -> None:
    loads("loaded", None, None)
    assert spans.get_finished_spans() == ()


def test_without_an_endpoint_there_is_no_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert open_tracer() is None
