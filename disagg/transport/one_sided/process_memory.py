"""Process memory: the consumer reads host caches straight out of the producer's process.

For two processes of one host. `process_vm_readv` copies from the producer's blocks into the
consumer's own, once, without the GIL; the producer takes no part. Its offer says once where its
regions lie; an answer only names the selection, and the consumer works out both sides' addresses
with the same code. It never reads outside of the regions on offer.

The lease itself is read as well, from the producer's board (board.py), before and after: then
nothing is asked, and a producer that computes, or is stopped, is not waited for. What is not on
the board is asked for. In that case nothing here proves that the process read was still the
producer, or the blocks still its lease's: pids are used again, leases run out. That needs no proof.
`Release` is answered on the connection that the producer itself opened, and only while it lives and
keeps the lease; until then nothing that was read is believed (see base.py).

Who may read is the kernel's decision: the same user, and what Yama says (yama.py).
"""

from __future__ import annotations

import collections
import itertools
import logging
import secrets
import threading
from concurrent.futures import wait

import msgspec
import numpy as np

from disagg.errors import DataCorrupt
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Ints, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.host.helper_threads import HelperThreads, cores
from disagg.transport.host.process_vm import Pieces, is_supported, peek, read_span
from disagg.transport.host.ptrace_scope import AllowedReaders
from disagg.transport.one_sided import offers
from disagg.transport.one_sided.lease_board import LeaseBoard
from disagg.transport.one_sided.remote_lease_board import (
    BoardReceiver,
    LeaseBoardOffer,
    open_board,
    posting,
)

logger = logging.getLogger(__name__)

NAME = "process_memory"
# One core does not fill the memory's bandwidth, and more than a few take it from the model.
_MOST_LANES = 4
_LANE_BYTES = 8 << 20


class _ProcessMemoryOffer(offers.Origin, frozen=True):
    """Which process, and where its cache lies. `regions`: int64 [regions, 8], each its address,
    shape [B, H, N, C] and strides of B, H and N. `token` lies at `token_at`."""

    token_at: int
    regions: bytes
    posting: LeaseBoardOffer | None = None


class ProcessMemorySender:
    """Names memory; moves nothing."""

    name = NAME

    def __init__(self, cache: BlockCache, board: LeaseBoard | None = None) -> None:
        self._cache, self._board = cache, board
        self._token = secrets.token_bytes(16)
        self._probe = np.frombuffer(self._token, np.uint8).copy()
        self._readers = AllowedReaders() if cache.on_host else None

    def offer(self) -> bytes:
        """Empty where nobody could read this cache: device memory, or no Linux."""
        if not self._cache.on_host or not is_supported():
            return b""
        rows = np.column_stack([_addresses(self._cache), offers.geometry(self._cache)])
        return msgspec.msgpack.encode(
            _ProcessMemoryOffer.here(
                token=self._token,
                token_at=self._probe.ctypes.data,
                regions=rows.tobytes(),
                posting=posting(self._board),
            )
        )

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        return offers.encode(self._token, blocks)

    def finish(self, answer: bytes) -> None:
        """Nothing was staged."""

    def close(self) -> None:
        self._probe[:] = 0  # who still holds the offer finds out
        if self._board is not None:
            self._board.close()
        if self._readers is not None:
            self._readers.close()


def _spans(total: int, lanes: int) -> list[tuple[int, int]]:
    """A large part for each lane and then a small one, for some begin late or are slow."""
    if lanes == 1:
        return [(0, total)]
    sizes = [total * 3 // (4 * lanes)] * lanes
    ends = [sum(sizes[: lane + 1]) for lane in range(lanes)]
    ends += [ends[-1] + (total - ends[-1]) * (lane + 1) // lanes for lane in range(lanes)]
    return list(itertools.pairwise([0, *ends]))


class _Remote:
    """A producer's process and the geometry of its cache."""

    def __init__(self, offer: _ProcessMemoryOffer) -> None:
        self.pid, self.is_alive = offer.pid, offer.is_alive
        self.board = open_board(NAME, offer.pid, offer.posting)
        rows = np.frombuffer(offer.regions, np.int64).reshape(-1, 8)
        self.addresses = rows[:, 0]
        self.cache = offers.unbacked(rows[:, 1:])


def _addresses(cache: BlockCache) -> Ints:
    return np.array([region.memory.data_ptr() for region in cache.regions], np.int64)


class _Prepared(threading.local):
    """What a thread has worked out for the job at hand."""

    last: tuple[FetchJob, Pieces] | None = None

    def take(self, job: FetchJob) -> Pieces | None:
        last, self.last = self.last, None
        return last[1] if last is not None and last[0] is job else None


class ProcessMemoryReceiver(BoardReceiver[_Remote]):
    """Reads into the cache: one copy, no staging."""

    name, one_sided = NAME, True

    def __init__(self, cache: BlockCache) -> None:
        super().__init__(cache)
        self._addresses = _addresses(cache)
        self._remotes: dict[bytes, _Remote] = {}
        self._reasons = offers.Reasons(NAME)
        self._lanes = min(_MOST_LANES, cores())
        self._helpers = HelperThreads(self._lanes - 1 or 1, "disagg-read")
        self._prepared = _Prepared()

    def usable(self, offer: bytes) -> bool:
        return self._reasons.none(self._problem, offer)

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        self._prepared.last = job, self._near(job)

    def receive(self, job: FetchJob, answer: bytes) -> int:
        remote, theirs = offers.decode(answer, self._remotes, self._cache, job.blocks)
        return self._copy(remote, theirs, job)

    def close(self) -> None:
        """Forget the producers."""
        self._remotes.clear()
        self._offered.clear()
        self._helpers.close()

    def _copy(self, remote: _Remote, theirs: Selection, job: FetchJob) -> int:
        near = self._prepared.take(job) or self._near(job)
        far = Pieces.of(remote.cache, remote.addresses, theirs)
        if job.blocks.unit != theirs.unit or near.per_region != far.per_region:
            raise DataCorrupt("the two sides do not mean the same selection", reason="range")
        lanes = max(1, min(self._lanes, near.total // _LANE_BYTES))
        spans = iter(_spans(near.total, lanes))

        def run() -> None:
            try:
                for span in spans:
                    read_span(remote.pid, near, far, span, job.deadline)
            finally:
                collections.deque(spans, 0)  # after an error nobody begins another

        helped = [self._helpers.submit(run) for _ in range(lanes - 1)]
        try:
            run()
        finally:
            # Whatever happened, nobody may write to these blocks any more.
            started = [future for future in helped if not future.cancel()]
            wait(started)
        for future in started:
            future.result()
        return near.total

    def _near(self, job: FetchJob) -> Pieces:
        return Pieces.of(self._cache, self._addresses, job.blocks)

    def _problem(self, offer: bytes) -> str | None:
        """Why this producer cannot be read; None if a read of it succeeded."""
        if not self._cache.on_host:
            return "the cache is device memory"
        if not offer:
            return "the producer's cache is device memory, or its system has no process_vm_readv"
        theirs = msgspec.msgpack.decode(offer, type=_ProcessMemoryOffer)
        problem = theirs.problem()
        if problem is not None:
            return problem
        remote = _Remote(theirs)
        if peek(theirs.pid, theirs.token_at, len(theirs.token)) != theirs.token:
            return "another process has the producer's pid"
        self._remotes[theirs.token] = self._offered[offer] = remote
        for kept in (self._remotes, self._offered):
            for key, known in list(kept.items()):
                if not known.is_alive():
                    kept.pop(key, None)
        return None
