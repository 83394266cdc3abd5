"""What `disagg bench faults` does between two kinds of faults, without engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from disagg.chaos.faults import run
from disagg.chaos.faults.engines import Engines, Outcome
from disagg.chaos.faults.kinds import Kind
from disagg.errors import StartupError


@dataclass
class FakeEngines:
    dead: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)

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


def test_the_reason_is_the_last_error_of_the_log() -> None:
    log = "ValueError: one\nRuntimeError: two\n[shutdown] all workers exited"
    assert run._cause(StartupError("left ended while starting", log)) == "RuntimeError: two"
    assert run._cause(StartupError("left ended while starting")) == "left ended while starting"
