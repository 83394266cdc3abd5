"""`disagg bench evictions`: what it counts, on a trace whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.bench.results import Output, load
from disagg.bench.router import evictions
from disagg.bench.router.evictions import EvictionsPlan
from disagg.bench.router.reuse_trace import BLOCK
from disagg.errors import ConfigError


def trace(folder: Path) -> Path:
    """Two prompts that take turns, and one of three blocks after each turn that never returns."""
    prompts = [[0, 1], [5, 6]] * 6
    lines = list[dict[str, Any]]()
    for number, prompt in enumerate(prompts):
        for ids in (prompt, [100 + 10 * number + n for n in range(3)]):
            lines.append(
                {
                    "timestamp": len(lines),
                    "input_length": len(ids) * BLOCK + 1,
                    "output_length": 1,
                    "hash_ids": [*ids, 10_000 + len(lines)],
                }
            )
    path = folder / "turns_trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_each_policy_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = EvictionsPlan(trace(tmp_path), [8, 1000], ["lru", "turns"])
    assert evictions.run(plan, Output(tmp_path / "figures.json", tmp_path)) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    tokens = 12 * (2 * BLOCK + 1) + 12 * (3 * BLOCK + 1)
    endless = round(100 * 10 * 2 * BLOCK / tokens, 2)  # all but the first turn of each prompt
    small, large = figures["rows"]
    assert (figures["endless_reuse"], large["reuse, %: lru"]) == (endless, endless)
    # Ten blocks come between two turns, so LRU loses them; what has been used once stays.
    assert small["reuse, %: lru"] == 0
    assert small["reuse, %: turns"] > 0.5 * endless
    (file,) = tmp_path.glob("*-evictions-turns.json")
    assert len(load(file).tables[0].rows) == 2
    assert "1,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": ["fifo"]}, "--policies: fifo — choose from lru, arc, turns"),
        ({"policies": []}, "--policies: name at least one"),
        ({"blocks": [0]}, "--blocks: each number"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    plan = EvictionsPlan(**{"trace": Path("x"), "blocks": [8], "policies": ["lru"], **changes})
    with pytest.raises(ConfigError, match=words):
        evictions.run(plan, Output())
