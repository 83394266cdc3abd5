"""The page of `disagg plan` has the figures of its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unit.bench.test_html import check, rows_of, run

from disagg.bench import planned
from disagg.bench.charts import FIRST_TOKEN, panels

SPEEDS = Path(__file__).parents[3] / "examples/speeds-cpu.json"
ASKED = ["plan", "--speeds", str(SPEEDS), "--synthetic", "requests=60,prompt=500,output=20"]
ASKED += ["--rate", "4", "--share", "0.8", "--json"]


def test_a_plan_writes_its_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.html"
    assert run(monkeypatch, *ASKED, "--ttft", "5", "--itl", "0.5", "--html", str(file)) == 0
    printed = capsys.readouterr()
    assert str(file) in printed.err
    figures = json.loads(printed.out)
    page = check(file.read_text())
    targets, simulated, *_ = rows_of(page)
    names = [f"{one['prefill']}P{one['decode']}D" for one in figures["candidates"]]
    assert sorted(row[1] for row in targets) == sorted(names)
    assert {row[2] for row in targets} == {"at least 80"}
    chosen = figures["chosen"]
    (row,) = [row for row in simulated if row[-1] == "chosen"]
    assert row[0] == f"{chosen['prefill']}P{chosen['decode']}D"
    assert row[2] == f"{chosen['share'] * 100:g}"
    command = "".join(page.iter("code").__next__().itertext())
    assert command.startswith("disagg plan --speeds speeds-cpu.json --synthetic")
    assert command.endswith("--share 0.8 --ttft 5 --itl 0.5")
    parts = planned.result(figures, "").tables[1]
    assert parts.title.startswith(FIRST_TOKEN)
    (panel,) = panels(planned.result(figures, ""), parts)
    queues = {one.name: one.values for one in panel.series if "queue" in one.name}
    place = panel.places.index(row[0])
    assert queues["prefill's queue"][place] == pytest.approx(
        chosen["parts"]["prefill_queue"] * 1000, rel=0.01
    )
    assert max(filter(None, queues["prefill's queue"])) > 0
    drawn = panels(planned.result(figures, ""), planned.result(figures, "").tables[0])
    assert [panel.limit for panel in drawn] == [("target: at least", 80.0), None, None]


def test_a_plan_that_nothing_meets_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.html"
    assert run(monkeypatch, *ASKED, "--ttft", "0.001", "--itl", "0.5", "--html", str(file)) == 1
    page = check(file.read_text())
    assert any("no number of engines meets" in "".join(dd.itertext()) for dd in page.iter("dd"))
    assert "no number of engines meets" in capsys.readouterr().out
