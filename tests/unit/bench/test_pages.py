"""Pages are made of results files, and say what these say."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.table import Table

from disagg.bench import pages
from disagg.errors import ConfigError
from disagg.testing import results
from disagg.testing.results import Aim, Machine, Result, ResultTable

ROOT = Path(__file__).parents[3]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks"
MARKED = "before\n<!-- results: transfer -->\nold\n<!-- end of results -->\nafter\n"


def result(**changed: object) -> Result:
    table = ResultTable(title="Fetches", columns=["way", "ms"], rows=[["tcp", "1"]])
    fields: dict[str, object] = {
        "command": "transfer",
        "command_line": "disagg bench transfer",
        "date": "2026-11-26",
        "machine": Machine(name="m-2c", cpu="M", cores=2),
        "tables": [table],
        "aims": [Aim(what="speed", asked="at least 1", measured="0.5", met=False)],
    }
    return Result.model_validate({**fields, **changed})


def test_all_results_are_files_of_results() -> None:
    found = results.load(RESULTS)
    assert {"handoff", "router", "serve", "transfer"} <= {one.command for one in found}
    names = {file.name for file in RESULTS.glob("*.json")}
    assert {one.file_name for one in found} == names, "a file is called by what is in it"


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: str(page.name))
def test_no_page_differs_from_its_results(page: Path) -> None:
    newest = {one.command: one for one in results.load(RESULTS)}
    text = page.read_text()
    assert pages.made_again(text, newest, page) == text, "run: disagg bench pages"


def test_every_command_with_results_has_its_place_in_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES.glob("*.md"))
    for one in results.load(RESULTS):
        assert pages.BEGIN.format(one.command) in text


def test_what_stands_outside_of_the_markers_stays(tmp_path: Path) -> None:
    folder, page = tmp_path / "results", tmp_path / "page.md"
    folder.mkdir()
    (folder / "a.json").write_text(result(date="2026-11-25", aims=[]).model_dump_json())
    (folder / "b.json").write_text(result().model_dump_json())
    page.write_text(MARKED)
    assert pages.update(folder, tmp_path) == [page]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| tcp | 1 |" in text
    assert "| speed | at least 1 | 0.5 | **not met** |" in text
    assert "2026-11-26, M, 2 cores, no GPU." in text
    assert pages.update(folder, tmp_path) == [], "made once more, it is the same"


def test_a_page_without_an_end_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(ConfigError, match="end of results"):
        pages.made_again("<!-- results: transfer -->\n", {"transfer": result()}, page)


def test_a_command_writes_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/home/me/bin/disagg", "bench", "--results", "out", "transfer", "--sizes", "/x/y"]
    monkeypatch.setattr("sys.argv", words)
    table = Table(title="[b]T[/b]")
    table.add_column("a\nb")
    table.add_row("1")
    with results.recording("transfer", tmp_path):
        assert results.keep(table) is table
        results.aim("x", "1", "2", met=True)
        results.note("said  so.")
    (written,) = results.load(tmp_path)
    assert written.command_line == "disagg bench transfer --sizes y"
    assert written.tables == [ResultTable(title="T", columns=["a b"], rows=[["1"]])]
    assert written.notes == ["said so."]
    assert (written.machine.cores, written.aims[0].met) == (results.this_machine().cores, True)


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    with results.recording("transfer", None):
        results.aim("x", "1", "2", met=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"command": "x", "date": "yesterday"}')
    with pytest.raises(ValidationError, match="date"):
        results.load(tmp_path)
