"""The tables of `bench router` fit a terminal of 100 columns."""

from __future__ import annotations

import pytest
from rich.console import Console

from disagg.bench.router import report
from disagg.bench.router.report import MODES, TARGETS, RouterCase, Sample


def test_tables_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    slow = Sample(1000, 0.31, 0.123456, 1.23456, 2.34567, 12.34567, 123.4, 45.6, 12.34)
    samples = {
        (RouterCase(mode, clients), name): [slow]
        for mode in MODES
        for clients in (1, 256)
        for name in TARGETS
    }
    figures = {
        "pace_ms": 0,
        "rounds": 8,
        "cores": 2,
        "load": (1.0, 1.0, 1.0),
        "minutes": 12.3,
        "memory_mb": {"ours": {"processes": 2, "start": 80.0, "most": 106.0}},
        "rows": report.rows(samples),
    }
    report.show(figures, Console())
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    assert "…" not in said  # nothing is cut off
    assert said.count("answers as 64 events") == said.count("answers in one piece") == 2
    assert "123/45.6/12.3" in said  # CPU of router, fakes and load
    assert "123.46 / 1,235" not in said
    assert "123 / 1,235" in said
    assert "3,226" in said
