"""Random walks through the model of leases that grow, beside the code's scheduler half and table.

After each step both must agree: what the workers are told, what the lease table has, and what it
answers a consumer that follows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from unit.connector.handoff.test_block_digests import BLOCK, request
from unit.connector.handoff.test_consumer_scheduler import FACTS
from unit.connector.modelless import PREFILL
from vllm.v1.request import RequestStatus

from disagg.connector.handoff.lease_growth import LeaseGrowth
from disagg.connector.handoff.messages import Grown, StepWork
from disagg.connector.handoff.producer_scheduler import ProducerScheduler
from disagg.connector.handoff.producer_worker import ProducerWorker
from disagg.errors import LeaseGone
from disagg.transport.control.client import Endpoint
from disagg.transport.control.lease import Lease, LeaseTable
from spec.growing import model as growing
from spec.growing.state import (
    ABORTED,
    ASKING,
    CHUNKS,
    COPYING,
    DONE,
    FETCHED,
    FOLLOWING,
    NONE,
    Message,
    Setup,
    State,
    is_linked,
)
from spec.growing.worker import in_table, is_over

STREAM = b"stream"
_CAN = frozenset({"abort", "cut", "consumer dies"})
SETUPS = [
    Setup("read", _CAN),
    Setup("sent", _CAN, transport="sent"),
    Setup("device", _CAN, device=True),
    Setup("shared", _CAN | {"share"}, blocks=3),
    Setup("reset", frozenset({"cut", "reset"})),
    Setup("again", _CAN, preemptions=3, device=True),
]


RARE = {
    "the prefill that is followed is aborted",
    "the producer of a followed prompt is reset",
    "a follower's connection is cut",
    "a follower dies",
}


class Late(LeaseGrowth):
    """Growth that waits until the test lets it go on."""

    def __init__(self, leases: LeaseTable) -> None:
        super().__init__(leases, None)
        self.waiting: list[Grown] = []

    def _extend(self, grown: Sequence[Grown]) -> None:
        self.waiting += [one for one in grown if one.blocks]

    def let_go(self) -> None:
        super()._extend([self.waiting.pop(0)])


class Code:
    """The code's objects, driven by the names of the model's actions."""

    def __init__(self, setup: Setup) -> None:
        self.table = LeaseTable(read_limit_s=1e6, limit_s=1e6, clock=lambda: 0.0)
        self.growth = Late(self.table) if setup.device else LeaseGrowth(self.table, None)
        self.worker = ProducerWorker.__new__(ProducerWorker)  # without a port
        self.worker._leases, self.worker._growth = self.table, self.growth
        facts = replace(FACTS, step_tokens=BLOCK)
        self.half = ProducerScheduler(facts, b"a secret", 1e6)
        self.half.set_workers([Endpoint("127.0.0.1", 1, "life-1")], [1])
        self.half.set_blocks(lambda _: [list(self.blocks)])
        self.request = request(list(range(CHUNKS * BLOCK)))
        self.request.kv_transfer_params = dict(PREFILL)
        self.half.on_prefill(self.request, STREAM)
        self.blocks: tuple[int, ...] = ()
        self.work, self.prompt = StepWork(), b""
        self.held: Lease | None = None
        self.steps: dict[str, Callable[[State, State], None]] = {
            "vLLM schedules a step of the prompt, or of others": self.schedule,
            "a step without the prompt tells the workers how it ended": self.tell,
            "the prefill that is followed ends and is granted its lease": self.finish,
            "the prefill that is followed is aborted": self.abort,
            "the producer of a followed prompt is reset": self.reset,
            "the worker of a followed prompt takes a step's work": self.start,
            "a thread that waited for the device lets a lease grow": self.grow_late,
            "the producer gives the blocks of a lease that grew back": self.take_ended,
            "the deadline of a lease that grew passes": self.deadline_passes,
            "the producer closes the connection of a silent follower, or of one that left": (
                self.session_ends
            ),
            "a follower's connection is cut": self.session_ends,
            "the producer says that a prompt has begun, or never will": self.await_,
            "a consumer begins to follow a prompt, or is refused": self.follow,
            "the producer answers what is new of the prompt": self.proceed,
            "the producer says where the blocks are that are final": self.fetch,
            "the producer answers the release of a lease that grew": self.release,
            "a follower's deadline passes, or its request ends": self.give_up,
            "the release of a stream arrives": self.leave,
        }

    # ---- the producer's scheduler half -----------------------------------------------------

    def schedule(self, before: State, after: State) -> None:
        has, had = after.producer.request, before.producer.request
        is_scheduled = has.computed > had.computed
        self.blocks, self.request.num_preemptions = has.blocks, has.preemptions
        self.request.num_computed_tokens = (has.computed - is_scheduled) * BLOCK
        self._tells([self.request.request_id] if is_scheduled else [], after)
        self.request.num_computed_tokens = has.computed * BLOCK

    def tell(self, before: State, after: State) -> None:
        self._tells([], after)

    def _tells(self, scheduled: Sequence[str], after: State) -> None:
        self.work = StepWork()
        self.half.add_step_work(self.work, scheduled)
        # After a reset, the prompt gets another lease, which nobody follows.
        self.work.grants = [grant for grant in self.work.grants if grant.lease == 0]
        assert after.producer.step is not None
        assert tuple(messages(self.work)) == after.producer.step.work
        for one in self.work.growing:
            self.prompt = one.prompt

    def finish(self, before: State, after: State) -> None:
        self._ends(RequestStatus.FINISHED_LENGTH_CAPPED)

    def abort(self, before: State, after: State) -> None:
        self._ends(RequestStatus.FINISHED_ABORTED)

    def _ends(self, status: RequestStatus) -> None:
        self.request.status = status
        self.half.request_finished(self.request, [list(self.blocks)])

    def reset(self, before: State, after: State) -> None:
        self.half.revoke_all()
        has = after.producer.request
        self.blocks, self.request.num_preemptions = has.blocks, has.preemptions
        self.request.num_computed_tokens = has.computed * BLOCK

    # ---- its worker ------------------------------------------------------------------------

    def start(self, before: State, after: State) -> None:
        self.worker.start(self.work)

    def grow_late(self, before: State, after: State) -> None:
        assert isinstance(self.growth, Late)
        self.growth.let_go()

    def take_ended(self, before: State, after: State) -> None:
        (ended,) = self.worker.take_ended()
        assert ended.request_id == self.request.request_id

    def deadline_passes(self, before: State, after: State) -> None:
        self.table._leases[0].deadline = -math.inf

    def session_ends(self, before: State, after: State) -> None:
        if before.consumer.using:
            self.table.done_using(0, left=True)

    # ---- the consumer ----------------------------------------------------------------------

    def await_(self, before: State, after: State) -> None:
        assert self.table.has_begun(STREAM)
        if after.consumer.phase == ASKING:
            self.table.check_stream(STREAM, self.prompt)
        else:
            with pytest.raises(LeaseGone):
                self.table.check_stream(STREAM, self.prompt)

    def follow(self, before: State, after: State) -> None:
        if after.consumer.phase != FOLLOWING:
            with pytest.raises(LeaseGone):
                self.table.follow(STREAM, self.prompt)
            return
        self.held = self.table.follow(STREAM, self.prompt)
        self._is_answered(NONE, 0, after)

    def proceed(self, before: State, after: State) -> None:
        if not is_linked(before):
            return
        consumer, held = before.consumer, self.held
        assert held is not None
        if after.consumer.phase != DONE:
            self._is_answered(consumer.epoch, consumer.tokens, after)
            return
        with pytest.raises(LeaseGone):
            self.table.progress(held, consumer.epoch, consumer.tokens * BLOCK, 0)
        self.table.done_using(0)

    def _is_answered(self, epoch: int, tokens: int, after: State) -> None:
        assert self.held is not None
        consumer = after.consumer
        answer = self.table.progress(self.held, epoch, tokens * BLOCK, 0)
        assert answer == (consumer.epoch, consumer.tokens * BLOCK, consumer.is_whole)

    def fetch(self, before: State, after: State) -> None:
        if not is_linked(before):
            return
        consumer, held = before.consumer, self.held
        assert held is not None
        final = CHUNKS if consumer.is_whole else consumer.tokens
        rows = held.block_ids[len(consumer.seen) : final]
        assert (NONE in rows) == (after.consumer.phase != COPYING)
        if NONE in rows:
            self._release(ABORTED)
        else:
            assert tuple(rows) == after.consumer.rows

    def release(self, before: State, after: State) -> None:
        if is_linked(before):
            self._release(FETCHED)

    def give_up(self, before: State, after: State) -> None:
        if before.consumer.using and not after.consumer.using:
            self._release(ABORTED)

    def _release(self, outcome: str) -> None:
        self.table.release(0, outcome)
        self.table.done_using(0)

    def leave(self, before: State, after: State) -> None:
        self.table.leave(STREAM)

    # ---- what must agree -------------------------------------------------------------------

    def agrees(self, state: State) -> None:
        self.table.check_integrity()
        assert (STREAM in self.table._past) == state.producer.past
        held, lease = self.table._leases.get(0), in_table(state)
        assert (held is None) == (lease is None)
        if held is None or lease is None:
            return
        assert held.growth is not None
        found = held.growth.epoch, held.growth.tokens, held.growth.is_whole, held.outcome or ""
        assert found == (lease.epoch, lease.tokens * BLOCK, lease.is_whole, lease.outcome)
        assert tuple(held.block_ids) == lease.blocks
        assert held.users == state.consumer.using
        assert self.table.held() == lease.is_whole
        if not (lease.is_whole and is_over(state)):
            assert self.table.take_ended() == []


def messages(work: StepWork) -> Iterator[Message]:
    """A step's work as the model writes it."""
    yield from (Message("grow") for _ in work.growing)
    for grown in work.grown:
        if not grown.blocks:
            yield Message("anew", grown.epoch)
        for first, ids in grown.blocks:
            yield Message("grown", grown.epoch, grown.tokens // BLOCK, first, tuple(ids))
    yield from (Message("unwanted") for _ in work.unwanted)
    yield from (Message("stop") for _ in work.stopped)
    yield from (Message("grant", blocks=tuple(grant.block_ids)) for grant in work.grants)
    yield from (Message("revoke") for _ in range(work.revoked))


def walk(setup: Setup, rng: random.Random, taken: set[str]) -> None:
    model = growing.model(setup)
    state, code = model.initial, Code(setup)
    while True:
        ways = [(action, after) for action in model.actions for after in action.then(state)]
        if not ways:
            return
        weights = [1 if action.by == "time" or action.name in RARE else 9 for action, _ in ways]
        ((action, after),) = rng.choices(ways, weights)
        if action.name in code.steps:
            code.steps[action.name](state, after)
        taken.add(action.name)
        state = after
        code.agrees(state)


def test_the_code_does_as_the_model() -> None:
    taken: set[str] = set()
    for setup in SETUPS:
        for seed in range(150):
            print(setup.name, "seed", seed)
            walk(setup, random.Random(seed), taken)
    assert set(Code(SETUPS[0]).steps) - taken == set()
