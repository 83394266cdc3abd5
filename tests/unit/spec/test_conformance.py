"""Random walks through the model, beside the code's lease table, lease board and hazard slots.

After each step both must agree: which leases are held, which are on the board, which are named by a
slot, how they ended, and what each call answers. The steps of `take_ended` are taken together here.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable

from disagg.errors import LeaseGone
from disagg.transport.base import LeaseEntry
from disagg.transport.control.lease import LeaseTable
from disagg.transport.deadline import Deadline
from disagg.transport.host.process_vm import peek
from disagg.transport.one_sided import lease_board
from disagg.transport.one_sided.hazard_pointers import RemoteHazardPointers
from spec.checker import Action
from spec.handoff import model as handoff
from spec.handoff.producer import is_over
from spec.handoff.state import ABORTED, ACQUIRED, BELIEVED, FETCHED, LOOKED_UP, NONE, Setup, State

_CAN = frozenset({"renew", "cut", "consumer dies", "cancel", "copy fails", "reset", "take back"})
# One lease at a time, since one call of `take_ended` takes all that have ended.
SETUPS = [
    Setup("twice", ((0, 0), (0, 0)), _CAN),
    Setup("readers", ((0, 0), (0, 0)), _CAN, readers=2),
    Setup("reused", ((0, 0), (0, 1)), _CAN, grants=(2,)),
    Setup("asked", ((0, 0), (0, 1)), _CAN, grants=(2,), transport="asked"),
]


class Code:
    """The code's objects, driven by the names of the model's actions."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.table = setup, LeaseTable(read_limit_s=1e6, limit_s=1e6)
        board = self.table.board
        assert board.hazards is not None
        self.pid = os.getpid()
        self.slots = RemoteHazardPointers(self.pid, board.hazards.fd, board.token)
        self.slot: dict[int, int] = {}
        self.naming = [contextlib.ExitStack() for _ in setup.wants]
        self.entries: dict[int, LeaseEntry] = {}
        self.steps: dict[str, Callable[[int, State, State], None]] = {
            "the worker keeps new leases and executes a reset": self.start_step,
            "the producer looks at the slots again, and gives the blocks back": self.take_ended,
            "a stuck producer takes back a lease": self.take_back,
            "a lease's deadline passes": self.deadline_passes,
            "a lease's total life passes": self.life_passes,
            "an ended lease was kept for its reader long enough": self.read_limit_passes,
            "a consumer connects": self.connect,
            "a consumer names the lease in its hazard slot": self.name_lease,
            "a consumer looks the lease up on the board": self.look_up,
            "a consumer looks at the row again": self.look_again,
            "a consumer reports the load, then releases the lease": self.release_fetched,
            "a consumer acquires the lease, or is refused": self.acquire,
            "the producer answers the release: the consumer believes what it read": (
                self.release_fetched
            ),
            "the producer answers the release, and the answer is lost": self.answer_lost,
            "a copy fails: the consumer releases the lease": self.release_aborted,
            "a renewal arrives": self.renew,
            "the release of an aborted request arrives": self.release_cancelled,
            "the producer notices that a consumer closed its connection": self.session_ends,
            "a consumer uses a lease for too long: its connection is closed": self.session_ends,
            "a connection is cut, and the producer notices it first": self.session_ends,
        }

    def peek(self, at: int, length: int) -> bytes:
        return peek(self.pid, at, length)

    def number(self, i: int) -> int:
        return self.setup.wants[i][1]

    # ---- the producer ----------------------------------------------------------------------

    def start_step(self, i: int, before: State, after: State) -> None:
        for number, block in before.producer.granting:
            self.table.grant(number, f"request {number}", [block], 1e6)
        if before.producer.revoking:
            self.table.revoke(before.producer.revoking)

    def take_ended(self, i: int, before: State, after: State) -> None:
        taken = [one.request_id for one in self.table.take_ended()]
        assert taken == [f"request {before.producer.taking}"]

    def deadline_passes(self, i: int, before: State, after: State) -> None:
        for lease in after.producer.leases:
            if lease.passed:
                self.table._leases[lease.number].deadline = -math.inf

    def life_passes(self, i: int, before: State, after: State) -> None:
        for lease in after.producer.leases:
            if lease.old:
                self.table._leases[lease.number].last = -math.inf

    def take_back(self, i: int, before: State, after: State) -> None:
        self.table.take_back([lease.number for lease in after.producer.leases])

    def read_limit_passes(self, i: int, before: State, after: State) -> None:
        for lease in after.producer.leases:
            self.table._leases[lease.number].kept_until = -math.inf

    def session_ends(self, i: int, before: State, after: State) -> None:
        if before.consumers[i].using != NONE:
            self.table.done_using(self.number(i), left=True)
        reading = self.table.board.give_back(self.slot[i])
        if reading is not None:
            self.table.lost_reader(reading)

    # ---- a consumer ------------------------------------------------------------------------

    def connect(self, i: int, before: State, after: State) -> None:
        self.slot[i] = self.table.board.take_slot()

    def name_lease(self, i: int, before: State, after: State) -> None:
        self.naming[i].enter_context(self.slots.naming(self.slot[i], self.number(i)))

    def look_up(self, i: int, before: State, after: State) -> None:
        board = self.table.board
        entry = lease_board.look_up(self.peek, board.address, board.token, self.number(i))
        row = after.consumers[i].row
        assert (after.consumers[i].phase == LOOKED_UP) == (entry is not None)
        if entry is None or row is None:
            self.naming[i].close()
        else:
            assert entry.block_ids == [row.block]
            self.entries[i] = entry

    def look_again(self, i: int, before: State, after: State) -> None:
        there = lease_board.still_there(self.peek, self.entries[i])
        assert there == (after.consumers[i].phase == BELIEVED)
        if not there:
            self.naming[i].close()

    def acquire(self, i: int, before: State, after: State) -> None:
        if before.consumers[i].session:
            try:
                lease = self.table.acquire(self.number(i), Deadline.after(10))
            except LeaseGone:
                assert after.consumers[i].phase != ACQUIRED
            else:
                row = after.consumers[i].row
                assert row is not None
                assert lease.block_ids == [row.block]

    def release_fetched(self, i: int, before: State, after: State) -> None:
        self._release(i, before, FETCHED)

    def release_aborted(self, i: int, before: State, after: State) -> None:
        self._release(i, before, ABORTED)

    def answer_lost(self, i: int, before: State, after: State) -> None:
        self._release(i, before, FETCHED)
        self.session_ends(i, after, after)

    def _release(self, i: int, before: State, outcome: str) -> None:
        if before.consumers[i].session:
            self.table.release(self.number(i), outcome, self.setup.readers)
            if before.consumers[i].using != NONE:
                self.table.done_using(self.number(i))
        self.naming[i].close()

    def release_cancelled(self, i: int, before: State, after: State) -> None:
        self.table.release(self.number(i), ABORTED)

    def renew(self, i: int, before: State, after: State) -> None:
        self.table.renew([self.number(i)])

    # ---- what must agree -------------------------------------------------------------------

    def agrees(self, state: State) -> None:
        table, producer = self.table, state.producer
        table.check_integrity()
        held = {number: lease.outcome or "" for number, lease in table._leases.items()}
        assert held == {lease.number: lease.outcome for lease in producer.leases}
        assert table.board.posted() == {row.number for row in producer.board if row}
        for number in range(producer.next):
            assert table.board.is_read(number) == (number in producer.slots)
        for lease in producer.leases:
            users = [one for one in state.consumers if one.session and one.using == lease.number]
            assert table._leases[lease.number].users == len(users)
        if not any(is_over(self.setup, state, lease) for lease in producer.leases):
            assert table.take_ended() == []


def walk(setup: Setup, rng: random.Random, count: set[str]) -> None:
    model = handoff.model(setup)
    state, code = model.initial, Code(setup)
    while True:
        ways = [(action, after) for action in model.actions for after in action.then(state)]
        if state.producer.taking != NONE:
            ways = [(action, after) for action, after in ways if is_taking(action)]
        if not ways:
            return
        weights = [1 if action.by in ("time", "chance") else 8 for action, _ in ways]
        ((action, after),) = rng.choices(ways, weights)
        changed = [i for i, one in enumerate(after.consumers) if one != state.consumers[i]] or [
            renewing(action, state)
        ]
        if action.name in code.steps:
            code.steps[action.name](changed[0], state, after)
        count.add(action.name)
        state = after
        if state.producer.taking == NONE:
            code.agrees(state)


def is_taking(action: Action[State]) -> bool:
    return action.name in (
        "the producer takes an ended lease off the board",
        "the producer looks at the slots again, and gives the blocks back",
    )


def renewing(action: Action[State], state: State) -> int:
    """A step that changes no consumer concerns the only lease that there is."""
    numbers = [lease.number for lease in state.producer.leases]
    return max(numbers, default=0)


def test_the_code_does_as_the_model() -> None:
    taken: set[str] = set()
    for setup in SETUPS:
        for seed in range(300):
            print(setup.name, "seed", seed)
            walk(setup, random.Random(seed), taken)
    assert taken >= set(Code(SETUPS[0]).steps)
