"""The span of a handoff, in the trace of its request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from unit.connector.handoff.test_block_digests import request
from unit.connector.handoff.test_consumer_scheduler import LENGTH, Consumer, lease
from unit.connector.modelless import BLOCK, PREFILL, Engine, answer, run

from disagg.connector.handoff.kv_transfer_params import INVITATION, STREAM
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


# ---- leases that are followed ------------------------------------------------------------------

FOLLOWED = list(range(2, 450))  # four steps of an engine without a model
NAME = "0123456789abcdef" * 2


class Pair:
    """A prefill and a decode engine without a model."""

    def __init__(self, model: Path, storage: Path, stack: ExitStack) -> None:
        self.prefill, self.decode = (
            stack.enter_context(
                closing(
                    Engine(
                        model,
                        {
                            "kv_connector": "DisaggConnector",
                            "kv_connector_module_path": "disagg.connector",
                            "kv_role": role,
                            "kv_connector_extra_config": {"storage_path": str(storage)},
                        },
                    )
                )
            )
            for role in ("kv_producer", "kv_consumer")
        )

    def invitation(self) -> object:
        name = self.prefill.add([7] * 40, 1, PREFILL)
        run([self.prefill], lambda: name in self.prefill.params)
        return self.prefill.params[name][INVITATION]

    def hand_off(self, headers: dict[str, str] | None) -> None:
        """Decode has fetched the first step's blocks before prefill begins with the third."""
        params = {"do_remote_prefill": True, INVITATION: self.invitation(), STREAM: NAME}
        first = self.prefill.add(FOLLOWED, 1, {**PREFILL, STREAM: NAME})
        then = self.decode.add(FOLLOWED, 2, params)
        for engine, name in ((self.prefill, first), (self.decode, then)):
            engine.scheduler.requests[name].trace_headers = headers
        self.prefill.step()
        self.prefill.step()
        run([self.decode], self._has_fetched)
        run([self.prefill, self.decode], lambda: then in self.decode.finished)
        assert self.decode.answers[then] == answer(FOLLOWED, 2)
        self.prefill.step()  # which ends the spans of the step before

    def _has_fetched(self) -> bool:
        reports = [one.kv_connector_worker_meta for one in self.decode.seen]
        return any(getattr(one, "moved", None) for one in reports)


@pytest.fixture
def pair(
    model: Path, tmp_path: Path, distributed: None, spans: InMemorySpanExporter
) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(model, tmp_path, stack)


def figures(span: ReadableSpan, event: str, figure: str) -> list[float]:
    found = [dict(one.attributes or {}) for one in span.events if one.name == event]
    return [float(str(one[f"disagg.{figure}"])) for one in found]


def test_a_lease_that_is_followed_shows_its_steps_and_chunks(
    pair: Pair, spans: InMemorySpanExporter
) -> None:
    pair.hand_off(HEADERS)
    growth, handoff = sorted(spans.get_finished_spans(), key=lambda span: span.name)
    assert (growth.name, handoff.name) == ("growing lease", "handoff")
    for span in (growth, handoff):
        assert span.parent is not None
        assert span.parent.span_id == PARENT
        times = [span.start_time or 0, *(one.timestamp for one in span.events), span.end_time or 0]
        assert times == sorted(times)
    assert figures(growth, "step", "tokens") == [128, 256, 384]
    assert figures(growth, "step", "epoch") == [0, 0, 0]

    assert handoff.attributes is not None
    names = [event.name for event in handoff.events]
    before = names[: names.index("whole")].count("chunk")
    chunks = figures(handoff, "chunk", "bytes")
    assert (names[-2:], names.count("whole"), before >= 1) == (["whole", "chunk"], 1, True)
    assert sum(chunks) == handoff.attributes["disagg.bytes"]
    assert sum(chunks[:before]) == handoff.attributes["disagg.hidden_bytes"]
    assert figures(handoff, "chunk", "tokens")[0] == 4 * BLOCK
    assert figures(handoff, "whole", "tokens") == [len(FOLLOWED)]
    assert figures(handoff, "chunk", "rank") == [0] * len(chunks)
    assert all(seconds > 0 for seconds in figures(handoff, "chunk", "seconds"))


def test_nothing_is_noted_of_a_request_without_a_trace(
    pair: Pair, spans: InMemorySpanExporter
) -> None:
    pair.hand_off(None)
    assert spans.get_finished_spans() == ()
    reports = [one.kv_connector_worker_meta for one in (*pair.prefill.seen, *pair.decode.seen)]
    assert any(getattr(one, "loads", None) for one in reports)
    for report in reports:
        assert not getattr(report, "grown", None)
        assert not any(load.events for load in getattr(report, "loads", ()))
