"""The runs of this model: their bounds, and the rules that are checked.

Why every wait ends: an engine that runs nothing and loads nothing keeps blocks for leases and for
loaded requests only. If it is a consumer too, it takes back leases until its next request finds
room, whatever other engines do. So no cycle lasts. An engine that only produces waits for engines
that come free.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from spec.checker import Model, Promise
from spec.engines.actions import ACTIONS, show
from spec.engines.state import (
    AT_PREFILL,
    DONE,
    LOCAL,
    NEW,
    NONE,
    PREFILLING,
    Kind,
    Setup,
    State,
    free,
    initial,
)

CYCLE = Setup("two engines, a cycle", 2, ((Kind(0, 1, 1), 3), (Kind(1, 0, 1), 3)))
SMALL = Setup("two engines of one block", 1, ((Kind(0, 1, 1), 2), (Kind(1, 0, 1), 2)))
LATE = replace(SMALL, name="two engines without patience", promise="answered late")
SIZES = Setup(
    "two engines, two sizes",
    3,
    ((Kind(0, 1, 2), 1), (Kind(0, 1, 1), 1), (Kind(1, 0, 2), 1), (Kind(1, 0, 1), 1)),
)
GROWING = Setup("two engines that preempt", 2, ((Kind(0, 1, 1), 2), (Kind(1, 0, 1), 2)), grows=True)
PARTLY = Setup(
    "two engines, prompts loaded in part",
    2,
    ((Kind(0, 1, 1), 1), (Kind(1, 0, 1), 1), (Kind(2, 0, 1), 1), (Kind(2, 1, 1), 1)),
    rest=1,
)
RING = Setup(
    "three engines, a ring", 1, ((Kind(0, 1, 1), 2), (Kind(1, 2, 1), 2), (Kind(2, 0, 1), 2))
)
TAIL = Setup(
    "a producer before a cycle", 1, ((Kind(0, 1, 1), 1), (Kind(1, 0, 1), 1), (Kind(2, 0, 1), 2))
)
BUSY = Setup(
    "two busy engines",
    3,
    ((Kind(NONE, 0, 2), 2), (Kind(0, 1, 1), 1), (Kind(1, 0, 2), 1)),
    lives_pass=False,
    twice=False,
)
STALLED = Setup("a stalled decode engine", 2, ((Kind(0, 1, 1), 4),), promise="prefilled")
SETUPS = (CYCLE, SMALL, LATE, SIZES, GROWING, PARTLY, RING, TAIL, BUSY, STALLED)


def _waits(state: State) -> bool:
    return any(request.phase not in (NEW, DONE) for request in state.requests)


def _waits_for_prefill(state: State) -> bool:
    return any(request.phase in (AT_PREFILL, PREFILLING) for request in state.requests)


PROMISES = {
    "answered": Promise(
        "every request is answered, before any lease's total life has passed",
        _waits,
        frozenset({"engine", "queue", "load", "patience"}),
    ),
    # Patience is not relied on: the total life alone ends each cycle too, but only then.
    "answered late": Promise(
        "every request is answered, once total lives have passed",
        _waits,
        frozenset({"engine", "queue", "load", "life"}),
    ),
    # The decode engine's queue is not relied on.
    "prefilled": Promise(
        "every prefill is answered, although decode begins no load",
        _waits_for_prefill,
        frozenset({"engine", "load", "life"}),
    ),
}


def broken(setup: Setup, state: State) -> str:
    """The rule that this state breaks."""
    if state.wrong:
        return state.wrong
    engines = {engine for kind, _ in setup.requests for engine in kind[:2]} - {NONE}
    if any(free(setup, state, engine) < 0 for engine in engines):
        return "no engine gives out more blocks than it has"
    if not setup.twice:
        for request in state.requests:
            if request.phase == LOCAL and setup.kind(request).prefill != NONE:
                return "no prompt is computed twice where no engine is stuck"
    return ""


def model(setup: Setup) -> Model[State]:
    return Model(
        name=setup.name,
        initial=initial(setup),
        actions=ACTIONS.bound(setup),
        broken=partial(broken, setup),
        may_rest=lambda state: not _waits(state),
        show=partial(show, setup),
        promises=[PROMISES[setup.promise]],
    )
