"""What a consumer does that follows a lease while its prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator

from spec.growing.state import (
    ABORTED,
    ACTIONS,
    ASKING,
    BELIEVED,
    CHUNKS,
    COPIED,
    COPYING,
    DONE,
    FETCHED,
    FOLLOWING,
    IDLE,
    NONE,
    WATCHING,
    Setup,
    State,
    is_linked,
    with_consumer,
)
from spec.growing.worker import in_table, is_over, left, released

_FOLLOW = "disagg.transport.follow"
_SESSION = "disagg.transport.control.server._Session"
_LEASES = "disagg.transport.control.lease.LeaseTable"
_WORKER = "disagg.connector.handoff.consumer_worker.ConsumerWorker"
_FOLLOWER = "disagg.connector.handoff.follower.Follower"
_SCHEDULER = "disagg.connector.handoff.consumer_scheduler.ConsumerScheduler"
_LOAD = "disagg.connector.handoff.growing_load.GrowingLoad"
_WAITS = WATCHING, ASKING, FOLLOWING, COPIED


@ACTIONS.add(
    "a consumer waits for a prompt to begin",
    "chance",
    f"{_SCHEDULER}.on_new_request",
    f"{_WORKER}._watch",
)
def watch(setup: Setup, state: State) -> Iterator[State]:
    """Before its prefill begins, during it, or after it."""
    if state.consumer.phase == IDLE and state.producer.alive:
        yield with_consumer(state, phase=WATCHING)


@ACTIONS.add(
    "the producer says that a prompt has begun, or never will",
    "both",
    f"{_FOLLOW}.awaited",
    f"{_SESSION}._await",
    f"{_LEASES}.has_begun",
    f"{_LEASES}.check_stream",
    f"{_SCHEDULER}.begun",
)
def await_(setup: Setup, state: State) -> Iterator[State]:
    if state.consumer.phase != WATCHING:
        return
    lease = in_table(state)
    if not state.producer.alive:
        yield computes_locally(setup, state)
    elif lease is None and not state.producer.past:
        return  # the consumer asks again
    elif lease is None or lease.outcome or is_over(state):
        yield computes_locally(setup, state)
    else:
        yield with_consumer(state, phase=ASKING)


@ACTIONS.add(
    "a consumer begins to follow a prompt, or is refused",
    "both",
    f"{_SCHEDULER}.after_alloc",
    f"{_FOLLOWER}._begin",
    f"{_FOLLOW}.followed",
    f"{_SESSION}._follow",
    f"{_LEASES}.follow",
)
def follow(setup: Setup, state: State) -> Iterator[State]:
    if state.consumer.phase != ASKING:
        return
    lease = in_table(state)
    if lease is None or lease.outcome or is_over(state):
        yield computes_locally(setup, state)  # also if the producer is dead
    else:
        after = with_consumer(state, phase=FOLLOWING, connected=True, session=True, using=True)
        yield _answered(after, keep=False)


@ACTIONS.add(
    "the producer answers what is new of the prompt",
    "both",
    f"{_FOLLOW}.Followed.proceed",
    f"{_SESSION}._proceed",
    f"{_SESSION}._grown",
    f"{_LEASES}.progress",
    f"{_LOAD}.right",
    f"{_LOAD}.begin_anew",
    f"{_FOLLOWER}._proceed",
    f"{_FOLLOWER}._follow",
)
def proceed(setup: Setup, state: State) -> Iterator[State]:
    """What was fetched before counts from now on, if the epoch is the same."""
    consumer, lease = state.consumer, state.producer.lease
    if consumer.phase != FOLLOWING or consumer.is_whole or _is_news(setup, state):
        return
    if not is_linked(state):
        yield computes_locally(setup, state)
        return
    assert lease is not None
    if lease.outcome:
        yield computes_locally(setup, with_consumer(state, using=False))
        return
    same = lease.epoch == consumer.epoch or setup.mutant == "a new beginning is not noticed"
    after = _answered(state, keep=same)
    if after != state:
        keeps = not setup.hybrid or setup.mutant == "a hybrid model keeps a part of a load"
        yield with_consumer(after, right=len(after.consumer.seen) if keeps else 0)


def _answered(state: State, *, keep: bool) -> State:
    """As `_Session._grown`: the lease's use counts from now on."""
    lease, consumer = state.producer.lease, state.consumer
    assert lease is not None
    return with_consumer(
        state,
        epoch=lease.epoch,
        tokens=lease.tokens,
        is_whole=lease.is_whole,
        silent=False,
        seen=consumer.seen if keep else (),
    )


@ACTIONS.add(
    "a follower asks again although the lease is whole",
    "chance",
    f"{_SESSION}._proceed",
    f"{_SESSION}._grown",
)
def ask_again(setup: Setup, state: State) -> Iterator[State]:
    """None of ours does this. It gains nothing by it."""
    consumer = state.consumer
    if is_linked(state) and consumer.using and consumer.is_whole and consumer.silent:
        prolongs = setup.mutant == "each answer about a whole lease prolongs its use"
        yield with_consumer(state, silent=not prolongs)


# ---- what is fetched -----------------------------------------------------------------------------


def _final(state: State) -> int:
    """How many chunks can be fetched, by the last answer."""
    return CHUNKS if state.consumer.is_whole else state.consumer.tokens


def _is_news(setup: Setup, state: State) -> bool:
    """Whether there is something to fetch."""
    return len(state.consumer.seen) < _final(state)


@ACTIONS.add(
    "the producer says where the blocks are that are final",
    "both",
    f"{_FOLLOW}.Followed.fetch",
    f"{_LOAD}.take",
    f"{_SESSION}._fetch",
)
def fetch(setup: Setup, state: State) -> Iterator[State]:
    consumer, lease = state.consumer, state.producer.lease
    if consumer.phase != FOLLOWING or not _is_news(setup, state):
        return
    if not is_linked(state):
        yield computes_locally(setup, state)
        return
    assert lease is not None
    rows = lease.blocks[len(consumer.seen) : _final(state)]
    if NONE in rows:  # it has begun anew meanwhile
        yield computes_locally(setup, released(state, ABORTED))
    else:
        yield with_consumer(state, phase=COPYING, rows=rows)


@ACTIONS.add(
    "a follower copies a block",
    "consumer",
    f"{_FOLLOW}.Followed.fetch",
    "disagg.transport.fetch.OneFetch.take",
    "disagg.transport.one_sided.process_memory._ProcessCache._copy",
)
def copy(setup: Setup, state: State) -> Iterator[State]:
    """It does not notice that its connection has ended, or that the blocks are another's."""
    if state.consumer.phase == COPYING and setup.transport == "read":
        yield _copied(setup, state) if state.producer.alive else computes_locally(setup, state)


@ACTIONS.add(
    "the producer sends a follower a block",
    "both",
    f"{_FOLLOW}.Followed.fetch",
    "disagg.transport.tcp.tcp.TcpSender.send",
)
def send(setup: Setup, state: State) -> Iterator[State]:
    if state.consumer.phase == COPYING and setup.transport == "sent":
        yield _copied(setup, state) if is_linked(state) else computes_locally(setup, state)


def _copied(setup: Setup, state: State) -> State:
    block, *rows = state.consumer.rows
    seen = (*state.consumer.seen, state.producer.contents[block])
    after = with_consumer(state, rows=tuple(rows), seen=seen)
    return after if rows else _goes_on(setup, with_consumer(after, phase=FOLLOWING))


@ACTIONS.add("a follower has all of a whole lease", "consumer", f"{_FOLLOW}.Followed.end")
def end(setup: Setup, state: State) -> Iterator[State]:
    """All was fetched before the lease was whole."""
    consumer = state.consumer
    if consumer.phase == FOLLOWING and consumer.is_whole and not _is_news(setup, state):
        yield _goes_on(setup, state)


def _goes_on(setup: Setup, state: State) -> State:
    consumer = state.consumer
    if len(consumer.seen) < CHUNKS:
        return state
    if not consumer.is_whole:
        early = setup.mutant == "what is final is believed before the lease is whole"
        return believes(state) if early else state
    unproven = setup.mutant == "the last chunk is believed without the producer's answer"
    if setup.transport == "read" and not unproven:
        return with_consumer(state, phase=COPIED)
    return believes(state)


def believes(state: State) -> State:
    """What was copied counts as the prompt's KV from now on."""
    seen, wrong = state.consumer.seen, state.wrong
    weights = {one for one, _ in seen}
    if [chunk for _, chunk in seen] != list(range(CHUNKS)) or len(weights) > 1:
        wrong = "a believed fetch holds its own prompt's content"
    elif weights != {state.producer.weights}:
        wrong = "after a reset nothing from before is believed"
    return with_consumer(state, phase=BELIEVED, right=0, result="loaded")._replace(wrong=wrong)


# ---- how it ends ---------------------------------------------------------------------------------


@ACTIONS.add(
    "the producer answers the release of a lease that grew",
    "both",
    f"{_FOLLOW}.Followed.end",
    f"{_SESSION}._release",
    f"{_LEASES}.release",
)
def release(setup: Setup, state: State) -> Iterator[State]:
    phase = state.consumer.phase
    if phase == COPIED and not is_linked(state):
        yield computes_locally(setup, state)
    elif phase == COPIED:
        after = believes(released(state, FETCHED))
        yield with_consumer(after, phase=DONE, connected=False, session=False)
    elif phase == BELIEVED:
        after = released(state, FETCHED) if is_linked(state) else state
        yield with_consumer(after, phase=DONE, connected=False)


@ACTIONS.add(
    "a follower's deadline passes, or its request ends",
    "time",
    f"{_WORKER}._watch",
    f"{_FOLLOWER}._proceed",
    f"{_FOLLOWER}.not_right",
    f"{_FOLLOW}.Followed.give_up",
)
def give_up(setup: Setup, state: State) -> Iterator[State]:
    """It releases the lease if it can, and closes the connection otherwise."""
    phase = state.consumer.phase
    if setup.mutant == "a follower has no deadline" or phase not in _WAITS:
        if phase != COPYING or setup.transport == "read":
            return
    yield computes_locally(setup, state)
    if is_linked(state) and state.consumer.using and phase != COPYING:
        yield computes_locally(setup, released(state, ABORTED))


def computes_locally(setup: Setup, state: State) -> State:
    """The whole prompt, or what is not known to be right if a load breaks off."""
    consumer, wrong = state.consumer, state.wrong
    right = consumer.right
    if setup.mutant == "what was fetched after the last answer is kept":
        right = len(consumer.seen)
    kept = consumer.seen[:right]
    weights = {one for one, _ in kept}
    if [chunk for _, chunk in kept] != list(range(len(kept))) or len(weights) > 1:
        wrong = "what is kept of a load that breaks off holds its own prompt's content"
    return _left_behind(state, "local")._replace(wrong=wrong)


def _left_behind(state: State, result: str) -> State:
    """The release by the stream's name is sent. It may never arrive."""
    lease, past = state.producer.lease, state.producer.past
    changes_something = not past and (lease is None or not lease.outcome)
    return with_consumer(
        state,
        phase=DONE,
        result=result,
        connected=False,
        leaving=changes_something,
        epoch=0,
        tokens=0,
        is_whole=False,
        rows=(),
        seen=(),
        right=0,
    )


@ACTIONS.add(
    "the release of a stream arrives",
    "chance",
    f"{_SCHEDULER}.request_finished",
    f"{_WORKER}._release",
    f"{_SESSION}._release",
    f"{_LEASES}.leave",
)
def leave(setup: Setup, state: State) -> Iterator[State]:
    if state.consumer.leaving and state.producer.alive:
        yield with_consumer(left(state), leaving=False)


@ACTIONS.add("a follower dies", "chance")
def consumer_dies(setup: Setup, state: State) -> Iterator[State]:
    consumer = state.consumer
    if "consumer dies" in setup.can and consumer.alive and consumer.phase not in (IDLE, DONE):
        gone = _left_behind(state, "dead")
        yield with_consumer(gone, alive=False, leaving=False)
