"""Process memory: the consumer reads host caches straight out of the producer's process.

For two processes on one host. `process_vm_readv` copies from the producer's blocks into the
consumer's, once, without the GIL; the producer takes no part. The offer says once where the
producer's regions lie. An answer only names blocks: the consumer computes the addresses of both
sides with the same code, and never reads outside of the regions on offer.

As a rule the consumer also reads the lease from the producer's board, before and after the blocks.
Then it sends no request first, and does not wait for a producer that computes or is stopped.
Without an entry on the board it asks for the lease. In that case nothing here proves that the
process read was still the producer, or the blocks still the lease's: pids are reused, leases run
out. No proof is needed: `Release` is answered on the connection that the producer itself opened,
only while it lives and keeps the lease, and until then the blocks are not valid (see `base.py`).

The kernel decides who may read: processes of the same user, as far as Yama allows
(`host/ptrace_scope.py`).
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading

import msgspec
import numpy as np

from disagg.errors import DataCorrupt, TransferError
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Ints, Selection
from disagg.transport.host.helper_threads import THREAD_BYTES, HelperThreads
from disagg.transport.host.process_vm import Pieces, is_supported, peek, read_span
from disagg.transport.host.ptrace_scope import AllowedReaders
from disagg.transport.one_sided import offers
from disagg.transport.one_sided.lease_board import LeaseBoard
from disagg.transport.one_sided.remote_lease_board import (
    BoardCache,
    LeaseBoardOffer,
    board_offer,
    open_board,
)

logger = logging.getLogger(__name__)

NAME = "process_memory"


class _ProcessMemoryOffer(offers.Origin, frozen=True):
    """Which process, and where its cache lies. regions: int64 [regions, 8], per region its address,
    shape [B, H, N, C] and strides of B, H and N. token_at: the address of `token`."""

    token_at: int
    regions: bytes
    board: LeaseBoardOffer | None = None


_decode_offer = msgspec.msgpack.Decoder(_ProcessMemoryOffer).decode


class ProcessMemorySender(offers.NamingSender):
    """Names memory; moves nothing."""

    name = NAME

    def __init__(self, cache: BlockCache, board: LeaseBoard | None = None) -> None:
        self._cache, self._board = cache, board
        self._token = secrets.token_bytes(16)
        self._probe = np.frombuffer(self._token, np.uint8).copy()
        self._readers = AllowedReaders() if cache.on_host else None

    def offer(self) -> bytes:
        """Empty if no process could read this cache: device memory, or no Linux."""
        if not self._cache.on_host or not is_supported():
            return b""
        rows = np.column_stack([_addresses(self._cache), offers.geometry(self._cache)])
        return msgspec.msgpack.encode(
            _ProcessMemoryOffer.here(
                token=self._token,
                token_at=self._probe.ctypes.data,
                regions=rows.tobytes(),
                board=board_offer(self._board),
            )
        )

    def close(self) -> None:
        self._probe[:] = 0  # opening an old offer fails from now on
        if self._board is not None:
            self._board.close()
        if self._readers is not None:
            self._readers.close()


def _spans(total: int, threads: int) -> list[tuple[int, int]]:
    """A large span per thread and then a small one each, as some threads start late or are slow."""
    if threads == 1:
        return [(0, total)]
    sizes = [total * 3 // (4 * threads)] * threads
    ends = [sum(sizes[: n + 1]) for n in range(threads)]
    ends += [ends[-1] + (total - ends[-1]) * (n + 1) // threads for n in range(threads)]
    return list(itertools.pairwise([0, *ends]))


def _addresses(cache: BlockCache) -> Ints:
    return np.array([region.memory.data_ptr() for region in cache.regions], np.int64)


class _Prepared(threading.local):
    """Our pieces for the job that this thread runs next."""

    last: tuple[FetchJob, Pieces] | None = None

    def take(self, job: FetchJob) -> Pieces | None:
        last, self.last = self.last, None
        return last[1] if last is not None and last[0] is job else None


class _OurSide:
    """The consumer's cache, with the helper threads that all of its fetches share."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache, self._addresses = cache, _addresses(cache)
        self._helpers = HelperThreads("disagg-read")
        self._prepared = _Prepared()

    def prepare(self, job: FetchJob) -> None:
        """Compute our pieces; the same thread calls `fill` next."""
        self._prepared.last = job, self._pieces(job)

    def fill(self, job: FetchJob, pid: int, far: Pieces) -> int:
        """Read process `pid`'s pieces into the job's blocks; returns the number of bytes."""
        near = self._prepared.take(job) or self._pieces(job)
        if near.per_region != far.per_region:
            raise DataCorrupt("the two sides do not mean the same selection", reason="range")
        threads = max(1, min(self._helpers.together, near.total // THREAD_BYTES))
        self._helpers.share(
            _spans(near.total, threads),
            lambda span: read_span(pid, near, far, span, job.deadline),
            threads,
        )
        return near.total

    def close(self) -> None:
        self._helpers.close()

    def _pieces(self, job: FetchJob) -> Pieces:
        return Pieces.of(self.cache, self._addresses, job.blocks)


class _ProcessCache(BoardCache):
    """A cache in another process's memory."""

    name = NAME

    def __init__(self, ours: _OurSide, offer: _ProcessMemoryOffer) -> None:
        rows = np.frombuffer(offer.regions, np.int64).reshape(-1, 8)
        board = open_board(NAME, offer.pid, offer.board)
        super().__init__(offer.token, ours.cache, offers.unbacked(rows[:, 1:]), board)
        self._our_side, self._offer, self._addresses = ours, offer, rows[:, 0]

    def is_alive(self) -> bool:
        return self._offer.is_alive()

    def prepare(self, job: FetchJob) -> None:
        self._our_side.prepare(job)

    def _copy(self, blocks: Selection, job: FetchJob) -> int:
        if job.blocks.unit != blocks.unit:
            raise DataCorrupt("the two sides do not mean the same selection", reason="range")
        far = Pieces.of(self._theirs, self._addresses, blocks)
        return self._our_side.fill(job, self._offer.pid, far)


class ProcessMemoryReceiver:
    """Reads into the cache: one copy, no staging."""

    name = NAME

    def __init__(self, cache: BlockCache) -> None:
        self._cache, self._our_side = cache, _OurSide(cache)
        self._refusals = offers.Refusals(NAME)

    def open(self, offer: bytes) -> _ProcessCache | None:
        return self._refusals.opened(self._open, offer)

    def close(self) -> None:
        self._our_side.close()

    def _open(self, offer: bytes) -> _ProcessCache:
        if not self._cache.on_host:
            raise TransferError("the cache is device memory")
        if not offer:
            raise TransferError(
                "the producer's cache is device memory, or its system has no process_vm_readv"
            )
        theirs = _decode_offer(offer)
        theirs.check_reachable()
        opened = _ProcessCache(self._our_side, theirs)
        if peek(theirs.pid, theirs.token_at, len(theirs.token)) != theirs.token:
            raise TransferError("another process has the producer's pid")
        return opened
