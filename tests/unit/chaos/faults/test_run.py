"""What `disagg bench faults` does between two kinds of faults, without engines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from disagg.bench.results import Output, load
from disagg.chaos.faults import run
from disagg.chaos.faults.connectors import CONNECTORS, Connector
from disagg.chaos.faults.engines import Engines, Outcome
from disagg.chaos.faults.kinds import KINDS, Kind
from disagg.errors import StartupError


@dataclass
class FakeEngines:
    dead: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    steps: list[bool] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)

    def compute_in_steps(self, wanted: bool) -> None:
        self.steps.append(wanted)

    def meet(self) -> None: ...

    def kept(self) -> list[str]:
        return self.keep

    def revive(self) -> list[str]:
        return self.dead

    def restart(self, name: str) -> None:
        self.restarted.append(name)


@pytest.mark.parametrize(
    ("outcome", "dead", "restarted"),
    [
        (Outcome.RIGHT, [], []),
        (Outcome.HUNG, [], ["left", "right"]),
        (Outcome.HUNG, ["left"], ["right"]),  # it is new already
    ],
)
def test_after_an_answer_that_hung_engines_are_new(
    monkeypatch: Any, outcome: Outcome, dead: list[str], restarted: list[str]
) -> None:
    kind = Kind(lambda engines, times: [outcome], frozenset({"left"}))
    monkeypatch.setattr(run, "KINDS", {"a kind": kind})
    engines = FakeEngines(dead)
    cell = run.play(cast("Engines", engines), "a kind", 1)
    assert cell["outcomes"] == {str(outcome): 1}
    assert sorted(engines.restarted) == restarted


@pytest.mark.parametrize("streamed", [True, False])
def test_an_engine_that_keeps_blocks_is_counted_and_replaced(
    monkeypatch: Any, streamed: bool
) -> None:
    kind = Kind(lambda engines, times: [Outcome.RIGHT], streamed=streamed)
    monkeypatch.setattr(run, "KINDS", {"a kind": kind})
    engines = FakeEngines(keep=["right"])
    cell = run.play(cast("Engines", engines), "a kind", 1)
    assert cell["outcomes"] == {str(Outcome.RIGHT): 1, str(Outcome.KEPT): 1}
    assert run._bad(cell) == 1
    assert engines.restarted == ["right"]
    assert engines.steps == [streamed]


def test_a_connector_that_cannot_stream_says_so_without_engines(
    monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "make_model", MagicMock())
    monkeypatch.setattr(run, "ForkServer", MagicMock())
    monkeypatch.setattr(run, "Engines", MagicMock(side_effect=AssertionError))
    monkeypatch.setattr(run, "STATE", tmp_path / "state.json")
    results = tmp_path / "results"
    output = Output(None, results)
    assert run.run(["ExampleConnector"], ["streamed"], 2, fresh=False, output=output) == 0
    (saved,) = results.iterdir()
    _, answers = load(saved).tables
    streamed = [kind for kind in KINDS if KINDS[kind].streamed]
    assert [row["fault"] for row in answers.rows] == streamed
    assert {row["right"] for row in answers.rows} == {run._NOT_STREAMED}


def test_the_reason_is_the_last_error_of_the_log() -> None:
    log = "ValueError: one\nRuntimeError: two\n[shutdown] all workers exited"
    assert run._cause(StartupError("left ended while starting", log)) == "RuntimeError: two"
    assert run._cause(StartupError("left ended while starting")) == "left ended while starting"


def test_an_interrupted_run_reports_what_was_played(monkeypatch: Any, tmp_path: Path) -> None:
    started = list[str]()

    class Interrupted:
        def __init__(self, connector: Connector, *args: object) -> None:
            started.append(connector.name)

        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(run, "Engines", Interrupted)
    monkeypatch.setattr(run, "ForkServer", MagicMock())
    monkeypatch.setattr(run, "make_model", MagicMock())
    monkeypatch.setattr(run, "STATE", tmp_path / "state.json")
    names = ["disagg", "ExampleConnector"]
    known = run.State(run.STATE, fresh=True)
    kind = "handoffs, one by one"
    known.cells_of(CONNECTORS[0], 2)[kind] = {"outcomes": {str(Outcome.RIGHT): 2}, "note": ""}
    known.save()
    now = run._changed_at()
    changes = iter([now, now + 1])  # our source is edited meanwhile
    monkeypatch.setattr(run, "_changed_at", lambda: next(changes))
    file = tmp_path / "results.json"
    results = tmp_path / "results"
    assert (
        run.run(names, [], 2, fresh=False, output=Output(file, results)) == 1
    )  # ours is not whole
    (saved,) = results.iterdir()
    (missing,) = (one for one in load(saved).targets if one.name == "faults not played")
    assert (missing.measured, missing.met) == (len(KINDS) - 1, False)
    assert started == ["disagg"]
    assert json.loads(file.read_text())["cells"]["disagg"][kind]["outcomes"] == {"right": 2}
