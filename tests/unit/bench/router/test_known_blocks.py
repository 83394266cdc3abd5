"""`disagg bench router --knows`, with little known and for a short time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.bench.results import Output, load
from disagg.bench.router import known_blocks
from disagg.bench.router.known_blocks import KnownBlocksPlan


def test_each_choice_is_an_engine_that_holds_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(known_blocks, "_CHOICES", 50)
    monkeypatch.setattr(known_blocks, "_APPLIED", 1)
    monkeypatch.setattr(known_blocks, "_HEARD_S", 0.4)
    monkeypatch.setattr(known_blocks, "settle", lambda: None)
    output = Output(tmp_path / "figures.json", tmp_path)
    assert known_blocks.run(KnownBlocksPlan(engines=6, blocks=6000), output) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["choices_right"] == 1
    assert figures["blocks"] == 6000 + 64
    (path,) = tmp_path.glob("*-router-knows.json")
    assert next(one.name for one in load(path).targets) == "a choice, us, p99"
    assert "choice_p99_us" in capsys.readouterr().out
