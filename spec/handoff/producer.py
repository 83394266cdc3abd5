"""What the producer does: its scheduler half, its worker with the lease table, and its death."""

from __future__ import annotations

from collections.abc import Iterator

from spec.handoff.state import (
    ABORTED,
    ACTIONS,
    FETCHED,
    HALF,
    IDLE,
    LOOKED_UP,
    NONE,
    NOT_READ,
    OTHER,
    QUEUED,
    READ,
    READ_TOO_LONG,
    TAKEN_BACK,
    Block,
    Lease,
    Row,
    Setup,
    State,
    find,
    put,
    with_consumer,
    with_lease,
    with_producer,
)

_LEASES = "disagg.transport.control.lease.LeaseTable"
_BOARD = "disagg.transport.one_sided.lease_board.LeaseBoard"
_SCHEDULER = "disagg.connector.handoff.producer_scheduler.ProducerScheduler"
_WORKER = "disagg.connector.handoff.producer_worker.ProducerWorker"
_SESSION = "disagg.transport.control.server._Session"


# ---- the scheduler half, and vLLM ----------------------------------------------------------------


@ACTIONS.add("a prefill ends and is granted a lease", "chance", f"{_SCHEDULER}.request_finished")
def prefill(setup: Setup, state: State) -> Iterator[State]:
    """vLLM gives a free block to a request and computes it. The ticket overtakes the grant."""
    producer = state.producer
    if not producer.alive or producer.next >= setup.grants[producer.life]:
        return
    number = producer.next
    reused = setup.mutant == "numbers are reused"
    for at, block in enumerate(producer.blocks):
        if block.owner != NONE:
            continue
        key = (producer.life, number)
        after = with_producer(
            state,
            next=number + 1,
            blocks=put(producer.blocks, at, Block(key, 0 if reused else number)),
            granting=(*producer.granting, (0 if reused else number, at)),
        )
        for i, consumer in enumerate(state.consumers):
            if setup.wants[i] == key and consumer.alive and consumer.phase == IDLE:
                after = with_consumer(after, i, phase=QUEUED)
        yield after


@ACTIONS.add(
    "vLLM writes another request's KV into a free block",
    "chance",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots",
)
def reuse(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    for at, block in enumerate(producer.blocks):
        if producer.alive and block.owner == NONE and block.content != OTHER:
            yield with_producer(state, blocks=put(producer.blocks, at, Block()))


@ACTIONS.add("the producer is asked for a reset", "chance", f"{_SCHEDULER}.revoke_all")
def ask_for_reset(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    if "reset" in setup.can and producer.alive and producer.next and not producer.reset:
        yield with_producer(state, reset=1, revoking=producer.next)


@ACTIONS.add(
    "the reset succeeds, as no block is held",
    "chance",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.reset_prefix_cache",
)
def reset_succeeds(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    free = all(block.owner == NONE for block in producer.blocks)
    if producer.alive and producer.reset == 1 and not producer.revoking and free:
        yield with_producer(state, reset=2)


# ---- the worker's lease table --------------------------------------------------------------------


@ACTIONS.add(
    "the worker keeps new leases and executes a reset",
    "producer",
    f"{_WORKER}.start",
    f"{_SCHEDULER}.add_step_work",
    f"{_LEASES}.grant",
    f"{_LEASES}.revoke",
    f"{_BOARD}.post",
)
def start_step(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    if producer.taking != NONE or not (producer.granting or producer.revoking):
        return
    if setup.mutant == "a reset comes before the step's grants":
        yield _grant(setup, _revoke(setup, state))
    else:
        yield _revoke(setup, _grant(setup, state))


def _grant(setup: Setup, state: State) -> State:
    producer = state.producer
    leases, board = producer.leases, producer.board
    for number, block in producer.granting:
        leases = (*leases, Lease(number, block))
        board = put(board, number % setup.rows, Row(number, producer.life, block))
    return with_producer(state, granting=(), leases=leases, board=board)


def _revoke(setup: Setup, state: State) -> State:
    bound = state.producer.revoking
    if not bound:
        return state
    for lease in state.producer.leases:
        if lease.number < bound and not lease.outcome and setup.mutant != "a reset ends no lease":
            state = end(setup, state, lease, ABORTED)
    return with_producer(state, revoking=0, revoked=bound)


@ACTIONS.add(
    "a stuck producer takes back a lease",
    "chance",
    f"{_WORKER}.start",
    f"{_LEASES}.take_back",
)
def take_back(setup: Setup, state: State) -> Iterator[State]:
    """`spec/engines` says when. Safety does not depend on it, so here it may happen at any time,
    also to a lease that is read."""
    if "take back" not in setup.can or state.producer.taking != NONE:
        return
    for lease in state.producer.leases:
        if not lease.outcome:
            yield end(setup, state, lease, TAKEN_BACK)


def end(setup: Setup, state: State, lease: Lease, outcome: str) -> State:
    """As `LeaseTable._end`. It must never happen twice."""
    state = with_lease(state, lease._replace(outcome=outcome))
    if lease.outcome:
        return state._replace(wrong="a lease ends once")
    if outcome == FETCHED and _complete_reads(setup, state, lease.number) < setup.readers:
        return state._replace(wrong="a lease is fetched when all of its readers have read it")
    if setup.mutant == "an ended lease stays on the board":
        return state
    return remove_row(setup, state, lease.number)


def _complete_reads(setup: Setup, state: State, number: int) -> int:
    lease = (state.producer.life, number)
    read = zip(state.consumers, setup.wants, strict=True)
    return sum(wants == lease and len(consumer.seen) == 2 for consumer, wants in read)


def remove_row(setup: Setup, state: State, number: int) -> State:
    """As `LeaseBoard.remove`."""
    board, at = state.producer.board, number % setup.rows
    row = board[at]
    if row is not None and row.number == number:
        return with_producer(state, board=put(board, at, None))
    return state


def is_in_use(state: State, number: int) -> bool:
    """Whether a connection has acquired the lease."""
    return any(consumer.session and consumer.using == number for consumer in state.consumers)


def is_over(setup: Setup, state: State, lease: Lease) -> bool:
    """As `LeaseTable._is_over`."""
    return _is_unused(setup, state, lease) and (
        lease.kept == READ_TOO_LONG
        or lease.number not in state.producer.slots
        or setup.mutant == "hazard slots are not looked at"
    )


def _is_unused(setup: Setup, state: State, lease: Lease) -> bool:
    """Whether it has ended or expired, and no connection has acquired it."""
    ended = bool(lease.outcome) or lease.passed
    return ended and (setup.mutant == "leases expire in use" or not is_in_use(state, lease.number))


@ACTIONS.add(
    "the producer keeps an ended lease for its direct reader",
    "producer",
    f"{_LEASES}._is_over",
    f"{_BOARD}.is_read",
    "disagg.transport.one_sided.hazard_pointers.HazardPointers.names",
)
def keep_for_reader(setup: Setup, state: State) -> Iterator[State]:
    for lease in state.producer.leases if state.producer.taking == NONE else ():
        if _is_unused(setup, state, lease) and not is_over(setup, state, lease):
            if lease.kept == NOT_READ:
                yield with_lease(state, lease._replace(kept=READ))


@ACTIONS.add("the producer finds an ended lease", "producer", f"{_LEASES}.take_ended")
def find_ended(setup: Setup, state: State) -> Iterator[State]:
    for lease in state.producer.leases if state.producer.taking == NONE else ():
        if is_over(setup, state, lease):
            yield with_producer(state, taking=lease.number)


@ACTIONS.add(
    "the producer takes an ended lease off the board",
    "producer",
    f"{_LEASES}.take_ended",
    f"{_BOARD}.remove",
)
def take_off_board(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    if producer.taking == NONE or producer.off_board:
        return
    lease = find(producer, producer.taking)
    if setup.mutant == "blocks go back before the row is removed" and lease is not None:
        yield _free(setup, state, lease)
    elif lease is None:  # of that mutant, too
        yield with_producer(remove_row(setup, state, producer.taking), taking=NONE)
    else:
        yield with_producer(remove_row(setup, state, producer.taking), off_board=True)


@ACTIONS.add(
    "the producer looks at the slots again, and gives the blocks back",
    "producer",
    f"{_LEASES}.take_ended",
    f"{_BOARD}.is_read",
    f"{_WORKER}.take_ended",
)
def give_back_blocks(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    lease = find(producer, producer.taking)
    if not producer.off_board or lease is None:
        return
    after = with_producer(state, taking=NONE, off_board=False)
    if is_over(setup, state, lease) or setup.mutant == "slots are looked at once":
        after = _free(setup, after, lease)
    yield after


def _free(setup: Setup, state: State, lease: Lease) -> State:
    producer = state.producer
    wrong = state.wrong
    if producer.blocks[lease.block].owner != lease.number:
        wrong = "a block is given back once, by its owner"
    if is_in_use(state, lease.number):
        wrong = "no block is freed while a connection has its lease in use"
    if lease.kept != READ_TOO_LONG and not setup.one_slot:
        for consumer, wants in zip(state.consumers, setup.wants, strict=True):
            reads = wants == (producer.life, lease.number) and consumer.session
            if reads and consumer.alive and consumer.phase in (LOOKED_UP, HALF):
                wrong = "no direct read overlaps a free, within the limit"
    after = with_producer(
        state,
        blocks=put(producer.blocks, lease.block, producer.blocks[lease.block]._replace(owner=NONE)),
        leases=tuple(other for other in producer.leases if other is not lease),
    )
    return after._replace(wrong=wrong)


# ---- time ----------------------------------------------------------------------------------------


@ACTIONS.add("a lease's deadline passes", "time", f"{_LEASES}._is_over")
def deadline_passes(setup: Setup, state: State) -> Iterator[State]:
    for lease in state.producer.leases:
        if not lease.passed:
            yield with_lease(state, lease._replace(passed=True))


@ACTIONS.add("a lease's total life passes", "time", f"{_LEASES}.renew")
def life_passes(setup: Setup, state: State) -> Iterator[State]:
    for lease in state.producer.leases:
        if not lease.old and "renew" in setup.can:
            if setup.mutant != "renewals have no limit":
                yield with_lease(state, lease._replace(old=True))


@ACTIONS.add("an ended lease was kept for its reader long enough", "time", f"{_LEASES}._is_over")
def read_limit_passes(setup: Setup, state: State) -> Iterator[State]:
    for lease in state.producer.leases:
        if lease.kept == READ and setup.mutant != "direct reads have no limit":
            yield with_lease(state, lease._replace(kept=READ_TOO_LONG))
