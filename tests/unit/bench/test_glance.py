"""The picture of README.md: what the command makes from the committed results."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from disagg.bench import glance, pages, results

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / pages.PICTURE


def normal(text: str) -> str:
    """Without the names of ids, and without what float rounding of another machine changes."""
    names: dict[str, str] = {}
    for name in re.findall(r'id="([^"]+)"', text):
        names.setdefault(name, f"id{len(names)}")
    text = re.sub(r'id="([^"]+)"', lambda m: f'id="{names[m[1]]}"', text)
    text = re.sub(r"#([\w-]+)", lambda m: f"#{names.get(m[1], m[1])}", text)
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]) + 0:.1f}", text)


def test_the_picture_is_what_the_results_say() -> None:
    """After a change: `disagg bench pages`."""
    made = glance.drawn(results.newest(ROOT / pages.RESULTS))
    assert made is not None
    assert normal(PICTURE.read_text()) == normal(made), "run disagg bench pages"


def test_the_picture_says_what_and_where() -> None:
    text = PICTURE.read_text()
    assert len(text.encode()) < 100_000
    assert re.findall(r"(?:href=\"|url\()(?!#)", text) == []
    picture = ElementTree.fromstring(text)
    texts = ["".join(node.itertext()) for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    found = results.newest(ROOT / pages.RESULTS)
    for name in ("serve", "handoff"):
        result = found[name][1]
        (caption,) = [
            one for one in texts if one.startswith(f"{name}: measured {result.date[:10]}")
        ]
        assert result.machine.cpu in caption
        assert f"{result.machine.cores} cores" in caption
    assert texts.count("0") >= 2  # both axes of values begin at 0
    assert texts.count("ms") == 2
    assert "(docs/images/at-a-glance.svg)" in (ROOT / "README.md").read_text().splitlines()[2]


def test_figures_of_the_picture_are_those_of_the_results() -> None:
    found = results.newest(ROOT / pages.RESULTS)
    (first, *_), (path, result) = found["handoff"][1].tables, found["handoff"]
    rows = [row | {"disagg": 77777} if n == 0 else row for n, row in enumerate(first.rows)]
    table = msgspec.structs.replace(first, rows=rows)
    changed = msgspec.structs.replace(result, tables=[table])
    assert "77,777" in (glance.drawn({**found, "handoff": (path, changed)}) or "")


def test_no_picture_without_results() -> None:
    found = results.newest(ROOT / pages.RESULTS)
    assert glance.drawn({"serve": found["serve"]}) is None
    assert glance.drawn({}) is None
