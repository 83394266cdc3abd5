"""A fetch that reads the lease without asking for it."""

from __future__ import annotations

from collections.abc import Iterator

from spec.handoff.fetch import (
    believes,
    copied,
    reads_directly,
    released,
    write_slot,
)
from spec.handoff.state import (
    ACTIONS,
    ASKING,
    BELIEVED,
    CONNECTED,
    COPIED,
    DONE,
    FETCHED,
    HALF,
    LOOKED_UP,
    NAMED,
    NONE,
    Setup,
    State,
    for_each_consumer,
    is_connected,
    with_consumer,
)

_FETCH = "disagg.transport.fetch.OneFetch"
_SESSION = "disagg.transport.control.server._Session"
_LEASES = "disagg.transport.control.lease.LeaseTable"
_WORKER = "disagg.connector.handoff.consumer_worker.ConsumerWorker"
_BOARD = "disagg.transport.one_sided.lease_board"
_SLOTS = "disagg.transport.one_sided.hazard_pointers"
_COPY = "disagg.transport.one_sided.process_memory._ProcessCache._copy"


@ACTIONS.add(
    "a consumer names the lease in its hazard slot",
    "consumer",
    f"{_FETCH}.read_directly",
    f"{_SLOTS}.RemoteHazardPointers.naming",
)
@for_each_consumer
def name_lease(setup: Setup, state: State, i: int) -> Iterator[State]:
    late = setup.mutant == "the slot is written after the look-up"
    phase = NAMED if late else CONNECTED
    if state.consumers[i].phase == phase and reads_directly(setup, state, i):
        after = write_slot(setup, state, i, setup.wants[i][1])
        yield _begins_read(after, i) if late else with_consumer(after, i, phase=NAMED)


@ACTIONS.add(
    "a consumer looks the lease up on the board",
    "consumer",
    f"{_BOARD}.look_up",
    "disagg.transport.one_sided.remote_lease_board.RemoteLeaseBoard.reading",
)
@for_each_consumer
def look_up(setup: Setup, state: State, i: int) -> Iterator[State]:
    late = setup.mutant == "the slot is written after the look-up"
    if state.consumers[i].phase != (CONNECTED if late else NAMED):
        return
    if late and not reads_directly(setup, state, i):
        return
    number = setup.wants[i][1]
    row = state.producer.board[number % setup.rows] if state.producer.alive else None
    right_token = row is not None and row.token == state.consumers[i].life
    right_token = right_token or setup.mutant == "the board's token is not checked"
    if row is not None and row.number == number and right_token:
        after = with_consumer(state, i, phase=NAMED, row=row)
        yield after if late else _begins_read(after, i)
    else:
        yield _asks_instead(setup, state, i)


def _begins_read(state: State, i: int) -> State:
    """The lease is named, and was on the board."""
    row = state.consumers[i].row
    assert row is not None
    state = with_consumer(state, i, phase=LOOKED_UP)
    if state.producer.alive and state.producer.blocks[row.block].owner != row.number:
        return state._replace(wrong="no direct read overlaps a free, within the limit")
    return state


def _asks_instead(setup: Setup, state: State, i: int) -> State:
    state = write_slot(setup, state, i, NONE)
    return with_consumer(state, i, phase=ASKING, row=None, seen=())


@ACTIONS.add(
    "a consumer copies one half of the block",
    "consumer",
    _COPY,
    "disagg.transport.one_sided.remote_lease_board.BoardCache.read",
)
@for_each_consumer
def copy_half(setup: Setup, state: State, i: int) -> Iterator[State]:
    following = {LOOKED_UP: HALF, HALF: COPIED}.get(state.consumers[i].phase)
    if following is None:
        return
    if not state.producer.alive:
        yield _asks_instead(setup, state, i)
    else:
        yield copied(state, i, following)


@ACTIONS.add(
    "a consumer looks at the row again",
    "consumer",
    f"{_BOARD}.still_there",
    f"{_FETCH}.read_directly",
)
@for_each_consumer
def look_again(setup: Setup, state: State, i: int) -> Iterator[State]:
    consumer, producer = state.consumers[i], state.producer
    if consumer.phase != COPIED:
        return
    row = producer.board[setup.wants[i][1] % setup.rows] if producer.alive else None
    if row == consumer.row or setup.mutant == "no second look at the row":
        yield believes(setup, state, i, directly=True)
    else:
        yield _asks_instead(setup, state, i)


@ACTIONS.add(
    "a consumer reports the load, then releases the lease",
    "both",
    f"{_FETCH}._release_fetched",
    f"{_WORKER}._load_and_report",
    f"{_SESSION}._release",
    f"{_LEASES}.release",
)
@for_each_consumer
def release_believed(setup: Setup, state: State, i: int) -> Iterator[State]:
    if state.consumers[i].phase != BELIEVED:
        return
    if not is_connected(state, i):
        yield with_consumer(write_slot(setup, state, i, NONE), i, phase=DONE, life=NONE)
    elif state.producer.taking == NONE:
        after = write_slot(setup, released(setup, state, i, FETCHED), i, NONE)
        yield with_consumer(after, i, phase=DONE)
