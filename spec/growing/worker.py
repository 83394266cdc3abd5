"""What the producer's worker does: its steps, its device, its lease table, and its death."""

from __future__ import annotations

from collections.abc import Iterator

from spec.growing.state import (
    ABORTED,
    ACTIONS,
    CHUNKS,
    NONE,
    Lease,
    Message,
    Producer,
    Setup,
    State,
    Writes,
    put,
    with_consumer,
    with_producer,
)

_LEASES = "disagg.transport.control.lease.LeaseTable"
_WORKER = "disagg.connector.handoff.producer_worker.ProducerWorker"
_GROWTH = "disagg.connector.handoff.lease_growth.LeaseGrowth"
_SESSION = "disagg.transport.control.server._Session"
_NO_BLOCKS = (NONE,) * CHUNKS


# ---- steps ---------------------------------------------------------------------------------------


@ACTIONS.add(
    "the worker runs or launches a step",
    "producer",
    "vllm.v1.worker.gpu_worker.Worker.execute_model",
)
def run(setup: Setup, state: State) -> Iterator[State]:
    """On a CPU, a step is done when it returns."""
    producer = state.producer
    step = producer.step
    if not producer.alive or step is None or step.part != int(step.early):
        return
    after = _step_goes_on(state)
    if not step.writes:
        yield after
    elif setup.device:
        yield with_producer(after, device=(*producer.device, step.writes))
    else:
        yield with_producer(after, contents=_written(producer, step.writes))


@ACTIONS.add(
    "the worker of a followed prompt takes a step's work",
    "producer",
    f"{_WORKER}.start",
    f"{_GROWTH}.add",
    f"{_LEASES}.grow",
    f"{_LEASES}.begin_anew",
    f"{_LEASES}.stop",
    f"{_LEASES}.grant",
    f"{_LEASES}.revoke",
)
def start(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    step = producer.step
    if not producer.alive or step is None or step.part != int(not step.early):
        return
    after = _step_goes_on(state)
    for message in step.work:
        waits = message.kind == "grown" or (
            message.kind == "anew" and setup.mutant == "a new beginning waits for the device"
        )
        if waits and setup.device and setup.mutant != "growth does not wait for the device":
            late = (*after.producer.late, (len(after.producer.device), message))
            after = with_producer(after, late=late)
        else:
            after = obeyed(setup, after, message)
    yield after


def _step_goes_on(state: State) -> State:
    step = state.producer.step
    assert step is not None
    return with_producer(state, step=step._replace(part=1) if step.part == 0 else None)


def _written(producer: Producer, writes: Writes) -> tuple[tuple[int, int], ...]:
    contents = producer.contents
    for block, content in writes:
        contents = put(contents, block, content)
    return contents


@ACTIONS.add("the device ends a step", "producer")
def device_ends(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    if producer.alive and producer.device:
        first, *rest = producer.device
        late = tuple((max(0, ahead - 1), message) for ahead, message in producer.late)
        yield with_producer(
            state, contents=_written(producer, first), device=tuple(rest), late=late
        )


@ACTIONS.add(
    "a thread that waited for the device lets a lease grow",
    "producer",
    f"{_GROWTH}._run",
    f"{_LEASES}.extend",
)
def grow_late(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    if producer.alive and producer.late and producer.late[0][0] == 0:
        after = with_producer(state, late=producer.late[1:])
        yield obeyed(setup, after, producer.late[0][1])


# ---- the lease table -----------------------------------------------------------------------------


def obeyed(setup: Setup, state: State, message: Message) -> State:
    """What a message does to the lease table."""
    lease = in_table(state)
    if message.kind == "grow":
        outcome = ABORTED if state.producer.past else ""
        return with_producer(state, lease=Lease(_NO_BLOCKS, outcome=outcome))
    if message.kind == "unwanted":
        return left(state)
    if message.kind == "grant":
        assert lease is not None
        assert not lease.is_whole
    if lease is None or lease.is_whole:
        return _revoked(state, lease) if message.kind == "revoke" else state
    if message.kind == "anew":
        lease = Lease(_NO_BLOCKS, message.epoch, outcome=lease.outcome)
    elif message.kind == "grown":
        if lease.epoch == message.epoch or setup.mutant == "stale growth counts":
            blocks = lease.blocks
            for at, block in enumerate(message.blocks, message.first):
                blocks = put(blocks, at, block)
            lease = lease._replace(blocks=blocks, tokens=message.tokens)
    elif message.kind == "grant":
        lease = lease._replace(blocks=message.blocks, is_whole=True)
    elif message.kind in ("stop", "revoke"):
        return dropped(with_producer(state, lease=lease._replace(outcome=ABORTED)))
    return with_producer(state, lease=lease)


def _revoked(state: State, lease: Lease | None) -> State:
    if lease is None or lease.outcome:
        return state
    return with_producer(state, lease=lease._replace(outcome=ABORTED))


def in_table(state: State) -> Lease | None:
    lease = state.producer.lease
    return None if lease is None or lease.is_dropped else lease


def dropped(state: State) -> State:
    """As `LeaseTable._drop`."""
    lease = state.producer.lease
    assert lease is not None
    kept = lease._replace(is_dropped=True) if state.consumer.using else None
    return with_producer(state, lease=kept, past=True)


def left(state: State) -> State:
    """As `LeaseTable.leave`."""
    lease = in_table(state)
    if lease is None:
        return with_producer(state, past=True)
    if lease.outcome:
        return state
    return with_producer(state, lease=lease._replace(outcome=ABORTED))


def released(state: State, outcome: str) -> State:
    """As `LeaseTable.release`, and the session's use of the lease ends."""
    lease = in_table(state)
    if lease is not None and not lease.outcome:
        outcome = outcome if lease.is_whole else ABORTED
        state = with_producer(state, lease=lease._replace(outcome=outcome))
    return use_ends(state)


def use_ends(state: State) -> State:
    """As `LeaseTable.done_using`."""
    lease = state.producer.lease
    if lease is not None and lease.is_dropped:
        state = with_producer(state, lease=None)
    return with_consumer(state, using=False, silent=False)


def is_over(state: State) -> bool:
    """As `LeaseTable._is_over`."""
    lease = in_table(state)
    return lease is not None and (bool(lease.outcome) or lease.passed) and not state.consumer.using


@ACTIONS.add(
    "the producer gives the blocks of a lease that grew back",
    "producer",
    f"{_LEASES}.take_ended",
    f"{_WORKER}.take_ended",
)
def take_ended(setup: Setup, state: State) -> Iterator[State]:
    lease = in_table(state)
    if state.producer.alive and lease is not None and lease.is_whole and is_over(state):
        yield with_producer(dropped(state), kept=())


@ACTIONS.add("the deadline of a lease that grew passes", "time", f"{_LEASES}._is_over")
def deadline_passes(setup: Setup, state: State) -> Iterator[State]:
    lease = in_table(state)
    if state.producer.alive and lease is not None and lease.is_whole and not lease.passed:
        yield with_producer(state, lease=lease._replace(passed=True))


# ---- connections ---------------------------------------------------------------------------------


def session_ends(state: State) -> State:
    """The producer's end of the connection ends. The consumer may not know it yet."""
    state = use_ends(state) if state.consumer.using else state
    return with_consumer(state, session=False, silent=False)


@ACTIONS.add("a follower is silent for as long as the producer waits", "time", f"{_SESSION}._next")
def falls_silent(setup: Setup, state: State) -> Iterator[State]:
    if state.consumer.using and not state.consumer.silent:
        yield with_consumer(state, silent=True)


@ACTIONS.add(
    "the producer closes the connection of a silent follower, or of one that left",
    "producer",
    f"{_SESSION}.run",
    f"{_SESSION}._give_back",
    f"{_LEASES}.done_using",
)
def notice(setup: Setup, state: State) -> Iterator[State]:
    consumer = state.consumer
    if consumer.session and (consumer.silent or not consumer.connected):
        yield session_ends(state)


@ACTIONS.add("a follower's connection is cut", "chance", f"{_SESSION}.run")
def cut(setup: Setup, state: State) -> Iterator[State]:
    if "cut" in setup.can and state.consumer.session:
        yield session_ends(state)


@ACTIONS.add("the producer of a followed prompt dies", "chance")
def die(setup: Setup, state: State) -> Iterator[State]:
    """Its memory is gone with it."""
    if "producer dies" in setup.can and state.producer.alive:
        dead = Producer(state.producer.contents, alive=False)
        after = session_ends(state)._replace(producer=dead)
        yield after
