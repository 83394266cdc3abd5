"""An explicit-state model checker: it visits every state that a model can reach.

A model has one initial state and actions. A state is a tuple, so it can be a key of a dict. An
action gives the states that can follow; none where it is not enabled. The search is breadth first,
so the first state that breaks a rule is one of the nearest.

Three kinds of rules are checked:

- An invariant holds in every state.
- No state is a dead end, except where the model says that everything may rest.
- A promise ("every fetch ends") says that a wait ends. It is checked on the whole graph, under weak
  fairness: an action that a promise relies on does not stay enabled for ever without being taken.
  All other actions may happen or not. In addition the model may stop at any moment, unless one of
  those actions is enabled. A promise is broken if a strongly connected component exists in which
  the wait never ends, and in which each action relied on is taken or is disabled somewhere. This
  test is exact: the states that a run visits infinitely often are strongly connected, and a run can
  visit all states and transitions of a component in turn.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Action(Generic[S]):
    """One atomic step. by: whose step it is; a promise relies on some of these. implements: the
    functions of the package that do it. then: the states that follow."""

    name: str
    by: str
    implements: tuple[str, ...]
    then: Callable[[S], Iterable[S]]


@dataclass(frozen=True)
class Promise(Generic[S]):
    """A wait that ends. relies_on: whose actions happen in the end if they stay enabled."""

    name: str
    waits: Callable[[S], bool]
    relies_on: frozenset[str]


@dataclass(frozen=True)
class Model(Generic[S]):
    """broken: the name of the rule that a state breaks, or "". may_rest: whether a state without
    successors is no dead end. show: one line per fact of a state, for counterexamples."""

    name: str
    initial: S
    actions: Sequence[Action[S]]
    broken: Callable[[S], str]
    may_rest: Callable[[S], bool]
    show: Callable[[S], list[str]]
    promises: Sequence[Promise[S]] = ()


@dataclass
class Result:
    """What a check found. problem: the broken rule, "" if all hold. trace: the counterexample.
    taken: the actions that were taken anywhere."""

    states: int = 0
    depth: int = 0
    seconds: float = 0.0
    problem: str = ""
    trace: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)


class TooManyStates(Exception):
    """The model is larger than the limit: the check proves nothing."""


def check(model: Model[S], most: int = 2_000_000) -> Result:
    """Visit every reachable state; stop at the first broken rule. Raises `TooManyStates`."""
    began = time.perf_counter()
    graph = _Graph(model, most)
    problem, trace = graph.explore()
    for promise in model.promises if not problem else ():
        trace = graph.broken_promise(promise)
        if trace:
            problem = promise.name
            break
    taken = {action.name for number, action in enumerate(model.actions) if number in graph.taken}
    return Result(
        states=len(graph.states),
        depth=graph.depth,
        seconds=time.perf_counter() - began,
        problem=problem,
        trace=trace,
        taken=taken,
    )


class _Graph(Generic[S]):
    """The states in the order of discovery, each with its edges: (action, number of successor)."""

    def __init__(self, model: Model[S], most: int) -> None:
        self._model, self._most = model, most
        self.states: list[S] = []
        self.taken: set[int] = set()
        self.depth = -1
        self._numbers: dict[S, int] = {}
        # Of each state but the first: from which state, and by which action, it was found.
        self._parents, self._found_by = array("q"), array("b")
        # Edges of state n: from _begins[n] to _begins[n + 1].
        self._begins, self._successors, self._actions = array("q", [0]), array("q"), array("b")

    # ---- the search ------------------------------------------------------------------------

    def explore(self) -> tuple[str, list[str]]:
        """Visit all states. Returns a broken invariant and the shortest way to it, if any."""
        model, actions = self._model, list(enumerate(self._model.actions))
        self._number(model.initial, -1, -1)
        next_level = current = 0
        while current < len(self.states):
            state = self.states[current]
            if current == next_level:
                self.depth += 1
                next_level = len(self.states)
            problem = model.broken(state)
            if problem:
                return problem, self._trace(current)
            for number, action in actions:
                for after in action.then(state):
                    self._successors.append(self._number(after, current, number))
                    self._actions.append(number)
                    self.taken.add(number)
            self._begins.append(len(self._actions))
            if self._begins[current] == len(self._actions) and not model.may_rest(state):
                return "no dead end", self._trace(current)
            current += 1
        return "", []

    def _number(self, state: S, parent: int, action: int) -> int:
        number = self._numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            if number >= self._most:
                raise TooManyStates(f"{self._model.name}: more than {self._most} states")
            self.states.append(state)
            self._parents.append(parent)
            self._found_by.append(action)
        return number

    # ---- promises --------------------------------------------------------------------------

    def broken_promise(self, promise: Promise[S]) -> list[str]:
        """A way into a component in which the wait need not end; empty if there is none."""
        if unknown := promise.relies_on - {action.by for action in self._model.actions}:
            raise ValueError(f"{promise.name}: no action is by {sorted(unknown)}")
        waits = bytearray(promise.waits(state) for state in self.states)
        needed = {
            number
            for number, action in enumerate(self._model.actions)
            if action.by in promise.relies_on
        }
        bad = [
            component
            for component in self._components(waits)
            if not needed - self._taken_or_disabled(component)
        ]
        return self._lasso(min(bad, key=min)) if bad else []

    def _edges(self, state: int) -> Iterator[tuple[int, int]]:
        for edge in range(self._begins[state], self._begins[state + 1]):
            yield self._actions[edge], self._successors[edge]

    def _taken_or_disabled(self, component: list[int]) -> set[int]:
        """Actions that are taken between states of the component, or disabled in one of them."""
        inside = set(component)
        found: set[int] = set()
        always = set(range(len(self._model.actions)))
        for state in component:
            enabled = set()
            for action, after in self._edges(state):
                enabled.add(action)
                if after in inside:
                    found.add(action)
            always &= enabled
        return found | (set(range(len(self._model.actions))) - always)

    def _components(self, inside: bytearray) -> Iterator[list[int]]:
        """Strongly connected components of the states inside: Tarjan's algorithm, without
        recursion. A state alone is a component too, as the model may stop there."""
        low, index = array("q", [-1]) * len(inside), 0
        done = bytearray(len(inside))
        path: list[int] = []
        for root in range(len(inside)):
            if not inside[root] or low[root] >= 0:
                continue
            work = [(root, self._edges(root))]
            order = {root: index}
            low[root] = index
            index += 1
            path.append(root)
            while work:
                state, edges = work[-1]
                for _, after in edges:
                    if not inside[after] or done[after]:
                        continue
                    if low[after] < 0:
                        order[after] = low[after] = index
                        index += 1
                        path.append(after)
                        work.append((after, self._edges(after)))
                        break
                    low[state] = min(low[state], low[after])
                else:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[state])
                    if low[state] == order[state]:
                        component: list[int] = []
                        while not component or component[-1] != state:
                            component.append(path.pop())
                            done[component[-1]] = 1
                        yield component

    # ---- counterexamples -------------------------------------------------------------------

    def _trace(self, state: int) -> list[str]:
        """The way from the initial state: each action, and what it changed."""
        way = [state]
        while self._parents[way[-1]] >= 0:
            way.append(self._parents[way[-1]])
        way.reverse()
        names = ["initially", *(self._name(self._found_by[one]) for one in way[1:])]
        return self._lines([*zip(names, way, strict=True)])

    def _lines(self, steps: list[tuple[str, int]]) -> list[str]:
        lines: list[str] = []
        before: list[str] = []
        for number, (name, state) in enumerate(steps):
            facts = self._model.show(self.states[state])
            lines.append(f"{number:3} {name}")
            lines += [f"        {fact}" for fact in facts if fact not in before]
            before = facts
        return lines

    def _lasso(self, component: list[int]) -> list[str]:
        """The way to the component, and what happens in it for ever."""
        first, inside = min(component), set(component)
        lines = self._trace(first)
        used = sorted(
            {
                self._name(a)
                for state in component
                for a, after in self._edges(state)
                if after in inside
            }
        )
        if not used:
            return [*lines, "    then nothing that the promise relies on can happen"]
        lines.append(f"    then for ever, over {len(component)} states: {', '.join(used)}")
        lines.append("    for example:")
        return lines + self._lines(self._loop(first, inside))[1:]

    def _loop(self, first: int, inside: set[int]) -> list[tuple[str, int]]:
        """The shortest way from a state back to itself."""
        came: dict[int, tuple[int, int]] = {}
        waiting = deque([first])
        while first not in came:
            state = waiting.popleft()
            for action, after in self._edges(state):
                if after in inside and after not in came:
                    came[after] = state, action
                    waiting.append(after)
        steps: list[tuple[str, int]] = []
        state = first
        while not steps or state != first:
            previous, action = came[state]
            steps.append((self._name(action), state))
            state = previous
        return [("", first), *reversed(steps)]

    def _name(self, action: int) -> str:
        return self._model.actions[action].name
