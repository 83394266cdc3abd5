"""Rules of handoffs, each broken by a patch: random handoffs must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.connector.handoff import block_digests, producer_worker
from disagg.connector.handoff.consumer_worker import ConsumerWorker
from disagg.connector.handoff.growing_leases import GrowingLeases
from disagg.connector.handoff.messages import LoadReport, StepWork
from disagg.connector.handoff.stall import StallWatch
from disagg.transport import protocol as p
from disagg.transport import shared_storage
from disagg.transport.control.lease import Lease, LeaseTable
from disagg.transport.control.server import _Session
from disagg.transport.deadline import Deadline
from disagg.transport.follow import Followed
from disagg.transport.one_sided.remote_lease_board import BoardCache

Break = Callable[[pytest.MonkeyPatch], None]


def _instead(home: Any, name: str, otherwise: Any) -> Break:
    return lambda patch: patch.setattr(home, name, otherwise)


def _frees_for_nobody(self: LeaseTable, held: Lease) -> bool:
    return held.outcome is not None or self._clock() > held.deadline


class _Once:
    """A queue that takes one report of each request."""

    def __init__(self) -> None:
        self._queue, self._seen = SimpleQueue[LoadReport](), set[str]()
        self.empty, self.get_nowait = self._queue.empty, self._queue.get_nowait

    def put(self, report: LoadReport) -> None:
        if report.request_id not in self._seen:
            self._seen.add(report.request_id)
            self._queue.put(report)


def _reports_what_still_runs(patch: pytest.MonkeyPatch) -> None:
    """A cancelled load is reported at once: vLLM frees its blocks while they are filled."""
    init, start = ConsumerWorker.__init__, ConsumerWorker.start

    def made(self: Any, *args: Any) -> None:
        init(self, *args)
        self._ended = _Once()

    def started(self: ConsumerWorker, work: StepWork) -> None:
        start(self, work)
        for request_id in work.cancels:
            if request_id in self._cancelled:
                self._ended.put(LoadReport(request_id, "aborted", "none", 0, 0.0))

    patch.setattr(ConsumerWorker, "__init__", made)
    patch.setattr(ConsumerWorker, "start", started)


def _keeps_cancelled(self: ConsumerWorker) -> list[LoadReport]:
    """A load that was cancelled and yet came counts as loaded."""
    reports = []
    while not self._ended.empty():
        reports.append(self._ended.get_nowait())
        self._cancelled.pop(reports[-1].request_id)
    return reports


def _forgets_the_user(self: _Session, *, left: bool = False) -> None:
    staged, self._staged = self._staged, []
    for sender, answer in staged:
        sender.finish(answer)
    if not left and self._lease is not None:
        self._server._leases.done_using(self._lease.id)
    self._lease = self._until = None


def _keeps_staged(self: _Session, *, left: bool = False) -> None:
    self._staged = []
    lease, self._lease, self._until = self._lease, None, None
    if lease is not None:
        self._server._leases.done_using(lease.id, left=left)


def _shares_everything(ours: bytes, theirs: bytes, num_tokens: int, block_size: int) -> int:
    return num_tokens


def _believes_what_it_has(self: Followed, seconds: float, deadline: Deadline) -> bool:
    message = p.Proceed(self.grown.epoch, self.grown.tokens, seconds)
    self.grown = self._connection.ask(message, p.Grown, deadline)
    return True


def _says_what_the_step_will_compute(patch: pytest.MonkeyPatch) -> None:
    """Blocks count before the step that fills them has run."""
    step = GrowingLeases.step

    def hasty(self: GrowingLeases, scheduled: Any, blocks: Any, next_number: Any) -> None:
        step(self, scheduled, blocks, next_number)
        running = [one.request for one in self._leases.values()]
        coming = {one.request_id: scheduled.get(one.request_id, 0) for one in running}
        for request in running:
            request.num_computed_tokens += coming[request.request_id]
        step(self, scheduled, blocks, next_number)
        for request in running:
            request.num_computed_tokens -= coming[request.request_id]

    patch.setattr(GrowingLeases, "step", hasty)


def _forgets_that_it_began_anew(self: LeaseTable, lease: int, epoch: int) -> None:
    held = self._leases.get(lease)
    if held is not None and held.growth is not None:
        held.growth.epoch = epoch  # and keeps its blocks


@dataclass(frozen=True)
class Rule:
    """broken_by: a patch. noticed: how random handoffs notice it, a regular expression. seeds: of
    the episodes, one of which notices it."""

    broken_by: Break
    noticed: str
    seeds: Sequence[int] = range(100, 160)


_WRONG = "is wrong|wrong KV|was answered"

RULES = {
    "blocks are kept for those who read them": Rule(
        _instead(LeaseTable, "_is_over", _frees_for_nobody), _WRONG
    ),
    "the board is looked at again after a copy": Rule(
        _instead(BoardCache, "still_there", lambda self, entry: True), _WRONG
    ),
    "a reset ends all leases": Rule(
        _instead(LeaseTable, "revoke", lambda self, below: None), "which ended|is wrong|not reset"
    ),
    "each life has a generation of its own": Rule(
        _instead(producer_worker, "random", SimpleNamespace(token_hex=lambda length: "the same")),
        f"which ended|{_WRONG}",
    ),
    "a cancelled load is reported when it has ended": Rule(_reports_what_still_runs, _WRONG),
    "a cancelled load counts as aborted": Rule(
        _instead(ConsumerWorker, "take_ended", _keeps_cancelled), f"counts as loaded|{_WRONG}"
    ),
    "blocks are loaded as far as the digests agree": Rule(
        _instead(block_digests, "shared_tokens", _shares_everything), _WRONG
    ),
    "a file's checksum is compared": Rule(
        _instead(shared_storage, "hmac", SimpleNamespace(compare_digest=lambda one, other: True)),
        _WRONG,
    ),
    "a connection that ends uses no lease": Rule(
        _instead(_Session, "_give_back", _forgets_the_user), "left behind|nobody answers|not reset"
    ),
    "what was staged is dropped": Rule(
        _instead(_Session, "_give_back", _keeps_staged), "left behind: .*staged for"
    ),
    "what was fetched of a prompt that began anew counts for nothing": Rule(
        _instead(Followed, "proceed", _believes_what_it_has), _WRONG
    ),
    "a lease that begins anew has no blocks": Rule(
        _instead(LeaseTable, "begin_anew", _forgets_that_it_began_anew), _WRONG
    ),
    "blocks count when the step that fills them is over": Rule(
        _says_what_the_step_will_compute, _WRONG
    ),
    "an engine that stands still takes a lease back": Rule(
        _instead(StallWatch, "stands_still", lambda self, *, works: False),
        "nobody answers|do not go on",
        # Of small engines that wait for each other: time does not pass, and leases are long.
        (460, 10394),
    ),
}
"""What each rule says, what breaks it, and how that shows."""
