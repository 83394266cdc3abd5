"""`disagg bench handoff --link`: from samples to rows, tables and targets."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from disagg.bench.first_token import link_report as report
from disagg.bench.first_token.link_report import Missing, Sample
from disagg.bench.results import Row, Target

BYTES, RATE = 100_000_000, 400_000_000  # 2 s


def sample(
    way: str, steps: int, first_s: float, connector: str = "ours", *, right: bool = True
) -> Sample:
    """With 2 s of prefill alone and 2.1 s of a prefill leg."""
    return Sample(connector, way, steps, 2.0, first_s, 2.1, right, RATE)


def found(rows: list[Row], wrong: int = 0, *, paced: bool = True) -> list[Target]:
    return [one for one in report.targets(rows, wrong, paced=paced) if one is not None]


def test_a_row_has_medians() -> None:
    samples = [sample("serial", 4, first_s) for first_s in (4.3, 4.1, 9.0)]
    (row,) = report.rows(samples, BYTES, auto=True)
    assert row == {
        "steps": 4,
        "connector": "disagg",
        "way": "serial",
        "first token, ms": 4300.0,
        "over prefill alone": 2.15,
        "ideal": 2.0,
        "prefill alone, ms": 2000.0,
        "prefill leg, ms": 2100.0,
        "after prefill, ms": 2200.0,
        "link, Mbit/s": 400.0,
    }


def test_what_plain_sockets_cost_prefill_is_no_handoff() -> None:
    (row,) = report.rows([sample("beside", 16, 2.1, "sockets")], BYTES, auto=True)
    assert row == {
        "steps": 16,
        "connector": "plain sockets",
        "way": "beside",
        "first token, ms": 2100.0,
        "over prefill alone": 1.05,
        "ideal": 1,
        "prefill alone, ms": 2000.0,
        "link, Mbit/s": 400.0,
    }
    assert len(found([row])) == 1  # that no answer was wrong


@pytest.mark.parametrize(
    ("way", "steps", "transfer", "ratio"),
    [
        ("serial", 4, 1.0, 2.0),
        ("streamed", 4, 1.0, 1.25),
        ("streamed", 16, 1.0, 1.0625),
        ("streamed", 4, 0.5, 1.125),  # the last of four parts, each an eighth of prefill
        ("streamed", 4, 2.0, 2.25),  # a slow link begins after the first step, and never rests
        ("streamed", 1, 1.0, 2.0),
    ],
)
def test_the_ideal(way: str, steps: int, transfer: float, ratio: float) -> None:
    assert report.ideal(way, steps, transfer) == pytest.approx(ratio)


def test_aims_of_streamed() -> None:
    samples = [sample("serial", 4, 4.1), sample("streamed", 4, 2.6), sample("streamed", 16, 2.3)]
    rows = report.rows(samples, BYTES, auto=True)
    assert [row.get("aim") for row in rows] == [None, 1.30, 1.10]
    assert [(one.at, one.measured, one.at_most, one.met) for one in found(rows)] == [
        ("4 steps, streamed", 1.3, 1.3, True),
        ("16 steps, streamed", 1.15, 1.1, False),
        ("", 0.0, 0, True),  # wrong answers
    ]


def test_a_rate_of_ones_own_has_no_aims() -> None:
    rows = report.rows([sample("streamed", 4, 2.6)], BYTES, auto=False)
    assert "aim" not in rows[0]
    assert [one.name for one in found(rows)] == [
        "answers with other tokens than the prefill engine's own"
    ]


def test_a_wrong_answer_misses_its_target() -> None:
    one = sample("serial", 4, 4.1, right=False)
    assert "WRONG TOKENS" in str(one)
    (target,) = found(report.rows([one], BYTES, auto=True), wrong=1)
    assert (target.measured, target.met) == (1.0, False)


def test_nixl_is_compared_over_the_same_link_with_as_many_steps() -> None:
    samples = [sample("serial", 4, 4.0), sample("streamed", 4, 3.0), sample("serial", 16, 4.0)]
    samples.append(sample("serial", 4, 5.0, "nixl"))
    rows = report.rows(samples, BYTES, auto=False)
    compared = found(rows)[:-1]
    assert [(one.at, one.measured) for one in compared] == [
        ("4 steps, serial", 0.8),
        ("4 steps, streamed", 0.6),
    ]
    assert compared[0].name.endswith("ratio to NixlConnector")


def test_example_connector_is_compared_without_a_link_only() -> None:
    samples = [sample("serial", 4, 2.3), sample("serial", 1, 2.2, "example")]
    samples = [replace(one, rate=None) for one in samples]
    rows = report.rows(samples, BYTES, auto=False)
    assert not {"ideal", "link, Mbit/s"} & set(rows[0])
    assert [(one.measured, one.met) for one in found(rows, paced=False)[:-1]] == [(2.0, False)]
    assert len(found(rows, paced=True)) == 1


def test_the_table_of_the_terminal() -> None:
    rows = report.rows([sample("serial", 4, 4.1), sample("streamed", 4, 2.6)], BYTES, auto=True)
    console = Console(file=StringIO(), width=140)
    console.print(report.table(rows, "First token"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [word in text for word in ("disagg", "2,600", "1.3", "aim")] == [True] * 4


def test_what_was_not_measured_has_rows_of_its_own() -> None:
    rows = report.rows([sample("serial", 4, 4.1)], BYTES, auto=True)
    assert [one.title for one in report.tables(rows, "it", [])] == ["it"]
    missing = [
        Missing("nixl", "it ended", 4),
        Missing("nixl-push", "so", 1),
        Missing("example", "why"),
    ]
    measured, others = report.tables(rows, "it", missing)
    assert measured.rows == rows
    assert others.rows == [
        {"connector": "NixlConnector", "steps": 4, "why": "it ended"},
        {"connector": "NixlPushConnector", "steps": 1, "why": "so"},
        {"connector": "ExampleConnector", "steps": None, "why": "why"},
    ]
    assert [str(one) for one in missing] == [
        "NixlConnector, 4 steps: not measured: it ended",
        "NixlPushConnector, 1 step: not measured: so",
        "ExampleConnector: not measured: why",
    ]
