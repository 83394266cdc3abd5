"""Pages of results: the figures of the tables, nothing from outside, readable by machines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from disagg import cli
from disagg.bench import drawing, html, results
from disagg.bench.charts import as_number, panels, with_derived
from disagg.bench.results import Machine, Output, Result, Table, Target
from disagg.bench.shown import cell
from disagg.errors import ConfigError

ROOT = Path(__file__).parents[3]
COMMITTED = sorted((ROOT / "benchmarks/results").glob("*.json"))
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script src="http://x.test/a.js">$x_1$</script>"&'
RESULT = Result(
    schema=1,
    command="serve",
    date="2026-11-27",
    command_line=f"disagg bench serve {HOSTILE}",
    machine=Machine(HOSTILE),
    versions={HOSTILE: HOSTILE},
    tables=[
        Table(
            HOSTILE,
            [
                {"load": rate, "way": way, "between tokens p50 / p99, ms": times}
                for rate, way, times in (
                    ("1/s", HOSTILE, "10 / 1,234"),
                    ("2/s", HOSTILE, "20 / 30"),
                    ("1/s", "_apart", "- / 5.5"),
                    ("2/s", "_apart", "6 / 7"),
                )
            ],
        )
    ],
    targets=[Target(HOSTILE, 1.0, False, at=HOSTILE, at_least=2.0)],
    note=HOSTILE,
)


def parsed(text: str) -> ElementTree.Element:
    """The page as XML, which is stricter than HTML."""
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.partition("\n")[2])


def check(text: str) -> ElementTree.Element:
    """What holds for every page."""
    page = parsed(text)
    ids = [node.get("id") for node in page.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    assert {node.tag for node in page.iter()} & {"script", "link", "img", "iframe"} == set()
    for node in page.iter():
        for name, value in node.attrib.items():
            if name.rpartition("}")[2] in ("href", "src"):
                assert value.startswith("#"), value
                assert value[1:] in ids
    for target in re.findall(r"url\(([^)]*)\)", text):
        assert target.startswith("#"), target
        assert target[1:] in ids
    assert "@import" not in text
    for svg in page.iter(f"{SVG}svg"):
        assert svg.get("role") == "img"
        title, said = (svg.find(f"{SVG}{tag}") for tag in ("title", "desc"))
        assert title is not None
        assert said is not None
        assert svg.get("aria-labelledby") == f"{title.get('id')} {said.get('id')}"
        assert title.text
        assert said.text
    return page


def rows_of(page: ElementTree.Element) -> list[list[list[str]]]:
    """The cells of each table."""
    return [
        [["".join(td.itertext()) for td in tr.iter("td")] for tr in table.iter("tr")][1:]
        for table in page.iter("table")
    ]


def numbers_in(table: Table) -> Iterator[float]:
    for row in table.rows:
        for value in row.values():
            parts = value.split(" / ") if isinstance(value, str) else [value]
            yield from (one for part in parts if (one := as_number(part)) is not None)


NEWEST = {path for path, _ in results.newest(ROOT / "benchmarks/results").values()}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(one, marks=() if one in NEWEST else pytest.mark.slow, id=one.stem)
        for one in COMMITTED
    ],
)
def test_the_page_of_a_committed_file_has_its_figures(path: Path) -> None:
    result = results.load(path)
    page = check(html.page([result]))
    tables = list(with_derived(result.tables))
    shown = rows_of(page)[1 if result.targets else 0 :]
    assert len(shown) == len(tables)
    for table, found in zip(tables, shown, strict=True):
        columns = list(dict.fromkeys(key for row in table.rows for key in row))
        assert found == [[cell(row.get(c)) for c in columns] for row in table.rows]
    verdicts = [row[-1] for row in rows_of(page)[0]] if result.targets else []
    assert verdicts == ["met" if one.met else "missed" for one in result.targets]
    drawn = [(table, panel) for table in tables for panel in panels(result, table)]
    assert len(drawn) == len(list(page.iter(f"{SVG}svg")))
    for table, panel in drawn:
        known = set(numbers_in(table))
        values = [v for one in panel.series for v in (*one.values, *one.low) if v is not None]
        assert values
        assert set(values) <= known


@pytest.mark.parametrize(
    ("name", "charts"),
    [
        ("2026-11-25-intel-xeon-2c-serve", 3),
        ("2026-11-25-intel-xeon-2c-transfer", 1),
        ("2026-11-27-nvidia-h100-80gb-hbm3-transfer-cuda", 1),
        ("2026-11-27-nvidia-h100-80gb-hbm3-handoff-cuda", 4),  # with the times of one request
        ("2026-11-25-intel-xeon-2c-handoff", 3),
        ("2026-11-23-amd-epyc-zen-3-2c-router", 6),
        ("2026-11-27-amd-epyc-2c-faults-2", 1),
        ("2026-11-22-amd-epyc-zen-3-2c-offload", 2),
        ("2026-11-22-unknown-2c-predicted", 1),
        ("2026-11-25-intel-xeon-2c-soak", 0),
    ],
)
def test_commands_have_their_charts(name: str, charts: int) -> None:
    result = results.load(ROOT / f"benchmarks/results/{name}.json")
    assert sum(len(panels(result, t)) for t in with_derived(result.tables)) == charts


def test_what_a_file_says_is_text() -> None:
    page = check(html.page([RESULT, RESULT]))
    texts = ["".join(node.itertext()) for node in page.iter() if node.tag in ("h2", "dd")]
    assert texts.count(HOSTILE) == 6  # machine, note, the table's title, twice
    (svg, _) = page.iter(f"{SVG}svg")
    drawn = ["".join(node.itertext()).strip() for node in svg.iter(f"{SVG}text")]
    assert HOSTILE in drawn
    assert "_apart" in drawn
    said = svg.find(f"{SVG}desc")
    assert said is not None
    assert "1,234 (p50 10) at 1/s" in (said.text or "")
    assert "; _apart: 5.5 at 1/s, 7 (p50 6) at 2/s." in (said.text or "")


def test_the_same_result_gives_the_same_page() -> None:
    assert html.page([RESULT]) == html.page([RESULT])


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_are_seen_and_differ_in_brightness(theme: int) -> None:
    colours = {name: both[theme] for name, both in drawing.COLOURS.items()}
    assert contrast(colours["text"], colours["back"]) >= 7
    series = [colour for name, colour in colours.items() if name.startswith("c")]
    assert len(series) == 8
    assert all(contrast(colour, colours["back"]) >= 3 for colour in series)
    assert all(contrast(one, other) >= 1.5 for one, other in pairwise(series))


# ---- options -----------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["disagg", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_a_command_writes_its_page(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    output = Output(page=html.writer(file))
    output.write("soak", {}, [Table("Answers", [{"outcome": "right", "count": 12345}])], [None])
    page = check(file.read_text())
    assert rows_of(page) == [[["right", "12,345"]]]
    assert html.writer(None) is None


def test_every_command_that_measures_has_the_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from disagg.bench import cli as bench

    names = {
        c.name or (c.callback.__name__ if c.callback else "") for c in bench.app.registered_commands
    }
    for name in sorted(names - {"pages", "report", "import", "vllm"}):  # vllm's are vLLM's
        words: tuple[Any, ...] = ("bench", name.replace("_", "-"), "--html", str(tmp_path / "no/f"))
        assert run(monkeypatch, *words) == 2, name
    assert not list(tmp_path.iterdir())


def test_a_missing_matplotlib_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    file = str(tmp_path / "a.html")
    for words in (
        ("bench", "router", "--html", file),
        ("bench", "report", str(COMMITTED[0]), "--html", file),
        (
            "plan",
            "--speeds",
            "none.json",
            "--ttft",
            "1",
            "--itl",
            "1",
            "--synthetic",
            "requests=9,prompt=9,output=9",
            "--html",
            file,
        ),
    ):
        assert run(monkeypatch, *words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.splitlines() == ['--html: needs matplotlib; pip install "disagg[report]"']


def test_report_makes_one_page_of_several_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(path) for path in COMMITTED if path.stem.endswith("2c-serve")]
    assert len(files) > 1
    file = tmp_path / "both.html"
    assert run(monkeypatch, "bench", "report", *files, "--html", str(file)) == 0
    assert str(file) in capsys.readouterr().err
    page = check(file.read_text())
    assert len(list(page.iter("article"))) == len(files)
    assert page.findtext("head/title") == "serve"
    with pytest.raises(ConfigError, match="must be a file"):
        html.save([RESULT], tmp_path)
