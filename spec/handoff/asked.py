"""A fetch that asks the producer for the lease, then reads it or is sent it."""

from __future__ import annotations

from collections.abc import Iterator

from spec.handoff.connections import session_ends
from spec.handoff.fetch import (
    asks,
    believes,
    computes_locally,
    copied,
    released,
)
from spec.handoff.producer import is_in_use, is_over
from spec.handoff.state import (
    ABORTED,
    ACQUIRED,
    ACTIONS,
    ASKED_COPIED,
    ASKED_HALF,
    DONE,
    FETCHED,
    NONE,
    QUEUED,
    Row,
    Setup,
    State,
    find,
    for_each_consumer,
    is_connected,
    with_consumer,
)

_FETCH = "disagg.transport.fetch.OneFetch"
_SESSION = "disagg.transport.control.server._Session"
_LEASES = "disagg.transport.control.lease.LeaseTable"
_WORKER = "disagg.connector.handoff.consumer_worker.ConsumerWorker"
_COPY = "disagg.transport.one_sided.process_memory._ProcessCache._copy"


@ACTIONS.add(
    "a consumer acquires the lease, or is refused",
    "both",
    f"{_FETCH}.ask",
    f"{_SESSION}._acquire",
    f"{_LEASES}.acquire",
)
@for_each_consumer
def acquire(setup: Setup, state: State, i: int) -> Iterator[State]:
    if not asks(setup, state, i):
        return
    producer, (life, number) = state.producer, setup.wants[i]
    if not is_connected(state, i):
        yield computes_locally(state, i, keep=False)
        return
    same_life = producer.life == life or setup.mutant == "acquire ignores the generation"
    if producer.taking != NONE or (same_life and number >= producer.next - len(producer.granting)):
        return  # the producer waits for the lock, or for the grant
    lease = find(producer, number) if same_life else None
    ended = lease is None or bool(lease.outcome) or is_over(setup, state, lease)
    if lease is None or (ended and setup.mutant != "acquire takes ended leases"):
        yield computes_locally(state, i)
        return
    row = Row(number, producer.life, lease.block)
    after = with_consumer(state, i, phase=ACQUIRED, using=number, row=row)
    if producer.life == life and number < producer.revoked:
        after = after._replace(wrong="after a reset nothing from before is believed")
    if lease.outcome or (lease.passed and not is_in_use(state, number) and ended):
        after = after._replace(wrong="an ended lease is never acquired")
    yield after


@ACTIONS.add(
    "a consumer that has acquired the lease copies one half of the block",
    "consumer",
    _COPY,
    "disagg.transport.one_sided.remote_lease_board.BoardCache.receive",
)
@for_each_consumer
def copy_acquired(setup: Setup, state: State, i: int) -> Iterator[State]:
    consumer = state.consumers[i]
    following = {ACQUIRED: ASKED_HALF, ASKED_HALF: ASKED_COPIED}.get(consumer.phase)
    if following is None or setup.transport == "sent":
        return
    if state.producer.alive:
        yield copied(state, i, following)
    else:
        yield computes_locally(state, i, keep=False)


@ACTIONS.add(
    "the producer sends one half of the block",
    "both",
    "disagg.transport.tcp.tcp.TcpSender.send",
    "disagg.transport.tcp.tcp.TcpSender.finish",
    f"{_FETCH}._receive",
)
@for_each_consumer
def send_half(setup: Setup, state: State, i: int) -> Iterator[State]:
    """The session ends only after its sender has left the cache, so no session, no sender."""
    consumer = state.consumers[i]
    following = {ACQUIRED: ASKED_HALF, ASKED_HALF: ASKED_COPIED}.get(consumer.phase)
    if following is None or setup.transport != "sent":
        return
    stays = setup.mutant == "a lease's use ends before the sender has left the cache"
    if state.producer.alive and (is_connected(state, i) or stays):
        after = copied(state, i, following)
        yield after if following == ASKED_HALF else believes(setup, after, i)
    else:
        yield computes_locally(state, i, keep=False)


@ACTIONS.add(
    "the producer answers the release: the consumer believes what it read",
    "both",
    f"{_FETCH}.release",
    f"{_SESSION}._release",
    f"{_LEASES}.release",
)
@for_each_consumer
def release_answered(setup: Setup, state: State, i: int) -> Iterator[State]:
    if state.consumers[i].phase != ASKED_COPIED:
        return
    if setup.mutant == "a read is believed without the producer's answer":
        yield believes(setup, state, i)
    elif not is_connected(state, i):
        yield computes_locally(state, i, keep=False)
    elif state.producer.taking == NONE:
        after = believes(setup, released(setup, state, i, FETCHED), i)
        yield with_consumer(after, i, phase=DONE)


@ACTIONS.add(
    "the producer answers the release, and the answer is lost", "chance", f"{_FETCH}.release"
)
@for_each_consumer
def answer_lost(setup: Setup, state: State, i: int) -> Iterator[State]:
    copied = state.consumers[i].phase == ASKED_COPIED
    if "cut" in setup.can and copied and is_connected(state, i) and state.producer.taking == NONE:
        after = session_ends(released(setup, state, i, FETCHED), i)
        yield computes_locally(after, i, keep=False, seen=True)


@ACTIONS.add(
    "a copy fails: the consumer releases the lease",
    "chance",
    f"{_FETCH}.ask",
    "disagg.transport.control.client.Connection.exchange",
    "disagg.transport.control.client.Peers._put_back",
)
@for_each_consumer
def copy_fails(setup: Setup, state: State, i: int) -> Iterator[State]:
    if "copy fails" not in setup.can or state.consumers[i].phase not in (ACQUIRED, ASKED_HALF):
        return
    if setup.mutant == "a connection with a lease in use returns to the pool":
        yield computes_locally(state, i)
    elif not is_connected(state, i):
        yield computes_locally(state, i, keep=False)
    elif state.producer.taking == NONE:
        yield computes_locally(released(setup, state, i, ABORTED), i)


@ACTIONS.add(
    "the load's deadline passes: the consumer closes the connection",
    "time",
    "disagg.transport.deadline.Deadline.left",
    f"{_WORKER}._start_loads",
)
@for_each_consumer
def give_up(setup: Setup, state: State, i: int) -> Iterator[State]:
    phase = state.consumers[i].phase
    sent = setup.transport == "sent" and phase in (ACQUIRED, ASKED_HALF)
    if phase in (QUEUED, ASKED_COPIED) or sent or asks(setup, state, i):
        if setup.mutant != "a fetch has no deadline":
            yield computes_locally(state, i, keep=False)
