"""Leases: the producer's promise to keep a finished request's blocks.

The scheduler half grants a lease, and each worker rank keeps it here. It ends once: its consumer
releases it, its own engine takes it back, or its deadline passes while no connection uses it. A
consumer may renew it, up to a total life: no wait for blocks is without an end. vLLM gets the
blocks back only through `take_ended`, and never while the lease is in use. Lease numbers ascend
within one life of the worker, so a lease that is not granted yet differs from one that is gone.

All leases that can be acquired are also on the lease board (`one_sided/lease_board.py`), where
consumers on this host read them without asking. Such a reader names the lease in its hazard slot,
and counts as a user of the lease while it does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.errors import LeaseGone
from disagg.transport.deadline import Deadline
from disagg.transport.one_sided.lease_board import LeaseBoard

logger = logging.getLogger(__name__)

FETCHED, ABORTED, TAKEN_BACK = "fetched", "aborted", "taken_back"
_AFTER_LOSS_S = 2.0


@dataclass
class Lease:
    """Blocks of one finished request, group by group in prompt order; -1 for one that was freed
    while the request ran (a sliding window passed it). last: the latest deadline it may have."""

    id: int
    request_id: str
    block_ids: Sequence[int]
    seconds: float
    deadline: float
    last: float
    users: int = 0
    fetched: int = 0
    outcome: str | None = None
    kept_until: float | None = None  # set when it has ended and is still being read


class EndedLease(NamedTuple):
    """A lease whose blocks vLLM may free. outcome: fetched, aborted, taken_back or expired."""

    request_id: str
    outcome: str


class LeaseTable:
    """All leases of one worker rank. Safe for use from any thread. read_limit_s: how long an ended
    lease is kept for a consumer that reads it directly. limit_s: the total life of a lease, however
    often it is renewed."""

    def __init__(
        self,
        read_limit_s: float,
        limit_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_limit_s, self._limit_s, self._clock = read_limit_s, limit_s, clock
        self.board = LeaseBoard()
        self._leases: dict[int, Lease] = {}
        self._highest = -1
        self._changed = threading.Condition()

    def grant(self, lease: int, request_id: str, block_ids: Sequence[int], seconds: float) -> None:
        """Keep these blocks for `seconds` from now, or until released."""
        with self._changed:
            now = self._clock()
            last = now + max(seconds, self._limit_s)
            self._leases[lease] = Lease(lease, request_id, block_ids, seconds, now + seconds, last)
            self._highest = max(self._highest, lease)
            self.board.post(lease, block_ids)
            self._changed.notify_all()

    def was_granted(self, lease: int, seconds: float = 0.0) -> bool:
        """Whether this lease or a later one was granted; waits at most `seconds` for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._highest >= lease, seconds)

    def is_far_ahead(self, lease: int, most: int) -> bool:
        """Whether more than `most` leases will be granted before this one."""
        with self._changed:
            return lease - self._highest > most

    def acquire(self, lease: int, deadline: Deadline) -> Lease:
        """Take a lease into use; `done_using` must follow. Raises `LeaseGone`."""
        with self._changed:
            # The prefill engine's answer may reach the consumer before the grant reaches the
            # workers: by about one engine step, which may be long.
            self._changed.wait_for(lambda: self._highest >= lease, timeout=deadline.left())
            held = self._leases.get(lease)
            if held is None or held.outcome or self._is_over(held):
                raise LeaseGone(f"lease {lease} has ended or never existed")
            held.users += 1
            return held

    def done_using(self, lease: int, *, left: bool = False) -> None:
        """The counterpart of `acquire`. The lease lives on unless it was released.

        left: the user's connection ended before it released the lease. The lease then lives for
        2 s at most, in case the request is retried.
        """
        with self._changed:
            held = self._leases[lease]
            held.users -= 1
            if left:
                self._lost(held)

    def lost_reader(self, lease: int) -> None:
        """As `done_using(left=True)`, for a consumer that was reading directly."""
        with self._changed:
            held = self._leases.get(lease)
            if held is not None:
                self._lost(held)

    def release(self, lease: int, outcome: str, readers: int = 1) -> None:
        """End a lease; does nothing if it is unknown or has ended. Blocks in use stay until unused.

        With outcome "fetched", it ends at the `readers`-th call.
        """
        with self._changed:
            held = self._leases.get(lease)
            if held is None or held.outcome is not None:
                return
            held.fetched += outcome == FETCHED
            if outcome != FETCHED or held.fetched >= readers:
                self._end(held, outcome)

    def revoke(self, below: int) -> None:
        """End all leases with a lower number: their blocks' content is no longer valid."""
        with self._changed:
            for held in self._leases.values():
                if held.id < below and held.outcome is None:
                    self._end(held, ABORTED)

    def take_back(self, leases: Sequence[int]) -> None:
        """End these leases for the good of their own engine. Who reads one now may finish."""
        with self._changed:
            for number in leases:
                held = self._leases.get(number)
                if held is not None and held.outcome is None:
                    self._end(held, TAKEN_BACK)

    def renew(self, leases: Sequence[int]) -> None:
        """Restart the leases' time, up to their total life; ended ones stay ended."""
        asked = set(leases)
        with self._changed:
            now = self._clock()
            # Few are held, however many a peer names.
            for held in [held for held in self._leases.values() if held.id in asked]:
                if not held.outcome and now < held.last and not self._is_over(held):
                    held.deadline = min(now + held.seconds, held.last)
                    held.kept_until = None

    def take_ended(self) -> list[EndedLease]:
        """Remove and return the leases that have ended and are not in use."""
        with self._changed:
            ended = []
            for held in list(self._leases.values()):
                if not self._is_over(held):
                    continue
                self.board.remove(held.id)
                if not self._is_over(held):
                    continue  # a reader had just looked it up
                if held.kept_until is not None and self.board.is_read(held.id):
                    logger.warning(
                        "lease %d: its blocks are freed %.0f s after its end, although a consumer "
                        "still marks them as being read; it has to discard what it read",
                        held.id,
                        self._read_limit_s,
                    )
                ended.append(EndedLease(held.request_id, held.outcome or "expired"))
                del self._leases[held.id]
            return ended

    def held(self) -> int:
        """How many leases keep blocks now."""
        with self._changed:
            return len(self._leases)

    def check_integrity(self) -> None:
        """Assert the invariants."""
        with self._changed:
            for number, held in self._leases.items():
                assert number == held.id <= self._highest
                assert held.users >= 0
            kept = {held.id for held in self._leases.values() if held.outcome is None}
            assert self.board.posted() <= kept

    def _end(self, held: Lease, outcome: str) -> None:
        held.outcome = outcome
        self.board.remove(held.id)

    def _lost(self, held: Lease) -> None:
        held.deadline = min(held.deadline, self._clock() + _AFTER_LOSS_S)

    def _is_over(self, held: Lease) -> bool:
        """Whether it ended or expired, and is not in use."""
        now = self._clock()
        if held.users or (held.outcome is None and now <= held.deadline):
            return False
        if not self.board.is_read(held.id):
            return True
        if held.kept_until is None:
            held.kept_until = now + self._read_limit_s
        return now > held.kept_until
