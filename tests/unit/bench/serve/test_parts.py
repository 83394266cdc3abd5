"""What first tokens were made of, from histograms; figures are those of a recorded deployment."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from unit.bench.serve.test_run import TARGETS, measured, outcome

from disagg.bench.charts import FIRST_TOKEN, panels
from disagg.bench.results import SCHEMA, Machine, Result
from disagg.bench.serve import parts, report, score
from disagg.bench.serve.parts import FirstTokenParts

ROUTER = """\
disagg_router_ttft_seconds_count 22.0
disagg_router_ttft_seconds_sum 185.61303836603474
disagg_router_queue_seconds_bucket{le="1.0"} 1.0
disagg_router_queue_seconds_count 2.0
disagg_router_queue_seconds_sum 4.4
disagg_router_prefill_seconds_count 22.0
disagg_router_prefill_seconds_sum 174.2392596390273
disagg_router_handoff_seconds_count 22.0
disagg_router_handoff_seconds_sum 11.34482744698471
"""
DECODE = """\
disagg_handoff_seconds_count{engine="0",model_name="smollm2-135m"} 22.0
disagg_handoff_seconds_sum{engine="0",model_name="smollm2-135m"} 0.7838205200096127
"""
PREFILL = [
    f"""\
vllm:request_prefill_time_seconds_count{{engine="0",model_name="smollm2-135m"}} {count}
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="smollm2-135m"}} {seconds}
vllm:request_queue_time_seconds_sum{{engine="0",model_name="smollm2-135m"}} 1000.0
"""
    for count, seconds in ((2.0, 10.0), (24.0, 98.0))
]


def found() -> FirstTokenParts:
    before, after = (parts.sums([text], parts.OF_PREFILL) for text in PREFILL)
    of_run = parts.parts(
        parts.sums([ROUTER], parts.ROUTER),
        parts.growth(before, after),
        parts.sums([DECODE], parts.OF_DECODE),
    )
    assert of_run is not None
    return of_run


def test_the_parts_of_a_run() -> None:
    one = found()
    assert one.router_queue == pytest.approx(4.4 / 22)  # over all requests, not those that waited
    assert one.prefill == pytest.approx(88 / 22)
    assert one.prefill_queue == pytest.approx((174.23926 - 88) / 22)
    assert one.handoff == pytest.approx(0.78382 / 22)
    assert one.prefill_queue + one.prefill + one.handoff + one.decode_step == pytest.approx(
        (174.23926 + 11.344827) / 22
    )


def test_sources_are_added_up() -> None:
    twice = parts.sums([DECODE, DECODE], parts.OF_DECODE)
    assert twice["disagg_handoff_seconds_count"] == 44


@pytest.mark.parametrize("lacking", ["prefill", "handoff"])
def test_a_run_without_handoffs_has_no_parts(lacking: str) -> None:
    router = parts.sums([ROUTER], parts.ROUTER)
    router[f"disagg_router_{lacking}_seconds_count"] = 0.0
    assert parts.parts(router, parts.sums(PREFILL[1:], parts.OF_PREFILL), {}) is None


def test_the_report_draws_them() -> None:
    run = replace(measured("apart", 2, [outcome(0.2, 0.05)]), parts=found())
    rows = [score.row(one, TARGETS) for one in (run, measured("colocated", 2, [outcome(0.2)]))]
    assert rows[1]["parts_ms"] is None
    aims = {"ttft_s": 1.0, "itl_s": 0.1}
    tables = report.tables({"rows": rows, "goodput": {}, "targets": aims})
    result = Result(SCHEMA, "serve", "2026-11-28", "", Machine("unknown"), {}, tables, [])
    (panel,) = panels(result, tables[-1])
    assert panel.title == FIRST_TOKEN
    assert panel.places == ["2/s, apart"]
    wanted = [1000 * seconds for seconds in asdict(found()).values()]
    assert [one.values for one in panel.series] == [[pytest.approx(ms, abs=0.001)] for ms in wanted]
    assert [one.name for one in panel.series][:2] == ["router's queue", "prefill's queue"]
