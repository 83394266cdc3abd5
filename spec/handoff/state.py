"""The state of a producer's worker and of the consumers that fetch from it.

All times are abstract: a deadline has passed or not, and may pass at any moment. A block's content
is the lease that it was computed for, so content of any other lease, or of none, is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from spec.actions import Actions

NONE = -1
OTHER = (NONE, NONE)
"""The content of a block that belongs to a request without a lease."""

FETCHED, ABORTED, TAKEN_BACK = "fetched", "aborted", "taken_back"
NOT_READ, READ, READ_TOO_LONG = range(3)

# Where a consumer's fetch stands. First the direct way, then the way that asks.
IDLE, QUEUED, CONNECTED = "idle", "queued", "connected"
NAMED, LOOKED_UP, HALF, COPIED = "named", "looked up", "half copied", "copied"
ASKING, ACQUIRED = "asking", "acquired"
ASKED_HALF, ASKED_COPIED = "half copied after asking", "copied after asking"
BELIEVED, CANCELLED, DONE = "believed", "cancelled", "done"


@dataclass(frozen=True)
class Setup:
    """Bounds of one run, and the rule that is missing from it.

    grants: leases granted in each of the producer's lives. wants: per consumer, the lease that it
    fetches: (life, number). readers: how many consumers read one lease. transport: direct (reads
    without asking if it can), asked (reads what it has acquired) or sent. rows: of the lease board.
    one_slot: all connections share one hazard slot, one after the other. can: faults and events
    that may happen. mutant: the missing rule, "" for the protocol as it is.
    """

    name: str
    wants: tuple[tuple[int, int], ...]
    can: frozenset[str]
    grants: tuple[int, ...] = (1,)
    blocks: int = 1
    readers: int = 1
    transport: str = "direct"
    rows: int = 2
    one_slot: bool = False
    mutant: str = ""


class Lease(NamedTuple):
    """An entry of the lease table. passed: its deadline. old: its total life has passed. kept: how
    long it is kept for a direct reader after its end."""

    number: int
    block: int
    passed: bool = False
    old: bool = False
    fetched: int = 0
    outcome: str = ""
    kept: int = NOT_READ


class Row(NamedTuple):
    """A row of the lease board. token: of the producer's life, a part of the row's checksum."""

    number: int
    token: int
    block: int


class Block(NamedTuple):
    """content: the (life, number) that it was computed for. owner: the lease that vLLM keeps it
    for, `NONE` if it is free."""

    content: tuple[int, int] = OTHER
    owner: int = NONE


class Producer(NamedTuple):
    """granting: (number, block) of leases that the scheduler half has granted and the worker does
    not keep yet. slots: the lease that each hazard slot names. taking: the lease that `take_ended`
    has found ended; until it is done it holds the table's lock. off_board: it has removed the
    lease's row. revoking, revoked: the bound of a reset that is under
    way to the worker, and that the worker has executed. reset: 0 none, 1 asked, 2 succeeded."""

    life: int
    alive: bool
    blocks: tuple[Block, ...]
    board: tuple[Row | None, ...]
    slots: tuple[int, ...]
    next: int = 0
    granting: tuple[tuple[int, int], ...] = ()
    leases: tuple[Lease, ...] = ()
    taking: int = NONE
    off_board: bool = False
    revoking: int = 0
    revoked: int = 0
    reset: int = 0


class Consumer(NamedTuple):
    """One fetch. life: of the producer at the other end of its connection, `NONE` without one.
    session: whether the producer's end of the connection exists; using: the lease that it has in
    use. seen: contents of both halves of the block, as copied. result: "" while it waits."""

    alive: bool = True
    phase: str = IDLE
    life: int = NONE
    slot: int = NONE
    session: bool = False
    using: int = NONE
    row: Row | None = None
    seen: tuple[tuple[int, int], ...] = ()
    result: str = ""


class State(NamedTuple):
    """wrong: the rule that the last action broke."""

    producer: Producer
    consumers: tuple[Consumer, ...]
    wrong: str = ""


def newborn(setup: Setup, life: int) -> Producer:
    """A producer's worker at its start."""
    return Producer(
        life=life,
        alive=True,
        blocks=(Block(),) * setup.blocks,
        board=(None,) * setup.rows,
        slots=(NONE,) * (1 if setup.one_slot else len(setup.wants)),
    )


def initial(setup: Setup) -> State:
    return State(newborn(setup, 0), (Consumer(),) * len(setup.wants))


T = TypeVar("T")


def put(all_: tuple[T, ...], at: int, one: T) -> tuple[T, ...]:
    """The tuple with another value at this place."""
    return (*all_[:at], one, *all_[at + 1 :])


def with_producer(state: State, **changes: Any) -> State:
    return state._replace(producer=state.producer._replace(**changes))


def with_consumer(state: State, i: int, **changes: Any) -> State:
    consumer = state.consumers[i]._replace(**changes)
    return state._replace(consumers=put(state.consumers, i, consumer))


def find(producer: Producer, number: int) -> Lease | None:
    return next((lease for lease in producer.leases if lease.number == number), None)


def with_lease(state: State, lease: Lease) -> State:
    """The state in which the table has this entry in place of that with its number."""
    leases = tuple(lease if lease.number == old.number else old for old in state.producer.leases)
    return with_producer(state, leases=leases)


def is_connected(state: State, i: int) -> bool:
    """Whether both ends of a consumer's connection exist."""
    consumer = state.consumers[i]
    return consumer.life != NONE and consumer.session


# ---- how actions are written ---------------------------------------------------------------------

Step = Callable[[Setup, State], Iterator[State]]
ConsumerStep = Callable[[Setup, State, int], Iterator[State]]

ACTIONS: Actions[Setup, State] = Actions()
"""Each is by the producer, by the consumer, by both (a message and its answer), by time (it happens
in the end), or by chance (it need not happen)."""


def for_each_consumer(step: ConsumerStep) -> Step:
    """An action that any consumer which is alive may take."""

    def steps(setup: Setup, state: State) -> Iterator[State]:
        for i, consumer in enumerate(state.consumers):
            if consumer.alive:
                yield from step(setup, state, i)

    return steps
