"""The state of a producer's scheduler and worker, and of one consumer that follows its prompt.

All times are abstract, as in `spec/handoff`. A prompt has chunks, each of one block. A block's
content is the chunk that it holds, and the weights that computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from spec.actions import Actions

NONE = -1
CHUNKS = 2
Content = tuple[int, int]
OTHER: Content = (NONE, NONE)
"""The content of a block that belongs to another request: (weights, chunk) otherwise."""

FETCHED, ABORTED = "fetched", "aborted"
WAITING, RUNNING, ENDED = "waiting", "running", "ended"
IDLE, WATCHING, ASKING, FOLLOWING = "idle", "watching", "asking", "following"
COPYING, COPIED, BELIEVED, DONE = "copying", "copied", "believed", "done"


@dataclass(frozen=True)
class Setup:
    """Bounds of one run, and the rule that is missing from it.

    transport: read (the consumer reads the blocks itself) or sent. device: a step is launched, and
    runs later. preemptions: of the prompt, at most. can: faults and events that may happen. mutant:
    the missing rule, "" for the protocol as it is.
    """

    name: str
    can: frozenset[str]
    transport: str = "read"
    device: bool = False
    preemptions: int = 1
    blocks: int = 2
    mutant: str = ""


class Request(NamedTuple):
    """The prefill, as vLLM's scheduler has it. computed: the chunks of all steps so far, done or
    not."""

    status: str = WAITING
    blocks: tuple[int, ...] = ()
    computed: int = 0
    preemptions: int = 0


class Follows(NamedTuple):
    """The scheduler half's own view of a lease that grows (`_GrowingLease`)."""

    preemptions: int
    epoch: int = 0
    told: int = 0
    is_first_step: bool = True


class Message(NamedTuple):
    """A part of a step's work for the workers. kind: grow, anew, grown, stop, unwanted, grant or
    revoke. first: the chunk that the blocks begin with."""

    kind: str
    epoch: int = 0
    tokens: int = 0
    first: int = 0
    blocks: tuple[int, ...] = ()


Writes = tuple[tuple[int, Content], ...]


class Step(NamedTuple):
    """An engine step on its way to the worker. early: vLLM passes the work on before it launches
    the step (it does so if another connector loads in this step), and not after it. part: how many
    of both are done."""

    early: bool
    writes: Writes
    work: tuple[Message, ...]
    part: int = 0


class Lease(NamedTuple):
    """The entry of the lease table. passed: its deadline. is_dropped: it is no longer in the table,
    but a connection still has it in use."""

    blocks: tuple[int, ...]
    epoch: int = 0
    tokens: int = 0
    is_whole: bool = False
    outcome: str = ""
    passed: bool = False
    is_dropped: bool = False


class Producer(NamedTuple):
    """contents: of the blocks. kept: blocks that vLLM keeps for the lease. pending: messages for
    the next step. device: what launched steps still have to write. late: growth that waits for the
    device, each with how many launched steps it waits for. past: the lease table knows that the
    stream has ended, or that nobody wants it. weights: how many resets have succeeded."""

    contents: tuple[Content, ...]
    alive: bool = True
    request: Request = Request()
    follows: Follows | None = None
    is_asked: bool = True
    kept: tuple[int, ...] = ()
    pending: tuple[Message, ...] = ()
    step: Step | None = None
    device: tuple[Writes, ...] = ()
    late: tuple[tuple[int, Message], ...] = ()
    lease: Lease | None = None
    past: bool = False
    weights: int = 0


class Consumer(NamedTuple):
    """connected: its end of the connection exists; session: the producer's end does. using: the
    session has the lease in use; silent: it has heard nothing for as long as it waits. epoch,
    tokens, is_whole: of the producer's last answer. rows: blocks that are still to be copied. seen:
    the chunks that were taken; proven: how many of them a mutant takes for proven. leaving: the
    release by the stream's name is under way."""

    alive: bool = True
    phase: str = IDLE
    connected: bool = False
    session: bool = False
    using: bool = False
    silent: bool = False
    epoch: int = 0
    tokens: int = 0
    is_whole: bool = False
    rows: tuple[int, ...] = ()
    proven: int = 0
    seen: tuple[Content, ...] = ()
    leaving: bool = False
    result: str = ""


class State(NamedTuple):
    """wrong: the rule that the last action broke."""

    producer: Producer
    consumer: Consumer
    wrong: str = ""


def initial(setup: Setup) -> State:
    return State(Producer((OTHER,) * setup.blocks), Consumer())


T = TypeVar("T")


def put(all_: tuple[T, ...], at: int, one: T) -> tuple[T, ...]:
    """The tuple with another value at this place."""
    return (*all_[:at], one, *all_[at + 1 :])


def with_producer(state: State, **changes: Any) -> State:
    return state._replace(producer=state.producer._replace(**changes))


def with_consumer(state: State, **changes: Any) -> State:
    return state._replace(consumer=state.consumer._replace(**changes))


def is_linked(state: State) -> bool:
    """Whether both ends of the connection exist."""
    return state.consumer.connected and state.consumer.session


def free_blocks(producer: Producer) -> list[int]:
    owned = producer.request.blocks + producer.kept
    return [block for block in range(len(producer.contents)) if block not in owned]


Step_ = Callable[[Setup, State], Iterator[State]]

ACTIONS: Actions[Setup, State] = Actions()
"""As in `spec/handoff`."""
