"""Speeds from files, and the errors for wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unit.planning.loads import speeds

from disagg.errors import ConfigError
from disagg.planning import speeds as speeds_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "speeds-cpu.json"


def test_speeds_come_back_as_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    speeds_file.save(path, speeds())
    assert speeds_file.load(path) == speeds()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefil": {}}, "prefil: unknown key; did you mean prefill?"),
        ({"router_s": -1}, "router_s: -1 — must be at least 0"),
        ({"router_s": None}, "router_s: empty — must be a finite number"),
        ({"handoff": {"latency_s": 0}}, "handoff.bytes_per_token: missing"),
    ],
)
def test_wrong_speeds_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({**speeds().model_dump(), **change}))
    with pytest.raises(ConfigError) as caught:
        speeds_file.load(path)
    assert caught.value.problems[0].startswith(f"{path}: {said}")


def test_speeds_of_version_0_1_are_read(tmp_path: Path) -> None:
    written = speeds().model_dump()
    written["handover"] = written.pop("handoff")
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps(written))
    assert speeds_file.load(path) == speeds()


def test_the_example_is_a_file_of_speeds() -> None:
    assert speeds_file.load(EXAMPLE).measured["by"] == "disagg bench speeds"
