"""Loads that follow a prompt which prefill still computes, on one worker rank.

A load fetches what is final, then asks for news, again and again. What came counts when an answer
of the producer says so (`transport/follow.py`). Runs in the loads' threads; no wait in it is
without a deadline.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from disagg.connector.handoff.growing_load import Chunk, GrowingLoad, Leases, whole
from disagg.connector.handoff.load_trace import LoadTrace
from disagg.connector.handoff.messages import HandoffLoad
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.errors import LeaseGone
from disagg.transport.base import FetchJob, Receiver
from disagg.transport.blocks import Selection
from disagg.transport.control.client import Endpoint, Peers
from disagg.transport.deadline import Deadline, Event
from disagg.transport.fetch import FetchRequest, Moved
from disagg.transport.follow import Followed, Stream, awaited, followed

# How often a load that waits for news looks whether its request has ended.
NEWS_S = 0.05
_ANSWER_S = 5.0
# How long a load waits for a prompt that began anew to get on.
_ANEW_S = 2.0

T = TypeVar("T")
Fetches = Callable[[HandoffLoad, Chunk], Iterator[tuple[FetchRequest, Selection]]]
"""The fetches of a chunk: one per producer rank."""


class LoadCancelled(Exception):
    """The request has ended while its load waited for news."""


@dataclass(frozen=True)
class FollowingLoad:
    """A load that follows a prompt. after: what the model's stream has to pass first. cancelled:
    set when the request has ended. until_released: takes what releases the leases; it ends after
    the load was reported."""

    load: HandoffLoad
    after: Event | None
    cancelled: threading.Event
    until_released: contextlib.ExitStack
    trace: LoadTrace


class Follower:
    """Safe for use from any thread. right: of loads under way, how many of their first blocks an
    answer has confirmed."""

    def __init__(
        self,
        settings: ConnectorSettings,
        peers: Peers,
        receivers: Sequence[Receiver],
        fetches: Fetches,
    ) -> None:
        self._settings, self._peers, self._receivers = settings, peers, receivers
        self._fetches = fetches
        self.right: dict[str, int] = {}
        self._moved: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._whole: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take_moved(self) -> list[str]:
        """The requests whose loads got on since the last call."""
        return list(dict.fromkeys(taken(self._moved)))

    def take_whole(self) -> list[str]:
        """The requests that are loaded and whose prompts were computed since the last call."""
        return list(taken(self._whole))

    def not_right(self, load: HandoffLoad) -> tuple[int, ...]:
        """The blocks of a failed load that have to be computed, if an answer of the producer has
        confirmed those before them; none if all have to be."""
        right = self.right.pop(load.request_id, 0)
        return tuple(load.block_ids[right:]) if right and not self._settings.strict else ()

    def follow(self, one: FollowingLoad) -> tuple[list[Moved], int]:
        """Fetch a lease while it grows. Returns what moved, and how many bytes came while the
        prompt was computed. Raises `TransferError`, and `LoadCancelled`."""
        try:
            return self._follow(one)
        except (LeaseGone, LoadCancelled):
            self.right.pop(one.load.request_id, None)  # prefill may have new weights
            raise

    def _follow(self, one: FollowingLoad) -> tuple[list[Moved], int]:
        load, cancelled, trace = one.load, one.cancelled, one.trace
        limit_s, rest, moved = self._settings.load_deadline_s, GrowingLoad(load), list[Moved]()
        hidden = 0
        with contextlib.ExitStack() as following:
            leases = self._begin(load, cancelled, following)
            while True:
                trace.heard(leases)
                is_whole = leases.is_whole
                if is_whole:
                    self._whole.put(load.request_id)
                chunk = rest.take(leases.tokens, is_whole=is_whole)
                if chunk is not None:
                    came = self._fetch(load, leases, chunk, one.after)
                    trace.fetched(came, leases)
                    moved += came
                    self._moved.put(load.request_id)
                if is_whole:
                    break
                hidden = sum(part.num_bytes for part in moved)
                if self._proceed(leases, cancelled, Deadline.after(limit_s)):
                    self._confirmed(load, leases, rest)
                else:
                    self.right.pop(load.request_id, None)
                    # Prefill lacks room, perhaps for as long as this load keeps its own.
                    limit_s = min(limit_s, _ANEW_S)
                    rest.begin_anew()
                    moved.clear()
                    hidden = 0
            # The connections are needed until the leases are released.
            one.until_released.push(following.pop_all())
            for lease in leases.followed:
                lease.end(Deadline.after(limit_s), one.until_released)
            self.right.pop(load.request_id, None)
        return moved, hidden

    def _begin(
        self, load: HandoffLoad, cancelled: threading.Event, following: contextlib.ExitStack
    ) -> Leases:
        stream, leases = Stream(load.stream, load.prompt), list[Followed]()
        deadline = Deadline.after(self._settings.load_deadline_s)
        for request, _ in self._fetches(load, whole(load)):
            # The scheduler knows that the first rank has begun. Another one may come to the step
            # later: a pipeline stage does when the one before it is done.
            if request.endpoint != load.endpoints[0]:
                self._await(request.endpoint, stream, cancelled, deadline)
            one = followed(self._peers, request, stream, self._receivers, deadline)
            leases.append(following.enter_context(one))
        return Leases(leases)

    def _await(
        self, endpoint: Endpoint, stream: Stream, cancelled: threading.Event, deadline: Deadline
    ) -> None:
        limit = NEWS_S + _ANSWER_S
        while not awaited(self._peers, endpoint, stream, NEWS_S, Deadline.after(limit)).has_begun:
            _check_goes_on(cancelled, deadline)

    def _fetch(
        self, load: HandoffLoad, leases: Leases, chunk: Chunk, after: Event | None
    ) -> list[Moved]:
        deadline = Deadline.after(self._settings.load_deadline_s)
        fetches = zip(leases.followed, self._fetches(load, chunk), strict=True)
        return [
            one.fetch(request.part, FetchJob(blocks, deadline, after))
            for one, (request, blocks) in fetches
        ]

    def _proceed(self, leases: Leases, cancelled: threading.Event, deadline: Deadline) -> bool:
        """Wait for news of the leases. Returns whether what was fetched before counts."""
        before, is_right = leases.state, True
        while is_right and leases.state == before:
            _check_goes_on(cancelled, deadline)
            for one in leases.behind():
                is_right &= one.proceed(NEWS_S, Deadline.after(NEWS_S + _ANSWER_S))
        return is_right

    def _confirmed(self, load: HandoffLoad, leases: Leases, rest: GrowingLoad) -> None:
        # vLLM keeps a part of a load with one KV cache group only. With several, it may also write
        # to blocks before the producer hears of the step (`LeaseGrowth.add`). With several ranks,
        # one may not have been asked.
        if len(load.spans) == len(leases.followed) == 1:
            self.right[load.request_id] = rest.right()


def _check_goes_on(cancelled: threading.Event, deadline: Deadline) -> None:
    if cancelled.is_set():
        raise LoadCancelled
    deadline.left()


def taken(reports: queue.SimpleQueue[T]) -> Iterator[T]:
    """Take all that is in the queue now."""
    while not reports.empty():
        yield reports.get_nowait()
