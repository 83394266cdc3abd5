"""Results of `vllm bench serve` and GuideLLM, as these write them, as a results file and a page of
ours."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from unit.bench.test_html import check, rows_of, run

from disagg.bench import imported, imported_guidellm, results
from disagg.bench.charts import panels
from disagg.errors import ConfigError

# Both as they were written, by the lines of docs/benchmarks/README.md with shorter prompts, of a
# deployment of two CPU engines. Single requests and distributions of GuideLLM's are left out.
OF_VLLM, OF_GUIDELLM = (
    Path(__file__).with_name(name) for name in ("vllm_result.json", "guidellm_report.json")
)
# As vLLM 0.32 wrote it; lists of single requests are left out.
WRITTEN: dict[str, Any] = {
    "date": "20261128-140312",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "org/chat",
    "tokenizer_id": "org/chat",
    "num_prompts": 200,
    "request_rate": 4.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 51.25,
    "completed": 199,
    "failed": 1,
    "total_input_tokens": 102400,
    "total_output_tokens": 25472,
    "request_throughput": 3.883,
    "request_goodput": None,
    "output_throughput": 497.0,
    "total_token_throughput": 2495.0,
    **{
        f"{statistic}_{key}_ms": base * scale
        for key, base in (("ttft", 100.0), ("tpot", 10.0), ("itl", 9.0))
        for statistic, scale in (("mean", 1.5), ("median", 1.0), ("std", 0.5), ("p99", 7.25))
    },
}


def test_the_names_are_those_of_the_installed_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "benchmarks/serve.py").read_text()
    for key in (*imported._RUN.values(), *imported._NEEDED):
        assert f'"{key}"' in source, key
    for key in imported._TIMES:
        assert f'"{key}"' in source, key
    assert 'f"mean_{metric_attribute_name}_ms"' in source
    assert "%Y%m%d-%H%M%S" in source


def test_a_file_becomes_results_and_a_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page, folder = tmp_path / "v.json", tmp_path / "v.html", tmp_path / "results"
    file.write_text(json.dumps(WRITTEN))
    words = ["bench", "import", str(file), "--html", str(page), "--results", str(folder)]
    assert run(monkeypatch, *words) == 0
    capsys.readouterr()
    (path,) = folder.iterdir()
    assert path.name == "2026-11-28-unknown-vllm-bench.json"
    result = results.load(path)
    assert result.command_line == "disagg bench import v.json"
    runs, latency = rows_of(check(page.read_text()))
    assert runs[0][:3] == ["4.0/s", "org/chat", "openai"]
    assert latency[0] == ["4.0/s", "first token", "150", "100", "50", "725"]
    (chart,) = panels(result, result.tables[1])
    shown = {one.name: one.values for one in chart.series}
    assert shown == {"median": [100.0, 10.0, 9.0], "p99": [725.0, 72.5, 65.25]}


def test_appended_runs_stand_beside_each_other(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    other = {**WRITTEN, "date": "20261129-000000", "request_rate": "inf", "p99_ttft_ms": 1.0}
    file.write_text(json.dumps(WRITTEN) + "\n" + json.dumps(other))
    result = imported.read(file, "")
    assert result.date == "2026-11-29"
    assert [row["run"] for row in result.tables[0].rows] == ["4.0/s", "inf/s"]
    first = [row for row in result.tables[1].rows if row["time"] == "first token"]
    assert [row["p99"] for row in first] == [725.0, 1.0]
    file.write_text(json.dumps(WRITTEN) * 2)
    again = imported.read(file, "")
    assert [row["run"] for row in again.tables[0].rows] == ["4.0/s, run 1", "4.0/s, run 2"]


def test_a_real_file_of_vllm() -> None:
    written = json.loads(OF_VLLM.read_text())
    result = imported.read(OF_VLLM, "")
    (run,), latency = (table.rows for table in result.tables)
    assert (run["run"], run["model"], run["most at once"]) == ("inf/s", "smollm2-135m", 2)
    assert (run["requests"], run["failed"], run["output tokens"]) == (8, 0, 128)
    assert latency[0]["p99"] == written["p99_ttft_ms"]
    assert [row["time"] for row in latency] == list(imported._TIMES.values())[:3]


def test_a_real_report_of_guidellm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, folder = tmp_path / "g.html", tmp_path / "results"
    words = ["bench", "import", str(OF_GUIDELLM), "--html", str(page), "--results", str(folder)]
    assert run(monkeypatch, *words) == 0
    capsys.readouterr()
    (path,) = folder.iterdir()
    assert path.name == "2026-11-28-unknown-guidellm.json"
    result = results.load(path)
    assert result.versions == {"guidellm": "0.8.1"}
    runs, latency = rows_of(check(page.read_text()))
    assert runs[0][:6] == ["concurrent 2", "smollm2-135m", "openai_http", "8", "0", "0"]
    assert [row[1] for row in latency] == [shown for _, shown, _ in imported_guidellm._TIMES]
    first, _, _, whole = result.tables[1].rows
    assert (first["median"], first["p99"]) == (2066.87, 7257.03)
    assert whole["mean"] == pytest.approx(5053.27)  # it tells seconds
    latency_chart, throughput = (
        panel for table in reversed(result.tables) for panel in panels(result, table)
    )
    assert latency_chart.series[0].values[0] == 2066.87
    assert throughput.series[0].values == [pytest.approx(0.384677)]


def test_benchmarks_of_one_report_stand_beside_each_other(tmp_path: Path) -> None:
    report = json.loads(OF_GUIDELLM.read_text())
    one = report["benchmarks"][0]
    strategies = ({"type_": "throughput"}, {"type_": "constant", "rate": 2.5})
    report["benchmarks"] += [
        {**one, "config": {**one["config"], "strategy": strategy}} for strategy in strategies
    ]
    file = tmp_path / "g.json"
    file.write_text(json.dumps(report))
    rows = imported.read(file, "").tables[0].rows
    assert [row["run"] for row in rows] == ["concurrent 2", "throughput", "constant 2.5/s"]
    report["benchmarks"] = [one, one]
    file.write_text(json.dumps(report))
    rows = imported.read(file, "").tables[0].rows
    assert [row["run"] for row in rows] == ["concurrent 2, run 1", "concurrent 2, run 2"]


@pytest.mark.parametrize(
    ("benchmarks", "words"),
    [
        (None, "without benchmarks"),
        ([], "without benchmarks"),
        ([7], "without start_time"),
        ([{"start_time": "now"}], "without start_time"),
        ([{"start_time": 1.0}], "without duration"),
        ([{"start_time": 1.0, "duration": float("nan")}], "without duration"),
        ([{"start_time": 1.0, "duration": 2.0, "metrics": []}], "without metrics.request_totals"),
    ],
)
def test_a_report_of_guidellm_that_lacks_something(
    tmp_path: Path, benchmarks: Any, words: str
) -> None:
    file = tmp_path / "g.json"
    metadata = {"guidellm_version": "0.8.1"}
    file.write_text(json.dumps({"metadata": metadata, "benchmarks": benchmarks}))
    with pytest.raises(ConfigError, match=words):
        imported.read(file, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("[1]", "it has no date"),
        ("{", "not JSON"),
        ('{"date": "x"}', "it has no request_throughput"),
        (json.dumps({**WRITTEN, "date": "today"}), "date: 'today'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "v.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        imported.read(file, "")
    with pytest.raises(ConfigError, match="cannot be read"):
        imported.read(tmp_path / "none", "")


def test_one_output_must_be_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "bench", "import", str(tmp_path / "v.json")) == 2
    assert "--html or --results" in capsys.readouterr().err
