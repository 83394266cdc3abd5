"""The state of engines with small caches, each with a queue.

Only the first request of a queue may be scheduled. Requests of one kind are interchangeable. They
have no names, and a state has them in sorted order: this is the whole symmetry reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

NONE = -1
NEW, AT_PREFILL, PREFILLING = "new", "waits for its prefill", "prefilling"
AT_DECODE, LOADING, READING = "waits for its load", "load has begun", "reads the lease"
LOADED = "loaded, waits to be scheduled"
LOCAL, RUNNING, GROWN = "waits to be computed locally", "running", "running, with one block more"
PREEMPTED, DONE = "preempted", "answered"


class Kind(NamedTuple):
    """Which engines prefill and decode a request, and the blocks of its lease. prefill: `NONE` if
    the decode engine computes the prompt itself."""

    prefill: int
    decode: int
    blocks: int


class Request(NamedTuple):
    """kind: its number in the setup. lease: whether its prefill engine holds its blocks. old: the
    lease's total life has passed. place: in its engine's queue, `NONE` if it is in none."""

    kind: int
    phase: str
    lease: bool = False
    old: bool = False
    place: int = NONE


class State(NamedTuple):
    """yielded: engines that have taken back a lease; only one mutant needs it. wrong: the rule that
    the last action broke."""

    requests: tuple[Request, ...]
    yielded: tuple[int, ...] = ()
    wrong: str = ""


@dataclass(frozen=True)
class Setup:
    """Bounds of one run, and the rule that is missing from it.

    blocks: of each engine. requests: how many of each kind. rest: blocks of each prompt
    that no lease covers, and decode computes. grows: whether an answer needs one block more than
    its prompt. lives_pass: whether a lease's total life may pass. promise: which
    promise is checked. twice: whether a prompt may be computed twice. mutant: the missing rule, ""
    for the protocol as it is.
    """

    name: str
    blocks: int
    requests: tuple[tuple[Kind, int], ...]
    rest: int = 0
    grows: bool = False
    lives_pass: bool = True
    promise: str = "answered"
    twice: bool = True
    mutant: str = ""

    def kind(self, request: Request) -> Kind:
        return self.requests[request.kind][0]

    def hands_off_both_ways(self, engine: int) -> bool:
        """Whether the engine is a producer and a consumer."""
        kinds = [kind for kind, _ in self.requests if kind.prefill != NONE]
        produces = any(kind.prefill == engine for kind in kinds)
        return produces and any(kind.decode == engine for kind in kinds)


def initial(setup: Setup) -> State:
    counts = enumerate(count for _, count in setup.requests)
    return State(tuple(Request(kind, NEW) for kind, count in counts for _ in range(count)))


# ---- facts ---------------------------------------------------------------------------------------


def queued_at(setup: Setup, request: Request) -> int:
    """The engine in whose queue it is."""
    if request.place == NONE:
        return NONE
    kind = setup.kind(request)
    return kind.prefill if request.phase == AT_PREFILL else kind.decode


def free(setup: Setup, state: State, engine: int) -> int:
    """The free blocks of an engine."""
    used = 0
    for request in state.requests:
        kind = setup.kind(request)
        if kind.prefill == engine and (request.lease or request.phase == PREFILLING):
            used += kind.blocks
        if kind.decode == engine and request.phase in (LOADING, READING, LOADED):
            used += kind.blocks
        if kind.decode == engine and request.phase in (RUNNING, GROWN):
            used += kind.blocks + setup.rest + (request.phase == GROWN)
    return setup.blocks - used


def heads(setup: Setup, state: State) -> Iterator[tuple[int, Request, bool]]:
    """Of each engine: the request that vLLM tries first, and whether that finds room. Loaded
    requests come before the queue."""
    loaded = {setup.kind(one).decode for one in state.requests if one.phase == LOADED}
    for request in state.requests:
        if request.phase == LOADED:
            engine = setup.kind(request).decode
            yield engine, request, setup.rest <= free(setup, state, engine)
        elif request.place == 0 and (engine := queued_at(setup, request)) not in loaded:
            yield engine, request, _finds_room(setup, state, request, engine)


def _finds_room(setup: Setup, state: State, request: Request, engine: int) -> bool:
    blocks, room = setup.kind(request).blocks, free(setup, state, engine)
    if request.phase == AT_PREFILL:
        return blocks <= room
    if request.phase == PREEMPTED:
        return blocks + setup.rest + 1 <= room
    if request.phase == LOCAL:
        return blocks + setup.rest <= room
    # A load leaves the blocks that loads before it still need.
    others = sum(loads(setup, one, engine) for one in state.requests) * setup.rest
    return blocks + max(setup.rest, others) <= room


def runs(setup: Setup, request: Request, engine: int) -> bool:
    """Whether this engine computes the request now."""
    kind, phase = setup.kind(request), request.phase
    decodes = kind.decode == engine and phase in (RUNNING, GROWN)
    return decodes or (kind.prefill == engine and phase == PREFILLING)


def loads(setup: Setup, request: Request, engine: int) -> bool:
    """Whether this engine's load of the request is under way."""
    return setup.kind(request).decode == engine and request.phase in (LOADING, READING)


# ---- changes -------------------------------------------------------------------------------------


def moved(state: State, old: Request, new: Request) -> State:
    """`new` in place of one request that is like `old`."""
    requests = list(state.requests)
    requests.remove(old)
    requests.append(new)
    return state._replace(requests=tuple(sorted(requests)))


def leaves_queue(setup: Setup, state: State, request: Request, phase: str) -> State:
    """The first request of a queue is scheduled; those behind it move up."""
    engine = queued_at(setup, request)
    state = moved(state, request, request._replace(phase=phase, place=NONE))
    return _shifted(setup, state, engine, -1)


def joins_queue(setup: Setup, state: State, old: Request, new: Request) -> State:
    """`new`, in place of `old`, becomes the last of its engine's queue."""
    engine = queued_at(setup, new._replace(place=0))
    length = sum(queued_at(setup, one) == engine for one in state.requests)
    return moved(state, old, new._replace(place=length))


def heads_queue(setup: Setup, state: State, old: Request, new: Request) -> State:
    """`new`, in place of `old`, becomes the first of its engine's queue."""
    new = new._replace(place=0)
    return moved(_shifted(setup, state, queued_at(setup, new), 1), old, new)


def _shifted(setup: Setup, state: State, engine: int, by: int) -> State:
    requests = (
        one._replace(place=one.place + by) if queued_at(setup, one) == engine else one
        for one in state.requests
    )
    return state._replace(requests=tuple(sorted(requests)))
