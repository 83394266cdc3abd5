"""The benchmark pages are what the results files say, and the committed ones are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from disagg.bench import pages, results
from disagg.bench.results import Machine, Result, Table, Target
from disagg.errors import ConfigError

ROOT = Path(__file__).parents[3]
NO_PICTURE = Path("never/written.svg")  # there are no results for it
PAGE = """# A page

Written by hand.

<!-- results: router -->
<!-- /results -->

Also by hand.

<!-- results: summary -->
old
<!-- /results -->
"""
RESULT = Result(
    schema=1,
    command="router",
    date="2026-11-26",
    command_line="disagg bench router",
    machine=Machine("AMD EPYC", cores=2, cpu_features=["AVX2"]),
    versions={"disagg": "0.1.0"},
    tables=[Table("Times", [{"way": "a|b", "ms": 1234.5}, {"way": "c", "ms": 0.01234, "n": 4321}])],
    targets=[
        Target("ratio", 0.9996, False, at="16 clients", at_least=1.0),
        Target("ratio", 1.25, True, at="64 clients", at_least=1.0),
    ],
)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/router.md").write_text(PAGE)
    results.save(RESULT, tmp_path / "results")
    return tmp_path / "pages", tmp_path / "results"


def test_a_page_has_the_tables_and_the_verdicts(folders: tuple[Path, Path]) -> None:
    page = folders[0] / "router.md"
    assert pages.run(*folders, NO_PICTURE, check=True) == 1
    assert page.read_text() == PAGE
    assert pages.run(*folders, NO_PICTURE, check=False) == 0
    text = page.read_text()
    assert "Written by hand." in text
    assert "Also by hand." in text
    assert "| a\\|b | 1,234 |  |" in text  # three significant digits, and not less of integers
    assert "| c | 0.0123 | 4,321 |" in text
    assert "| ratio | 16 clients | at least 1 | 0.9996 | **missed** |" in text
    assert "on AMD EPYC (AVX2), 2 cores, no GPU ([results file](../results/" in text
    assert "| ratio | at least 1 | 0.9996 to 1.25 | **missed**, 1 of 2 |" in text
    assert "old" not in text
    # Once more changes nothing.
    assert pages.run(*folders, NO_PICTURE, check=True) == 0
    assert pages.run(*folders, NO_PICTURE, check=False) == 0
    assert page.read_text() == text


def test_results_without_a_page_are_refused(folders: tuple[Path, Path]) -> None:
    (folders[0] / "router.md").write_text("nothing")
    with pytest.raises(ConfigError, match="results of router: no page"):
        pages.run(*folders, NO_PICTURE, check=False)
    with pytest.raises(ConfigError, match="has no page"):
        pages.run(folders[1], folders[1], NO_PICTURE, check=False)


# ---- the committed files -----------------------------------------------------------------------

COMMITTED = sorted((ROOT / pages.RESULTS).glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_file_fits_the_schema(path: Path) -> None:
    result = results.load(path)
    assert result.tables
    assert all(table.rows for table in result.tables)
    found = re.search(r"[\s\"'](/(home|root|work|tmp|usr|opt)/|~/)\S*", path.read_text())
    assert found is None, f"it names a folder of a machine: {found.group()}"


def test_the_pages_are_what_the_results_say() -> None:
    """After a change: `disagg bench pages`."""
    found = results.newest(ROOT / pages.RESULTS)
    assert found
    for page, text in pages.made(sorted((ROOT / pages.PAGES).glob("*.md")), found):
        assert page.read_text() == text, f"{page.name} is out of date: run disagg bench pages"


def test_links_of_pages_and_decisions_lead_somewhere() -> None:
    for folder in ("docs/benchmarks", "docs/decisions"):
        for page in (ROOT / folder).glob("*.md"):
            for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_decisions_are_short_and_listed() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text()
    files = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    assert files
    for number, path in enumerate(files, start=1):
        text = path.read_text()
        assert path.name.startswith(f"{number:04}-")
        assert len(text.splitlines()) <= 60, path.name
        assert f"({path.name})" in index
        for heading in ("Context", "Tried", "Measured", "Decided"):
            assert f"\n## {heading}\n" in text, f"{path.name}: {heading}"
