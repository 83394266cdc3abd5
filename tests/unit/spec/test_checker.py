"""The checker finds what is wrong in small models, and nothing in right ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from spec.checker import Action, Model, Promise, TooManyStates, check

State = tuple[int, ...]


def model(
    *actions: Action[State],
    broken: Callable[[State], str] = lambda state: "",
    waits: Callable[[State], bool] = lambda state: False,
    relies_on: str = "worker",
    rests: bool = True,
) -> Model[State]:
    return Model(
        name="small",
        initial=(0,),
        actions=actions,
        broken=broken,
        may_rest=lambda state: rests,
        show=lambda state: [f"at {state[0]}"],
        promises=[Promise("it ends", waits, frozenset({relies_on}))],
    )


def goes(name: str, *steps: tuple[int, int], by: str = "worker") -> Action[State]:
    """An action that leads from one number to another."""

    def then(state: State) -> Iterator[State]:
        yield from ((after,) for before, after in steps if before == state[0])

    return Action(name, by, (), then)


def test_each_state_is_visited_once() -> None:
    result = check(model(goes("a", (0, 1), (1, 2)), goes("b", (0, 2), (2, 0))))
    assert (result.states, result.depth, result.problem) == (3, 1, "")
    assert result.taken == {"a", "b"}


def test_a_broken_invariant_is_shown_by_a_shortest_way() -> None:
    slow, fast = goes("slow", (0, 1), (1, 2), (2, 9)), goes("fast", (0, 5), (5, 9))
    result = check(model(slow, fast, broken=lambda state: "not nine" if state[0] == 9 else ""))
    assert result.problem == "not nine"
    assert [line.split(maxsplit=1) for line in result.trace if not line.startswith("     ")] == [
        ["0", "initially"],
        ["1", "fast"],
        ["2", "fast"],
    ]
    assert result.trace[-1].strip() == "at 9"


def test_a_dead_end_is_found() -> None:
    assert check(model(goes("a", (0, 1)), rests=False)).problem == "no dead end"
    assert check(model(goes("a", (0, 1)), rests=True)).problem == ""


def test_a_wait_ends_by_an_action_that_is_relied_on() -> None:
    def waits(state: State) -> bool:
        return state[0] == 0

    assert check(model(goes("a", (0, 1)), waits=waits)).problem == ""
    by_chance = goes("a", (0, 1), by="chance"), goes("b", (1, 1))
    assert check(model(*by_chance, waits=waits)).problem == "it ends"


def test_a_loop_is_left_only_by_an_action_that_stays_enabled() -> None:
    """Weak fairness: in the first loop the exit is enabled everywhere, in the second in one state
    only, so that it need not be taken."""
    loop = goes("loop", (0, 1), (1, 0), by="chance")

    def waits(state: State) -> bool:
        return state[0] < 2

    assert check(model(loop, goes("exit", (0, 2), (1, 2)), waits=waits)).problem == ""
    result = check(model(loop, goes("exit", (0, 2)), waits=waits))
    assert result.problem == "it ends"
    assert "for ever, over 2 states: loop" in "\n".join(result.trace)


def test_an_action_that_is_taken_in_a_loop_does_not_leave_it() -> None:
    """An action with two outcomes may always have the same one."""
    turns = goes("turn", (0, 0), (0, 1))
    assert check(model(turns, waits=lambda state: state[0] == 0)).problem == "it ends"


def test_a_small_loop_in_a_large_one_is_no_excuse() -> None:
    """A component is judged as a whole: the run may visit all of it."""
    inner = goes("inner", (0, 1), (1, 0), by="chance")
    outer = goes("outer", (1, 2), (2, 0), by="chance")
    leave = goes("leave", (0, 3), (1, 3))
    result = check(model(inner, outer, leave, waits=lambda state: state[0] < 3))
    assert result.problem == "it ends"


def test_limits_and_misprints_are_errors() -> None:
    with pytest.raises(TooManyStates):
        check(model(goes("a", *((n, n + 1) for n in range(20)))), most=10)
    with pytest.raises(ValueError, match="no action is by"):
        check(model(goes("a", (0, 1)), relies_on="nobody"))
