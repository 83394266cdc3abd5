"""What the documentation names is there: files, links, tests, patches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from disagg.config import Deployment
from disagg.engine.vllm_patches import plugin

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\.(?:py|md|yaml|sh|cu))(?:::\w+)?[`:]")
_CODE = re.compile(r"```.*?```", re.DOTALL)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target, anchor in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(f"{target}#{anchor}" if anchor else target)
    assert wrong == []


def places(name: str, page: Path) -> Iterator[Path]:
    for base in (ROOT, ROOT / "disagg", ROOT / "tests", page.parent):
        yield base / name
    # Under a folder that the sentence before has named.
    folders = [
        "connector",
        "connector/offload",
        "transport",
        "router",
        "cluster",
        "engine",
        "store",
    ]
    yield from (ROOT / "disagg" / folder / name for folder in folders)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # names what was
    named = set(_FILE.findall(_CODE.sub("", page.read_text())))
    named = {name for name in named if not name.startswith("vllm/")}
    assert [name for name in sorted(named) if not any(p.exists() for p in places(name, page))] == []


def test_tests_that_the_comparison_names_exist() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text()
    sources = "".join(file.read_text() for file in ROOT.glob("tests/**/*.py"))
    named = set(re.findall(r"`(?:[\w/.]+::)?(test_\w+)(?:\[[^`]*)?`", text))
    assert len(named) > 40
    missing = {name for name in named if f"def {name}" not in sources}
    assert {name for name in missing if not list(ROOT.glob(f"tests/**/{name}.py"))} == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_patches_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "vllm_patches.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    versions = {p.name: p.versions.removeprefix("==").removesuffix(".*") for p in plugin.ALL}
    assert rows == {name: version or "any" for name, version in versions.items()}


def test_yaml_in_pages_has_keys_that_exist() -> None:
    """Sections of a deployment, as readers copy them."""
    known = Deployment.model_fields.keys()
    found = 0
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            content = yaml.safe_load(block)
            assert content.keys() <= known, f"{page_id(page)}: {content.keys() - known}"
            found += 1
    assert found
