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

Who may read is the kernel's decision: the same user, and what Yama says. Where its
ptrace_scope is 1, a process may be read by its ancestors and by one other that it names. We
name PR_SET_PTRACER_ANY: the probe precedes every fetch, so that no consumer is known yet, and
there are several at once. This gives this one process, while the transport is open, what scope
0 gives to all; other users stay shut out. Scopes 2 and 3 are left as they are: the probe fails
there, and another transport is taken.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import msgspec
import numpy as np

from disagg.errors import DataCorrupt, TransferError
from disagg.transport import board, named
from disagg.transport.base import Deadline, FetchJob, OneSidedReceiver
from disagg.transport.beside import Helpers, cores
from disagg.transport.blocks import BlockCache, Ints, Selection
from disagg.transport.hazards import RemoteHazards
from disagg.transport.process_vm import Pieces, is_supported, libc_function, peek, read_span
from disagg.transport.protocol import Part

logger = logging.getLogger(__name__)

NAME = "process_memory"
# One core does not fill the memory's bandwidth, and more than a few take it from the model.
_MOST_LANES = 4
_LANE_BYTES = 8 << 20
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Offer(named.Origin, frozen=True):
    """Which process, and where its cache lies. `regions`: int64 [regions, 8], each its address,
    shape [B, H, N, C] and strides of B, H and N. `token` lies at `token_at`. `board`: the address
    of its leases' board, 0 if there is none; `hazards`: its file of their slots."""

    token_at: int
    regions: bytes
    board: int = 0
    board_token: bytes = b""
    hazards: int = -1


class ProcessMemorySender:
    """Names memory; moves nothing."""

    name = NAME

    def __init__(self, cache: BlockCache, posted: board.Board | None = None) -> None:
        self._cache, self._board = cache, posted
        self._token = secrets.token_bytes(16)
        self._probe = np.frombuffer(self._token, np.uint8).copy()
        self._named_readers = cache.on_host and _ptrace_scope() == 1 and _let_anyone_read()

    def offer(self) -> bytes:
        """Empty where nobody could read this cache: device memory, or no Linux."""
        if not self._cache.on_host or not is_supported():
            return b""
        rows = np.column_stack([_addresses(self._cache), named.geometry(self._cache)])
        posted = self._board if self._board and self._board.hazards else None
        return msgspec.msgpack.encode(
            _Offer.here(
                token=self._token,
                token_at=self._probe.ctypes.data,
                regions=rows.tobytes(),
                board=posted.address if posted else 0,
                board_token=posted.token if posted else b"",
                hazards=posted.hazards.fd if posted and posted.hazards else -1,
            )
        )

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        return named.encode(self._token, blocks)

    def finish(self, answer: bytes) -> None:
        """Nothing was staged."""

    def close(self) -> None:
        self._probe[:] = 0  # who still holds the offer finds out
        if self._board is not None:
            self._board.close()
        if self._named_readers:
            _prctl(_PR_SET_PTRACER, ctypes.c_ulong(0))


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

    def __init__(self, offer: _Offer) -> None:
        self.pid, self.is_alive = offer.pid, offer.is_alive
        self.board, self.board_token = offer.board, offer.board_token
        self.hazards = _hazards(offer)
        rows = np.frombuffer(offer.regions, np.int64).reshape(-1, 8)
        self.addresses = rows[:, 0]
        self.cache = named.unbacked(rows[:, 1:])

    def peek(self, at: int, length: int) -> bytes:
        """Of its memory."""
        return peek(self.pid, at, length)


def _hazards(offer: _Offer) -> RemoteHazards | None:
    if not offer.board:
        return None
    try:
        return RemoteHazards(offer.pid, offer.hazards, offer.board_token)
    except TransferError as error:
        logger.info("%s: its leases are asked for: %s", NAME, error)
        return None


def _addresses(cache: BlockCache) -> Ints:
    return np.array([region.memory.data_ptr() for region in cache.regions], np.int64)


class _Prepared(threading.local):
    """What a thread has worked out for the job at hand."""

    last: tuple[FetchJob, Pieces] | None = None

    def take(self, job: FetchJob) -> Pieces | None:
        last, self.last = self.last, None
        return last[1] if last is not None and last[0] is job else None


class ProcessMemoryReceiver(OneSidedReceiver):
    """Reads into the cache: one copy, no staging."""

    name, one_sided = NAME, True

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._addresses = _addresses(cache)
        self._remotes: dict[bytes, _Remote] = {}
        self._offered: dict[bytes, _Remote] = {}
        self._reasons = named.Reasons(NAME)
        self._lanes = min(_MOST_LANES, cores())
        self._helpers = Helpers(self._lanes - 1 or 1, "disagg-read")
        self._prepared = _Prepared()

    def usable(self, offer: bytes) -> bool:
        return self._reasons.none(self._problem, offer)

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        self._prepared.last = job, self._near(job)

    def receive(self, job: FetchJob, answer: bytes) -> int:
        remote, theirs = named.decode(answer, self._remotes, self._cache, job.blocks)
        return self._copy(remote, theirs, job, self._prepared.take(job) or self._near(job))

    @contextlib.contextmanager
    def reading(self, offer: bytes, slot: int, lease: int) -> Iterator[board.Posted | None]:
        remote = self._offered.get(offer)
        if remote is None or remote.hazards is None or not remote.hazards.have(slot, lease):
            yield None
            return
        with remote.hazards.naming(slot, lease):
            yield board.look_up(remote.peek, remote.board, remote.board_token, lease)

    def read(self, offer: bytes, posted: board.Posted, part: Part, job: FetchJob) -> int | None:
        remote = self._offered.get(offer)
        if remote is None:
            return None  # it is dead, and was forgotten
        try:
            theirs = remote.cache.within(
                posted.block_ids, part.unit, part.spans, part.heads, part.regions
            )
        except ValueError:
            return None
        named.compare(self._cache, job.blocks, remote.cache, theirs)
        return self._copy(remote, theirs, job, self._near(job))

    def still_there(self, offer: bytes, posted: board.Posted) -> bool:
        remote = self._offered.get(offer)
        return remote is not None and board.still_there(remote.peek, posted)

    def close(self) -> None:
        """Forget the producers."""
        self._remotes.clear()
        self._offered.clear()
        self._helpers.close()

    def _copy(self, remote: _Remote, theirs: Selection, job: FetchJob, near: Pieces) -> int:
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
        theirs = msgspec.msgpack.decode(offer, type=_Offer)
        problem = theirs.problem()
        if problem is not None:
            return problem
        remote = _Remote(theirs)
        if remote.peek(theirs.token_at, len(theirs.token)) != theirs.token:
            return "another process has the producer's pid"
        self._remotes[theirs.token] = self._offered[offer] = remote
        for kept in (self._remotes, self._offered):
            for key, known in list(kept.items()):
                if not known.is_alive():
                    kept.pop(key, None)
        return None


# ---- the operating system -------------------------------------------------------------------


def _let_anyone_read() -> bool:
    if _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY) == 0:
        return True
    logger.info("cannot name readers to Yama: %s", os.strerror(ctypes.get_errno()))
    return False


def _prctl(option: int, value: ctypes.c_ulong) -> int:
    call = libc_function("prctl", ctypes.c_int, ctypes.c_int, *[ctypes.c_ulong] * 4)
    return -1 if call is None else call(option, value, 0, 0, 0)


def _ptrace_scope() -> int:
    try:
        return int(_PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return 0  # no Yama in this kernel
