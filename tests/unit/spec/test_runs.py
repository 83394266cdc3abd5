"""A short form of `make verify`, and the tie between the models and the code."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec.__main__ import action_table
from spec.runs import ACTIONS, MUTANTS, PROTOCOL, RUNS, Run

README = Path(__file__).parents[3] / "spec" / "README.md"
# Setups of at most 13,000 states. `make verify` checks the others.
SMALL = {
    "one fetch, direct",
    "one fetch, asked",
    "one fetch, sent",
    "a restart, asked",
    "a prompt is followed, read",
    "a prompt is followed, sent",
    "a followed prompt begins anew twice",
    "two engines of one block",
    "two engines without patience",
    "two engines that preempt",
    "a producer before a cycle",
    "two busy engines",
    "a stalled decode engine",
}
# Each takes seconds; `make verify` tries them too.
LONG = {"a ticket used twice", "two engines, two sizes", "two engines, prompts loaded in part"}


def run_id(run: Run) -> str:
    return f"{run.setup}: {run.mutant}" if run.mutant else run.setup


@pytest.mark.parametrize("run", [run for run in PROTOCOL if run.setup in SMALL], ids=run_id)
def test_the_protocol_holds(run: Run) -> None:
    result = run.start()
    assert result.problem == "", "\n".join(result.trace)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=pytest.mark.slow if run.setup in LONG else (), id=run_id(run))
        for run in MUTANTS
    ],
)
def test_a_mutant_is_caught(run: Run) -> None:
    result = run.start()
    assert result.problem == run.breaks
    assert result.trace


def test_small_setups_exist() -> None:
    assert {run.setup for run in PROTOCOL} >= SMALL
    assert len({run_id(run) for run in RUNS}) == len(RUNS)


def names() -> Iterator[str]:
    for action in ACTIONS:
        yield from action.implements


@pytest.mark.parametrize("name", sorted(set(names())))
def test_an_action_names_code_that_exists(name: str) -> None:
    """The module is the longest prefix that can be imported; the rest are its attributes."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        assert callable(found)
        return
    pytest.fail(f"{name}: no such module")


def test_actions_without_code_are_events() -> None:
    events = {action.name for action in ACTIONS if not action.implements}
    assert events == {
        "a consumer dies",
        "the producer dies",
        "a follower dies",
        "the producer of a followed prompt dies",
        "the device ends a step",
    }


def test_the_table_of_actions_is_current() -> None:
    assert "\n".join(action_table()) in README.read_text()
