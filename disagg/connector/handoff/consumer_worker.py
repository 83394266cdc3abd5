"""The consumer part of one worker rank: runs loads, and releases and renews leases.

Loads that follow a prompt are `follower.py`'s.

vLLM calls in from its model loop; nothing here may block it. Loads and lease messages run in
threads per producer, each bounded by a deadline; their copies release the GIL.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from disagg.connector.handoff import sharding
from disagg.connector.handoff.follower import (
    NEWS_S,
    Follower,
    FollowingLoad,
    LoadCancelled,
    taken,
)
from disagg.connector.handoff.growing_load import Chunk, whole
from disagg.connector.handoff.load_trace import LoadTrace
from disagg.connector.handoff.messages import (
    BegunReport,
    HandoffLoad,
    LeaseMessage,
    LoadReport,
    StepWork,
    Watch,
)
from disagg.connector.handoff.per_peer_threads import PerPeerThreads
from disagg.connector.handoff.rank import RankCache, WorkerRank
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.errors import LeaseGone, PeerLost, PeerRefused, TransferError
from disagg.safe_logging import foreign
from disagg.transport import fetch as handoff
from disagg.transport.base import FetchJob, Receiver
from disagg.transport.blocks import Selection
from disagg.transport.control.client import Endpoint, Peers
from disagg.transport.deadline import Deadline, Event
from disagg.transport.fetch import LeaseName, Moved
from disagg.transport.follow import Stream, awaited
from disagg.transport.protocol import Part

logger = logging.getLogger(__name__)

_LEASE_MESSAGE_S, _LEASE_MESSAGES_AT_ONCE = 5.0, 2
_FOLLOWS = 256
# How long prefill may not know a stream: both legs are sent at about the same time.
_UNHEARD_S = 30.0

Fence = Event | TransferError | None
"""When the model's stream has finished all steps launched so far, or why that is unknown."""


class ConsumerWorker:
    """Reports each load exactly once: vLLM holds the request's blocks until then.

    A pure producer has no receivers. Its loads are all refused ones, which strict mode reports as
    failed.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        rank: WorkerRank,
        cache: RankCache,
        peers: Peers,
        receivers: Sequence[Receiver],
    ) -> None:
        self._settings, self._rank, self._cache = settings, rank, cache
        self._peers, self._receivers = peers, receivers
        self._ended: queue.SimpleQueue[LoadReport] = queue.SimpleQueue()
        self._cancelled: dict[str, threading.Event] = {}
        self._loads = PerPeerThreads("disagg-load", settings.load_threads)
        # These wait for prompts to be computed, and must not wait for each other.
        self._watches = PerPeerThreads("disagg-watch", _FOLLOWS)
        self._follows = PerPeerThreads("disagg-follow", _FOLLOWS)
        self._unwatched: dict[str, threading.Event] = {}
        self._begun: queue.SimpleQueue[BegunReport] = queue.SimpleQueue()
        self.follower = Follower(settings, peers, receivers, self._fetches)
        self._lease_messages = PerPeerThreads("disagg-lease", _LEASE_MESSAGES_AT_ONCE)

    # ---- in the model's thread -------------------------------------------------------------

    def start(self, work: StepWork) -> None:
        """Begin the loads, cancels, releases and renewals of this step."""
        for watch in work.watches if self._rank.number == 0 else ():
            cancelled = self._unwatched[watch.request_id] = threading.Event()
            self._watches.submit((), functools.partial(self._watch, watch, cancelled))
        if work.loads:
            self._start_loads(work.loads)
        for request_id in work.unwatched:
            if request_id in self._unwatched:
                self._unwatched[request_id].set()
        for request_id in work.cancels:
            if request_id in self._cancelled:
                self._cancelled[request_id].set()
        for message in work.releases:
            release = functools.partial(self._release_share, message)
            self._lease_messages.submit(_producer_of(message), release)
        for message in work.renewals:
            renew = functools.partial(self._renew_share, message)
            self._lease_messages.submit(_producer_of(message), renew)

    def _start_loads(self, loads: Sequence[HandoffLoad]) -> None:
        after, deadline = self._fence(), Deadline.after(self._settings.load_deadline_s)
        for load in loads:
            self._cancelled[load.request_id] = threading.Event()
            run = functools.partial(self._load, load, deadline, after)
            if load.stream and load.problem is None:
                self._follows.submit((), run)
            else:
                self._loads.submit(_producer_of(load), run)

    def _fence(self) -> Fence:
        """Steps under way may still write to the blocks that vLLM gave to these loads. None on a
        CPU, where a step has finished when it returns."""
        staging = self._cache.staging
        try:
            return None if staging is None else staging.device.model_fence()
        except TransferError as error:
            return error  # the loads report it; the step itself does not depend on it

    def take_ended(self) -> list[LoadReport]:
        """The loads that ended since the last call."""
        reports = []
        while not self._ended.empty():
            report = self._ended.get_nowait()
            if self._cancelled.pop(report.request_id).is_set():  # while it was loading
                outcome = "aborted" if report.outcome == "loaded" else report.outcome
                report = replace(report, outcome=outcome, invalid=())
            reports.append(report)
        return reports

    def take_begun(self) -> list[BegunReport]:
        """The streams that have begun since the last call, or never will."""
        reports = list(taken(self._begun))
        for report in reports:
            self._unwatched.pop(report.request_id, None)
        return reports

    def close(self) -> None:
        """Close every connection; running loads then fail."""
        for event in [*self._cancelled.values(), *self._unwatched.values()]:
            event.set()
        self._watches.close()
        self._follows.close()
        self._peers.close()
        self._loads.close()
        self._lease_messages.close()
        for receiver in self._receivers:
            receiver.close()

    # ---- in threads per producer -----------------------------------------------------------

    def _watch(self, watch: Watch, cancelled: threading.Event) -> None:
        """Report when a stream begins. Nobody keeps blocks for it until then."""
        stream, problem = Stream(watch.stream, watch.prompt), None
        give_up, heard = Deadline.after(self._settings.lease_limit_s), time.monotonic()
        try:
            while not cancelled.is_set():
                give_up.left()
                limit = Deadline.after(NEWS_S + _LEASE_MESSAGE_S)
                answer = awaited(self._peers, watch.endpoint, stream, NEWS_S, limit)
                if answer.has_begun:
                    break
                if answer.is_queued:
                    heard = time.monotonic()
                elif time.monotonic() > heard + _UNHEARD_S:
                    raise LeaseGone("prefill was not sent its prompt")
        except TransferError as error:
            problem = error.reason
            logger.info("stream of %s: %s", foreign(watch.request_id), foreign(error))
        except Exception:
            problem = "internal"
            logger.exception("the watch of %s failed", foreign(watch.request_id))
        self._begun.put(BegunReport(watch.request_id, problem))

    def _load(self, load: HandoffLoad, deadline: Deadline, after: Fence) -> None:
        with contextlib.ExitStack() as fetched:  # the producer is informed after the report
            self._load_and_report(load, deadline, after, fetched)

    def _load_and_report(
        self, load: HandoffLoad, deadline: Deadline, after: Fence, fetched: contextlib.ExitStack
    ) -> None:
        outcome, reason, moved, hidden = "failed", load.problem, None, 0
        trace = LoadTrace(self._rank.number, is_on=load.is_traced)
        try:
            if self._cancelled[load.request_id].is_set():
                outcome = "aborted"
                self._release(load.endpoints, _name(load))
            elif load.problem is None:
                moved, hidden = self._fetch(load, deadline, after, fetched, trace)
                outcome = "loaded"
        except LoadCancelled:
            outcome = "aborted"
        except TransferError as error:
            reason = error.reason
            logger.warning(
                "request %s computes its prompt here, its KV did not come (%s): %s",
                foreign(load.request_id),
                reason,
                foreign(error, 1000),
            )
        except Exception:
            reason = "internal"
            logger.exception("load of request %s failed unexpectedly", foreign(load.request_id))
        finally:
            self._ended.put(
                LoadReport(
                    load.request_id,
                    outcome,
                    moved.transport if moved else "none",
                    moved.num_bytes if moved else 0,
                    moved.seconds if moved else 0.0,
                    reason,
                    hidden,
                    self.follower.not_right(load) if outcome == "failed" else (),
                    tuple(trace.events),
                )
            )

    def _fetch(
        self,
        load: HandoffLoad,
        deadline: Deadline,
        after: Fence,
        fetched: contextlib.ExitStack,
        trace: LoadTrace,
    ) -> tuple[handoff.Moved, int]:
        """Fetch this rank's heads from every producer rank that holds some of them. Returns also
        how many bytes came while the prompt was being computed."""
        problem = after if isinstance(after, TransferError) else self._unsliceable(load)
        if problem is not None:
            self._release(load.endpoints, _name(load))
            raise problem
        assert not isinstance(after, TransferError)
        if load.stream:
            cancelled = self._cancelled[load.request_id]
            return self._follow(FollowingLoad(load, after, cancelled, fetched, trace))
        fetches = list(self._fetches(load, whole(load)))
        moved: list[handoff.Moved] = []
        try:
            for source, blocks in fetches:
                job = FetchJob(blocks, deadline, after)
                fetch = handoff.fetched(self._peers, source, job, self._receivers)
                moved.append(fetched.enter_context(fetch))
                trace.fetched(moved[-1:])
        except TransferError:
            # The remaining ranks' blocks are useless now; their leases need not run out.
            rest = [source.endpoint for source, _ in fetches[len(moved) + 1 :]]
            self._release(rest, _name(load))
            raise
        return self._total(load, moved), 0

    def _follow(self, following: FollowingLoad) -> tuple[handoff.Moved, int]:
        load = following.load
        try:
            moved, hidden = self.follower.follow(following)
        except (TransferError, LoadCancelled):
            # After the report: a producer that hangs must not delay it.
            endpoints = [source.endpoint for source, _ in self._fetches(load, whole(load))]
            following.until_released.callback(self._release, endpoints, _name(load))
            raise
        return self._total(load, moved), hidden

    def _total(self, load: HandoffLoad, moved: Sequence[Moved]) -> Moved:
        for one in moved:
            for name in one.failed_over:
                logger.warning(
                    "request %s: transport %s failed over", foreign(load.request_id), name
                )
        self._release(self._unread(load), _name(load))
        return handoff.total(moved)

    def _unsliceable(self, load: HandoffLoad) -> TransferError | None:
        """A draft model may have other heads than its target, and some blocks move whole; such a
        cache cannot be sliced."""
        rank = self._rank
        first, last = sharding.held(rank.world_size, rank.rank, rank.kv_heads)
        if self._slices(_producers(load)) and self._cache.blocks.heads != last - first:
            return PeerRefused("these layers cannot be sliced by heads", "tensor_parallel_size")
        return None

    def _fetches(
        self, load: HandoffLoad, chunk: Chunk
    ) -> Iterator[tuple[handoff.FetchRequest, Selection]]:
        """One fetch per producer rank and stage; together each of our layers and heads once."""
        producers, slices, rank = _producers(load), self._slices(_producers(load)), self._rank
        readers = sharding.readers(producers, rank.world_size, rank.kv_heads)
        sources = sharding.sources(producers, rank.world_size, rank.rank, rank.kv_heads)
        for stage in sharding.stages(*load.layers, rank.stage):
            stages = sharding.readers_of_stage(*load.layers, stage.number)
            layers = self._cache.layers[slice(*stage.ours)]
            for source in sources:
                # Ranks of equal size hold the same heads, so blocks are moved whole.
                theirs, ours = (source.theirs, source.ours) if slices else (None, None)
                part = Part(load.unit, chunk.spans, theirs, stage.theirs)
                yield (
                    handoff.FetchRequest(
                        load.endpoints[stage.number * producers + source.rank],
                        load.lease,
                        part,
                        layers,
                        readers[source.rank] * stages,
                    ),
                    Selection(
                        chunk.block_ids, load.unit, chunk.first, chunk.units, ours, stage.ours
                    ),
                )

    def _slices(self, producers: int) -> bool:
        kv_heads = self._rank.kv_heads
        return min(producers, kv_heads) != min(self._rank.world_size, kv_heads)

    def _unread(self, load: HandoffLoad) -> list[Endpoint]:
        """Producer ranks that no consumer rank reads (replicas), and whose lease this rank ends."""
        rank = self._rank
        readers = sharding.readers(_producers(load), rank.world_size, rank.kv_heads)
        return [
            endpoint
            for number, endpoint in enumerate(load.endpoints)
            if readers[number % len(readers)] == 0 and number % rank.count == rank.number
        ]

    def _share(self, endpoints: list[Endpoint]) -> list[Endpoint]:
        """Our ranks divide the producer's ranks among them: each producer rank gets one message."""
        return endpoints[self._rank.number :: self._rank.count]

    def _release_share(self, message: LeaseMessage) -> None:
        self._release(self._share(message.endpoints), message.name)

    def _renew_share(self, message: LeaseMessage) -> None:
        try:
            for endpoint in self._share(message.endpoints):
                deadline = Deadline.after(_LEASE_MESSAGE_S)
                handoff.renew(self._peers, endpoint, message.name, deadline)
        except TransferError as error:
            logger.info("lease %s is not renewed: %s", message.name, foreign(error))

    def _release(self, endpoints: Sequence[Endpoint], lease: LeaseName) -> None:
        """Never raises: no load depends on it, and leases expire anyway."""
        try:
            handoff.release_all(self._peers, endpoints, lease, Deadline.after(_LEASE_MESSAGE_S))
        except PeerLost as error:
            logger.info("lease %s was not released and will expire: %s", lease, foreign(error))
        except TransferError as error:
            logger.warning("lease %s was not released: %s", lease, foreign(error))


def _name(load: HandoffLoad) -> LeaseName:
    return LeaseName(load.lease, load.stream)


def _producer_of(work: HandoffLoad | LeaseMessage) -> Hashable:
    """The key of its threads: the producer's first rank."""
    return tuple(work.endpoints[:1])


def _producers(load: HandoffLoad) -> int:
    """The producer's tensor parallel size."""
    return len(load.endpoints) // len(load.layers[0])
