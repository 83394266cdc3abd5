"""How connections begin and end, and the death of either side."""

from __future__ import annotations

from collections.abc import Iterator

from spec.handoff.fetch import computes_locally
from spec.handoff.state import (
    ACTIONS,
    CONNECTED,
    DONE,
    IDLE,
    NONE,
    QUEUED,
    Consumer,
    Producer,
    Setup,
    State,
    for_each_consumer,
    newborn,
    put,
    with_consumer,
    with_producer,
)

_SESSION = "disagg.transport.control.server._Session"
_LEASES = "disagg.transport.control.lease.LeaseTable"
_WORKER = "disagg.connector.handoff.consumer_worker.ConsumerWorker"
_SLOTS = "disagg.transport.one_sided.hazard_pointers"


@ACTIONS.add(
    "a consumer connects",
    "consumer",
    f"{_WORKER}._load",
    "disagg.transport.control.client.Peers.connection",
    f"{_SESSION}._hello",
    f"{_SLOTS}.HazardPointers.take",
)
@for_each_consumer
def connect(setup: Setup, state: State, i: int) -> Iterator[State]:
    if state.consumers[i].phase != QUEUED:
        return
    if not state.producer.alive:
        yield computes_locally(state, i, keep=False)
        return
    slot = i
    if setup.one_slot:
        taken = any(other.session and other.slot == 0 for other in state.consumers)
        slot = NONE if taken else 0
    life = state.producer.life
    yield with_consumer(state, i, phase=CONNECTED, life=life, slot=slot, session=True)


@ACTIONS.add(
    "the producer notices that a consumer closed its connection",
    "producer",
    f"{_SESSION}.run",
    f"{_SESSION}._give_back",
    f"{_SESSION}._give_back_slot",
    f"{_LEASES}.done_using",
    f"{_LEASES}.lost_reader",
    "disagg.transport.one_sided.hazard_pointers.HazardPointers.give_back",
)
def notice_closed(setup: Setup, state: State) -> Iterator[State]:
    for i, consumer in enumerate(state.consumers):
        if consumer.session and consumer.life == NONE and state.producer.taking == NONE:
            yield session_ends(state, i)


@ACTIONS.add(
    "a consumer uses a lease for too long: its connection is closed",
    "time",
    "disagg.transport.control.server._Session._next",
)
def use_limit_passes(setup: Setup, state: State) -> Iterator[State]:
    for i, consumer in enumerate(state.consumers):
        if consumer.using != NONE and state.producer.taking == NONE:
            if setup.mutant != "the use of a lease has no limit":
                yield session_ends(state, i)


@ACTIONS.add(
    "a connection is cut, and the producer notices it first",
    "chance",
    "disagg.transport.control.listener.Listener._cut_resting",
    f"{_SESSION}.run",
)
def cut(setup: Setup, state: State) -> Iterator[State]:
    for i, consumer in enumerate(state.consumers):
        if "cut" in setup.can and consumer.session and state.producer.taking == NONE:
            yield session_ends(state, i)


def session_ends(state: State, i: int) -> State:
    """The producer's end of a connection ends. The consumer may not know it yet."""
    slot = state.consumers[i].slot
    if slot != NONE:
        state = with_producer(state, slots=put(state.producer.slots, slot, NONE))
    return with_consumer(state, i, session=False, using=NONE)


@ACTIONS.add("the producer dies", "chance")
def die(setup: Setup, state: State) -> Iterator[State]:
    if "producer dies" in setup.can and state.producer.alive:
        dead: Producer = newborn(setup, state.producer.life)._replace(alive=False)
        ended: tuple[Consumer, ...] = tuple(
            consumer._replace(session=False, using=NONE) for consumer in state.consumers
        )
        yield State(dead, ended, state.wrong)


@ACTIONS.add(
    "the producer starts again, on its old port and pid",
    "chance",
    "disagg.connector.handoff.producer_worker.ProducerWorker.__init__",
)
def start_again(setup: Setup, state: State) -> Iterator[State]:
    """The worst case: the new process also has its cache and its board at the old addresses."""
    if not state.producer.alive and state.producer.life + 1 < len(setup.grants):
        yield state._replace(producer=newborn(setup, state.producer.life + 1))


@ACTIONS.add("a consumer dies", "chance")
@for_each_consumer
def consumer_dies(setup: Setup, state: State, i: int) -> Iterator[State]:
    """Its end of the connection is closed; its slot still names the lease."""
    consumer = state.consumers[i]
    if "consumer dies" in setup.can and consumer.phase not in (IDLE, DONE):
        yield with_consumer(state, i, alive=False, phase=DONE, life=NONE, row=None, result="dead")
