"""Leases: the producer's promise to keep a request's blocks.

The scheduler half grants a lease, and each worker rank keeps it here. It ends once: its consumer
releases it, its own engine takes it back, or its deadline passes while no connection uses it. A
consumer may renew it, up to a total life: no wait for blocks is without an end. vLLM gets the
blocks back only through `take_ended`, and never while the lease is in use. Lease numbers ascend
within one life of the worker, so a lease that is not granted yet differs from one that is gone.

A lease may grow: it begins with the first step of its prompt, and each step adds the blocks that
are final. Until it is granted it keeps no blocks, as they are the running request's. What was read
of it counts only if it is still there afterwards, in the same epoch (`Growth`).

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

from disagg.errors import LeaseGone, TransferError
from disagg.transport.deadline import Deadline
from disagg.transport.one_sided.lease_board import LeaseBoard

logger = logging.getLogger(__name__)

FETCHED, ABORTED, TAKEN_BACK = "fetched", "aborted", "taken_back"
_AFTER_LOSS_S = 2.0
_MOST_STREAMS = 4096


@dataclass
class Growth:
    """How far the prompt of a growing lease is. stream: the name that its consumer knows it by.
    prompt: a digest of the whole prompt. epoch: how often its request began anew, after it had lost
    its blocks. tokens: those whose blocks are final. is_whole: the lease is granted."""

    stream: bytes
    prompt: bytes
    epoch: int = 0
    tokens: int = 0
    is_whole: bool = False


class Progress(NamedTuple):
    """A growing lease at one moment; see `Growth`."""

    epoch: int
    tokens: int
    is_whole: bool


@dataclass
class Lease:
    """Blocks of one request, group by group in prompt order; -1 for one that was freed while the
    request ran (a sliding window passed it), or that is not final yet. last: the latest deadline it
    may have."""

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
    growth: Growth | None = None

    @property
    def grows(self) -> bool:
        """Whether it keeps no blocks yet, as its request runs."""
        return self.growth is not None and not self.growth.is_whole


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
        self._streams: dict[bytes, Lease] = {}
        self._past: dict[bytes, None] = {}  # streams that ended, or that nobody wants
        self._queued: dict[bytes, None] = {}  # streams of prompts that wait for their first step
        self._highest = -1
        self._changed = threading.Condition()

    def grant(self, lease: int, request_id: str, block_ids: Sequence[int], seconds: float) -> None:
        """Keep these blocks for `seconds` from now, or until released. Ends a lease's growth."""
        with self._changed:
            now = self._clock()
            last = now + max(seconds, self._limit_s)
            held = self._leases.get(lease)
            if held is None:
                held = Lease(lease, request_id, block_ids, seconds, now + seconds, last)
                self._leases[lease] = held
            else:
                assert held.growth is not None
                held.block_ids, held.seconds = block_ids, seconds
                held.deadline, held.last = now + seconds, last
                held.growth.is_whole = True
            self._highest = max(self._highest, lease)
            if held.outcome is None:
                self.board.post(lease, block_ids)
            self._changed.notify_all()

    def was_granted(self, lease: int, seconds: float = 0.0) -> bool:
        """Whether this lease or a later one was granted; waits at most `seconds` for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_granted(lease), seconds)

    def _is_granted(self, lease: int) -> bool:
        held = self._leases.get(lease)
        return self._highest >= lease and (held is None or not held.grows)

    def is_far_ahead(self, lease: int, most: int) -> bool:
        """Whether more than `most` leases will be granted before this one."""
        with self._changed:
            return lease - self._highest > most

    def acquire(self, lease: int, deadline: Deadline) -> Lease:
        """Take a lease into use; `done_using` must follow. Raises `LeaseGone`."""
        with self._changed:
            # The prefill engine's answer may reach the consumer before the grant reaches the
            # workers: by about one engine step, which may be long.
            self._changed.wait_for(lambda: self._is_granted(lease), timeout=deadline.left())
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
            held = self._leases.get(lease)
            if held is None:
                return  # it grew, and its request has ended
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
            if held.grows:
                outcome = ABORTED  # what is not whole cannot have been fetched
            held.fetched += outcome == FETCHED
            if outcome != FETCHED or held.fetched >= readers:
                self._end(held, outcome)

    def revoke(self, below: int) -> None:
        """End all leases with a lower number: their blocks' content is no longer valid."""
        with self._changed:
            for held in self._leases.values():
                if held.id < below and held.outcome is None:
                    self._end(held, ABORTED)
            self._drop_ungranted([held for held in self._leases.values() if held.id < below])

    def take_back(self, leases: Sequence[int]) -> None:
        """End these leases for the good of their own engine. Who reads one now may finish."""
        with self._changed:
            for number in leases:
                held = self._leases.get(number)
                if held is not None and held.outcome is None:
                    self._end(held, TAKEN_BACK)

    def renew(self, leases: Sequence[int], streams: Sequence[bytes] = ()) -> None:
        """Restart the leases' time, up to their total life; ended ones stay ended."""
        asked, named = set(leases), set(streams)
        with self._changed:
            now = self._clock()
            # Few are held, however many a peer names.
            for held in self._leases.values():
                if held.grows or not (held.id in asked or _stream(held) in named):
                    continue
                if not held.outcome and now < held.last and not self._is_over(held):
                    held.deadline = min(now + held.seconds, held.last)
                    held.kept_until = None

    def take_ended(self) -> list[EndedLease]:
        """Remove and return the leases that have ended and are not in use."""
        with self._changed:
            ended = []
            for held in list(self._leases.values()):
                if held.grows or not self._is_over(held):
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
                self._drop(held)
            return ended

    # ---- while a prompt is computed ------------------------------------------------------------

    def queue(self, stream: bytes) -> None:
        """The prompt's request has come, and waits for its first step."""
        with self._changed:
            if stream not in self._past:
                _remember(self._queued, stream)

    def is_queued(self, stream: bytes) -> bool:
        """Whether the prompt's request has come, and its first step has not."""
        with self._changed:
            return stream in self._queued

    def grow(self, lease: int, request_id: str, stream: bytes, prompt: bytes, blocks: int) -> None:
        """Begin a lease of so many blocks, none of them final. `grant` or `stop` must follow. If
        there is such a stream already, this lease does not grow, and `grant` begins it."""
        with self._changed:
            self._queued.pop(stream, None)
            if stream in self._streams:
                return
            growth, none = Growth(stream, prompt), [-1] * blocks
            held = Lease(lease, request_id, none, math.inf, math.inf, math.inf, growth=growth)
            self._leases[lease] = self._streams[stream] = held
            if stream in self._past:
                held.outcome = ABORTED
            self._changed.notify_all()

    def extend(
        self, lease: int, epoch: int, blocks: Sequence[tuple[int, Sequence[int]]], tokens: int
    ) -> None:
        """More of a growing lease is final. blocks: (position of the first, ids). tokens: in all.
        Does nothing if the lease has begun anew since that epoch."""
        with self._changed:
            held = self._leases.get(lease)
            if held is None or not held.grows:
                return
            assert held.growth is not None
            assert isinstance(held.block_ids, list)
            if held.growth.epoch != epoch:
                return
            for first, ids in blocks:
                held.block_ids[first : first + len(ids)] = ids
            held.growth.tokens = tokens
            self._changed.notify_all()

    def begin_anew(self, lease: int, epoch: int) -> None:
        """The request of a growing lease has lost its blocks, and will compute its prompt again."""
        with self._changed:
            held = self._leases.get(lease)
            if held is None or not held.grows:
                return
            assert held.growth is not None
            held.block_ids = [-1] * len(held.block_ids)
            held.growth.epoch, held.growth.tokens = epoch, 0
            self._changed.notify_all()

    def stop(self, lease: int) -> None:
        """The request of a growing lease ends without a grant."""
        with self._changed:
            held = self._leases.get(lease)
            if held is None or not held.grows:
                return
            if held.outcome is None:
                self._end(held, ABORTED)
            self._drop_ungranted([held])

    def has_begun(self, stream: bytes, seconds: float = 0.0) -> bool:
        """Whether this stream's lease has begun, or never will; waits at most `seconds` for it."""
        with self._changed:
            known = self._streams, self._past
            return self._changed.wait_for(lambda: any(stream in one for one in known), seconds)

    def check_stream(self, stream: bytes, prompt: bytes) -> Lease:
        """The lease of a stream that has begun. Raises `LeaseGone`, and `TransferError` if it is
        another prompt's."""
        with self._changed:
            held = self._streams.get(stream)
            if held is None or held.outcome or self._is_over(held):
                raise LeaseGone("the stream has ended or never existed")
            assert held.growth is not None
            if held.growth.prompt != prompt:
                raise TransferError("the stream is another prompt's", reason="prompt_mismatch")
            return held

    def follow(self, stream: bytes, prompt: bytes) -> Lease:
        """Take the lease of a stream into use, as `acquire`. Raises as `check_stream`."""
        with self._changed:
            held = self.check_stream(stream, prompt)
            held.users += 1
            return held

    def progress(self, held: Lease, epoch: int, tokens: int, seconds: float) -> Progress:
        """How far a lease in use is, as soon as it is further than so many tokens of this epoch;
        waits at most `seconds` for that. Raises `LeaseGone` if its request has ended."""
        growth = held.growth
        assert growth is not None

        def is_news() -> bool:
            known = (growth.epoch, growth.tokens) == (epoch, tokens)
            return held.outcome is not None or growth.is_whole or not known

        with self._changed:
            self._changed.wait_for(is_news, seconds)
            if held.outcome is not None:
                raise LeaseGone("the prompt's request has ended, or its lease was given up")
            return Progress(growth.epoch, growth.tokens, growth.is_whole)

    def leave(self, stream: bytes) -> None:
        """Nobody will fetch this stream, whether it has begun or not."""
        with self._changed:
            held = self._streams.get(stream)
            if held is None:
                self._is_past(stream)
            elif held.outcome is None:
                self._end(held, ABORTED)

    def _drop_ungranted(self, leases: Sequence[Lease]) -> None:
        for held in leases:
            if held.grows:
                self._drop(held)

    def _drop(self, held: Lease) -> None:
        del self._leases[held.id]
        stream = _stream(held)
        if stream is not None:
            self._streams.pop(stream, None)
            self._is_past(stream)

    def _is_past(self, stream: bytes) -> None:
        self._queued.pop(stream, None)
        _remember(self._past, stream)
        self._changed.notify_all()

    # ---- all leases ----------------------------------------------------------------------------

    def held(self) -> int:
        """How many leases keep blocks now."""
        with self._changed:
            return sum(not held.grows for held in self._leases.values())

    def check_integrity(self) -> None:
        """Assert the invariants."""
        with self._changed:
            for number, held in self._leases.items():
                assert number == held.id
                assert held.grows or number <= self._highest
                assert held.users >= 0
                assert held.growth is None or self._streams[held.growth.stream] is held
            kept = {held.id for held in self._leases.values() if held.outcome is None}
            assert self.board.posted() <= kept

    def _end(self, held: Lease, outcome: str) -> None:
        held.outcome = outcome
        self.board.remove(held.id)
        self._changed.notify_all()

    def _lost(self, held: Lease) -> None:
        if not held.grows:
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


def _remember(streams: dict[bytes, None], stream: bytes) -> None:
    """The oldest are forgotten."""
    streams[stream] = None
    if len(streams) > _MOST_STREAMS:
        del streams[next(iter(streams))]


def _stream(held: Lease) -> bytes | None:
    return None if held.growth is None else held.growth.stream
