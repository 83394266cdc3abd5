"""Parts that both ways of a fetch share."""

from __future__ import annotations

from spec.handoff.producer import end
from spec.handoff.state import (
    ASKING,
    BELIEVED,
    CONNECTED,
    DONE,
    FETCHED,
    NONE,
    Setup,
    State,
    find,
    put,
    with_consumer,
    with_lease,
    with_producer,
)


def reads_directly(setup: Setup, state: State, i: int) -> bool:
    """As the first lines of `OneFetch.read_directly`."""
    consumer = state.consumers[i]
    known = consumer.life == setup.wants[i][0]
    return setup.transport == "direct" and known and consumer.slot != NONE


def write_slot(setup: Setup, state: State, i: int, number: int) -> State:
    """Written into the memory of the life that it is connected to: nobody reads that of a former
    life. A slot that names another lease belongs to another connection, and is not cleared."""
    consumer, producer = state.consumers[i], state.producer
    if not producer.alive or producer.life != consumer.life or consumer.slot == NONE:
        return state
    if number == NONE and producer.slots[consumer.slot] != setup.wants[i][1]:
        return state
    return with_producer(state, slots=put(producer.slots, consumer.slot, number))


def asks(setup: Setup, state: State, i: int) -> bool:
    phase = state.consumers[i].phase
    return phase == ASKING or (phase == CONNECTED and not reads_directly(setup, state, i))


def copied(state: State, i: int, following: str) -> State:
    consumer = state.consumers[i]
    assert consumer.row is not None
    content = state.producer.blocks[consumer.row.block].content
    return with_consumer(state, i, phase=following, seen=(*consumer.seen, content))


def believes(setup: Setup, state: State, i: int, *, directly: bool = False) -> State:
    """What was copied counts as the prompt's KV from now on."""
    life, number = setup.wants[i]
    producer = state.producer
    wrong = state.wrong
    revoked = producer.life == life and number < producer.revoked
    if revoked and (directly or producer.reset == 2):
        wrong = "after a reset nothing from before is believed"
    if state.consumers[i].seen != ((life, number),) * 2:
        wrong = "a believed fetch holds its own prompt's content"
    return with_consumer(state, i, phase=BELIEVED, result="loaded")._replace(wrong=wrong)


def released(setup: Setup, state: State, i: int, outcome: str) -> State:
    """As `LeaseTable.release`, and the session's use of the lease ends."""
    lease = find(state.producer, setup.wants[i][1])
    if lease is not None and not lease.outcome:
        count = lease.fetched + (outcome == FETCHED)
        readers = 1 if setup.mutant == "one reader of several ends the lease" else setup.readers
        lease = lease._replace(fetched=count)
        if outcome != FETCHED or count >= readers:
            state = end(setup, state, lease, outcome)
        else:
            state = with_lease(state, lease)
    return with_consumer(state, i, using=NONE)


def computes_locally(state: State, i: int, *, keep: bool = True, seen: bool = False) -> State:
    """keep: whether the connection returns to the pool; else it is closed."""
    consumer = state.consumers[i]
    return with_consumer(
        state,
        i,
        phase=DONE,
        result="local",
        life=consumer.life if keep else NONE,
        row=None,
        seen=consumer.seen if seen else (),
    )
