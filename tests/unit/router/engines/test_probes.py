"""Readiness reflects the data path, and recovers without requests; spans of a request."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from unit.router.conftest import PARAMS, Setup

from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.tracing import Trace
from disagg.testing.http import client

Make = Callable[..., Setup]


def ready(setup: Setup) -> httpx.Response:
    return client().get(f"{setup.url}/ready", timeout=10)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_handoffs_that_fail_are_not_ready_until_one_works(make: Make) -> None:
    setup = make(section={"probe_interval_s": 0.1})
    setup.decode.handoffs = {"loaded": 3, "failed": 1}
    until(lambda: ready(setup).status_code == 200)
    time.sleep(0.3)
    setup.decode.handoffs = {"loaded": 3, "failed": 2}
    until(lambda: ready(setup).status_code == 503)
    assert ready(setup).json()["engines"] == {"prefill-0": "up", "decode-0": "handoffs fail"}
    # Without requests, the router makes a small trial handoff.
    until(lambda: bool(setup.decode.bodies))
    assert setup.decode.bodies[0]["kv_transfer_params"] == PARAMS
    assert setup.decode.bodies[0]["max_tokens"] == 1
    setup.decode.handoffs = {"loaded": 4, "failed": 2}
    until(lambda: ready(setup).status_code == 200)


def test_some_failures_among_successes_keep_it_ready(make: Make) -> None:
    setup = make(section={"probe_interval_s": 0.05})
    for number in range(10):
        setup.decode.handoffs = {"loaded": number, "failed": number}
        time.sleep(0.05)
        assert ready(setup).status_code == 200


def test_trace_context_of_clients_reaches_both_engines(setup: Setup) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client().post(
        f"{setup.url}/v1/completions",
        json={"model": "m", "prompt": "x"},
        headers={"traceparent": given},
        timeout=20,
    )
    assert (
        setup.prefill.headers[0]["traceparent"] == setup.decode.headers[0]["traceparent"] == given
    )


def test_spans() -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = export.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record = Record("/v1/completions", "my-id")
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    trace = Trace(provider.get_tracer("test"), record, {"traceparent": given})
    assert trace.headers["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert trace.headers["traceparent"] != given
    record.queued_s, record.prefill, record.prefill_s = 0.001, "prefill-1", 0.002
    record.decode = "decode-0"
    time.sleep(0.01)
    trace.end(200)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"prefill", "decode", "/v1/completions"}
    whole = spans["/v1/completions"]
    assert whole.attributes["disagg.id"] == "my-id"
    assert whole.attributes["http.response.status_code"] == 200
    for leg in ("prefill", "decode"):
        assert spans[leg].parent.span_id == whole.context.span_id
        assert whole.start_time <= spans[leg].start_time <= spans[leg].end_time <= whole.end_time
    assert spans["prefill"].end_time == spans["decode"].start_time


def test_spans_of_legs_that_ran_at_once() -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = export.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record = Record("/v1/completions", "my-id")
    trace = Trace(provider.get_tracer("test"), record, {})
    record.prefill, record.prefill_s, record.decode = "prefill-1", 0.005, "decode-0"
    record.followed, record.early_s = "followed", 0.001
    time.sleep(0.01)
    trace.end(200)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole = spans["/v1/completions"]
    assert whole.attributes["disagg.followed"] == "followed"
    assert spans["decode"].start_time - whole.start_time == 1_000_000
    assert spans["decode"].start_time < spans["prefill"].end_time < spans["decode"].end_time


@pytest.mark.parametrize(
    ("of_decode", "pairs"), [({"vllm": "0.29-0.32"}, True), (None, True), ("0.31.0", False)]
)
def test_names_of_blocks_are_not_compared_with_versions(
    make: Make, of_decode: dict[str, str] | str | None, pairs: bool
) -> None:
    """An engine that names the versions whose blocks it takes is judged by that alone. Two that say
    nothing but their versions must have the same one."""
    setup = make(section={"probe_interval_s": 0.05})
    for engine in (setup.prefill, setup.decode):
        engine.refusing["/version"] = (200, {"version": "0.32.0"})
        engine.refusing["/disagg/fingerprint"] = (404, {})
    if isinstance(of_decode, str):
        setup.decode.refusing["/version"] = (200, {"version": of_decode})
    elif of_decode is not None:
        setup.decode.refusing["/disagg/fingerprint"] = (200, of_decode)
    # Asked once, when an engine comes up: let both go and come back.
    for engine in (setup.prefill, setup.decode):
        engine.refusing["/health"] = (503, {})
    until(lambda: ready(setup).status_code == 503)
    for engine in (setup.prefill, setup.decode):
        del engine.refusing["/health"]
    until(lambda: ready(setup).json()["engines"] == {"prefill-0": "up", "decode-0": "up"})
    body = {"model": "m", "prompt": "x " * 4000, "max_tokens": 1}
    answer = client().post(f"{setup.url}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 200
    assert len(setup.prefill.bodies) == (1 if pairs else 0)
