"""What a consumer does: one fetch, directly or by asking, and the messages about its lease."""

from __future__ import annotations

from collections.abc import Iterator

from spec.handoff.producer import end, is_in_use, is_over, session_ends
from spec.handoff.state import (
    ABORTED,
    ACQUIRED,
    ACTIONS,
    ASKED_COPIED,
    ASKED_HALF,
    ASKING,
    BELIEVED,
    CANCELLED,
    CONNECTED,
    COPIED,
    DONE,
    FETCHED,
    HALF,
    IDLE,
    LOOKED_UP,
    NAMED,
    NONE,
    NOT_READ,
    QUEUED,
    Row,
    Setup,
    State,
    find,
    for_each_consumer,
    is_connected,
    put,
    with_consumer,
    with_lease,
    with_producer,
)

_FETCH = "disagg.transport.fetch._OneFetch"
_SESSION = "disagg.transport.control.server._Session"
_LEASES = "disagg.transport.control.lease.LeaseTable"
_SCHEDULER = "disagg.connector.handoff.consumer_scheduler.ConsumerScheduler"
_WORKER = "disagg.connector.handoff.consumer_worker.ConsumerWorker"
_BOARD = "disagg.transport.one_sided.lease_board"
_SLOTS = "disagg.transport.one_sided.hazard_pointers"
_COPY = "disagg.transport.one_sided.process_memory._ProcessCache._copy"


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
        yield _computes_locally(state, i, keep=False)
        return
    slot = i
    if setup.one_slot:
        taken = any(other.session and other.slot == 0 for other in state.consumers)
        slot = NONE if taken else 0
    life = state.producer.life
    yield with_consumer(state, i, phase=CONNECTED, life=life, slot=slot, session=True)


# ---- it reads without asking ---------------------------------------------------------------------


def _reads_directly(setup: Setup, state: State, i: int) -> bool:
    """As the first lines of `_OneFetch.read_directly`."""
    consumer = state.consumers[i]
    known = consumer.life == setup.wants[i][0]
    return setup.transport == "direct" and known and consumer.slot != NONE


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
    if state.consumers[i].phase == phase and _reads_directly(setup, state, i):
        after = _write_slot(setup, state, i, setup.wants[i][1])
        yield _begins_read(after, i) if late else with_consumer(after, i, phase=NAMED)


def _write_slot(setup: Setup, state: State, i: int, number: int) -> State:
    """Written into the memory of the life that it is connected to: nobody reads that of a former
    life. A slot that names another lease belongs to another connection, and is not cleared."""
    consumer, producer = state.consumers[i], state.producer
    if not producer.alive or producer.life != consumer.life or consumer.slot == NONE:
        return state
    if number == NONE and producer.slots[consumer.slot] != setup.wants[i][1]:
        return state
    return with_producer(state, slots=put(producer.slots, consumer.slot, number))


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
    if late and not _reads_directly(setup, state, i):
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
    state = _write_slot(setup, state, i, NONE)
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
        yield _copied(state, i, following)


def _copied(state: State, i: int, following: str) -> State:
    consumer = state.consumers[i]
    assert consumer.row is not None
    content = state.producer.blocks[consumer.row.block].content
    return with_consumer(state, i, phase=following, seen=(*consumer.seen, content))


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
        yield _believes(setup, state, i, directly=True)
    else:
        yield _asks_instead(setup, state, i)


def _believes(setup: Setup, state: State, i: int, *, directly: bool = False) -> State:
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
        yield with_consumer(_write_slot(setup, state, i, NONE), i, phase=DONE, life=NONE)
    elif state.producer.taking == NONE:
        after = _write_slot(setup, _released(setup, state, i, FETCHED), i, NONE)
        yield with_consumer(after, i, phase=DONE)


# ---- it asks -------------------------------------------------------------------------------------


def _asks(setup: Setup, state: State, i: int) -> bool:
    phase = state.consumers[i].phase
    return phase == ASKING or (phase == CONNECTED and not _reads_directly(setup, state, i))


@ACTIONS.add(
    "a consumer acquires the lease, or is refused",
    "both",
    f"{_FETCH}.ask",
    f"{_SESSION}._acquire",
    f"{_LEASES}.acquire",
)
@for_each_consumer
def acquire(setup: Setup, state: State, i: int) -> Iterator[State]:
    if not _asks(setup, state, i):
        return
    producer, (life, number) = state.producer, setup.wants[i]
    if not is_connected(state, i):
        yield _computes_locally(state, i, keep=False)
        return
    same_life = producer.life == life or setup.mutant == "acquire ignores the generation"
    if producer.taking != NONE or (same_life and number >= producer.next - len(producer.granting)):
        return  # the producer waits for the lock, or for the grant
    lease = find(producer, number) if same_life else None
    ended = lease is None or bool(lease.outcome) or is_over(setup, state, lease)
    if lease is None or (ended and setup.mutant != "acquire takes ended leases"):
        yield _computes_locally(state, i)
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
        yield _copied(state, i, following)
    else:
        yield _computes_locally(state, i, keep=False)


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
        after = _copied(state, i, following)
        yield after if following == ASKED_HALF else _believes(setup, after, i)
    else:
        yield _computes_locally(state, i, keep=False)


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
        yield _believes(setup, state, i)
    elif not is_connected(state, i):
        yield _computes_locally(state, i, keep=False)
    elif state.producer.taking == NONE:
        after = _believes(setup, _released(setup, state, i, FETCHED), i)
        yield with_consumer(after, i, phase=DONE)


@ACTIONS.add(
    "the producer answers the release, and the answer is lost", "chance", f"{_FETCH}.release"
)
@for_each_consumer
def answer_lost(setup: Setup, state: State, i: int) -> Iterator[State]:
    copied = state.consumers[i].phase == ASKED_COPIED
    if "cut" in setup.can and copied and is_connected(state, i) and state.producer.taking == NONE:
        after = session_ends(_released(setup, state, i, FETCHED), i)
        yield _computes_locally(after, i, keep=False, seen=True)


def _released(setup: Setup, state: State, i: int, outcome: str) -> State:
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
        yield _computes_locally(state, i)
    elif not is_connected(state, i):
        yield _computes_locally(state, i, keep=False)
    elif state.producer.taking == NONE:
        yield _computes_locally(_released(setup, state, i, ABORTED), i)


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
    if phase in (QUEUED, ASKED_COPIED) or sent or _asks(setup, state, i):
        if setup.mutant != "a fetch has no deadline":
            yield _computes_locally(state, i, keep=False)


def _computes_locally(state: State, i: int, *, keep: bool = True, seen: bool = False) -> State:
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


# ---- messages about leases, and death ------------------------------------------------------------


@ACTIONS.add(
    "a renewal arrives",
    "chance",
    f"{_SCHEDULER}._renew_queued",
    f"{_WORKER}._renew_share",
    "disagg.transport.fetch.renew",
    f"{_LEASES}.renew",
)
@for_each_consumer
def renew(setup: Setup, state: State, i: int) -> Iterator[State]:
    """Sent while the request is queued; it may arrive at any time after that."""
    producer, (life, number) = state.producer, setup.wants[i]
    if "renew" not in setup.can or state.consumers[i].phase == IDLE:
        return
    if not producer.alive or producer.life != life or producer.taking != NONE:
        return
    lease = find(producer, number)
    if lease is None or lease.old or not (lease.passed or lease.kept):
        return
    renewed = lease._replace(passed=False, kept=NOT_READ)
    if setup.mutant == "a renewal revives an ended lease" and lease.outcome:
        yield with_lease(state, renewed._replace(outcome=""))._replace(wrong="a lease ends once")
    elif not lease.outcome and not is_over(setup, state, lease):
        yield with_lease(state, renewed)


@ACTIONS.add("a queued request is aborted", "chance", f"{_SCHEDULER}.request_finished")
@for_each_consumer
def cancel(setup: Setup, state: State, i: int) -> Iterator[State]:
    if "cancel" in setup.can and state.consumers[i].phase == QUEUED:
        yield with_consumer(state, i, phase=CANCELLED, result="cancelled")


@ACTIONS.add(
    "the release of an aborted request arrives",
    "chance",
    f"{_WORKER}._release_share",
    "disagg.transport.fetch.release",
    f"{_SESSION}._release",
)
@for_each_consumer
def release_cancelled(setup: Setup, state: State, i: int) -> Iterator[State]:
    """It goes to the address in the ticket, where a later life may listen."""
    producer, (life, number) = state.producer, setup.wants[i]
    if state.consumers[i].phase != CANCELLED or producer.taking != NONE:
        return
    done = with_consumer(state, i, phase=DONE)
    lease = find(producer, number)
    same_life = producer.life == life or setup.mutant == "release ignores the generation"
    if not producer.alive or not same_life or lease is None or lease.outcome:
        yield done
    elif producer.life != life:
        yield end(setup, done, lease, ABORTED)._replace(
            wrong="a message ends leases of its own generation only"
        )
    else:
        yield end(setup, done, lease, ABORTED)


@ACTIONS.add("a consumer dies", "chance")
@for_each_consumer
def consumer_dies(setup: Setup, state: State, i: int) -> Iterator[State]:
    """Its end of the connection is closed; its slot still names the lease."""
    consumer = state.consumers[i]
    if "consumer dies" in setup.can and consumer.phase not in (IDLE, DONE):
        yield with_consumer(state, i, alive=False, phase=DONE, life=NONE, row=None, result="dead")
