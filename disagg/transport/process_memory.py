"""Process memory: the consumer reads host caches straight out of the producer's process.

For two processes of one host. `process_vm_readv` copies from the producer's blocks into the
consumer's own, once, without the GIL; the producer takes no part. Its offer says once where its
regions lie; an answer only names the selection, and the consumer works out both sides' addresses
with the same code. It never reads outside of the regions on offer.

Nothing here proves that the process read was still the producer, or the blocks still its
lease's: pids are used again, leases run out. That needs no proof. `Release` is answered on the
connection that the producer itself opened, and only while it lives and keeps the lease; until
then nothing that was read is believed (see base.py).

Who may read is the kernel's decision: the same user, and what Yama says. Where its
ptrace_scope is 1, a process may be read by its ancestors and by one other that it names. We
name PR_SET_PTRACER_ANY: the probe precedes every fetch, so that no consumer is known yet, and
there are several at once. This gives this one process, while the transport is open, what scope
0 gives to all; other users stay shut out. Scopes 2 and 3 are left as they are: the probe fails
there, and another transport is taken.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import logging
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from disagg.errors import DataCorrupt, TransferError
from disagg.transport.base import Deadline, FetchJob
from disagg.transport.blocks import BlockCache, Region, Selection
from disagg.transport.process_vm import Pieces, is_supported, libc_function, read, read_span
from disagg.transport.processes import start_time
from disagg.transport.protocol import MAX_FRAME

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NAME = "process_memory"
# One core does not fill the memory's bandwidth, and more than a few take it from the model.
_LANES = min(4, os.cpu_count() or 1)
_LANE_BYTES = 8 << 20
_ANSWER_MARGIN = 1024
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class _Offer(msgspec.Struct, frozen=True):
    """Which process, and where its cache lies. `regions`: int64 [regions, 8], each its address,
    shape [B, H, N, C] and strides of B, H and N. `token` lies at `token_at`."""

    boot: str
    pid_namespace: int
    pid: int
    started: int
    token: bytes
    token_at: int
    regions: bytes


class _Named(msgspec.Struct, frozen=True, array_like=True):
    """A selection of the producer whose offer had this token. `block_ids`: int32 [blocks]."""

    token: bytes
    block_ids: bytes
    unit: int
    first: int
    count: int
    heads: tuple[int, int] | None


class ProcessMemorySender:
    """Names memory; moves nothing."""

    name = NAME

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._token = secrets.token_bytes(16)
        self._probe = np.frombuffer(self._token, np.uint8).copy()
        self._named_readers = cache.on_host and _ptrace_scope() == 1 and _let_anyone_read()

    def offer(self) -> bytes:
        """Empty where nobody could read this cache: device memory, or no Linux."""
        if not self._cache.on_host or not is_supported():
            return b""
        rows = [
            (region.memory.data_ptr(), *region.memory.shape, *region.memory.stride()[:3])
            for region in self._cache.regions
        ]
        return msgspec.msgpack.encode(
            _Offer(
                boot=_boot(),
                pid_namespace=_pid_namespace(),
                pid=os.getpid(),
                started=start_time(os.getpid()) or 0,
                token=self._token,
                token_at=self._probe.ctypes.data,
                regions=np.array(rows, np.int64).tobytes(),
            )
        )

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        ids = np.asarray(blocks.block_ids, np.int32).tobytes()
        if len(ids) > MAX_FRAME - _ANSWER_MARGIN:
            raise TransferError(f"{len(ids) // 4} blocks do not fit one answer", reason="too_large")
        return msgspec.msgpack.encode(
            _Named(self._token, ids, blocks.unit, blocks.first, blocks.count, blocks.heads)
        )

    def finish(self, answer: bytes) -> None:
        """Nothing was staged."""

    def close(self) -> None:
        self._probe[:] = 0  # who still holds the offer finds out
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
        self.pid, self.started = offer.pid, offer.started
        rows = np.frombuffer(offer.regions, np.int64).reshape(-1, 8).tolist()
        self.addresses = [row[0] for row in rows]
        # Meta tensors have shape and strides but no memory: the very code that finds runs in
        # our cache finds them in theirs.
        self.cache = BlockCache(
            [Region("", _unbacked(row[1:5], (*row[5:], 1)), "U8") for row in rows]
        )

    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started


def _unbacked(shape: list[int], strides: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.empty_strided(shape, strides, dtype=torch.uint8, device="meta")


class _Prepared(threading.local):
    """What a thread has worked out for the job at hand."""

    last: tuple[FetchJob, Pieces] | None = None

    def take(self, job: FetchJob) -> Pieces | None:
        last, self.last = self.last, None
        return last[1] if last is not None and last[0] is job else None


class ProcessMemoryReceiver:
    """Reads into the cache: one copy, no staging."""

    name = NAME

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._addresses = [region.memory.data_ptr() for region in cache.regions]
        self._remotes: dict[bytes, _Remote] = {}
        self._told: set[str] = set()
        self._helpers = ThreadPoolExecutor(_LANES - 1 or 1, "disagg-read")
        self._prepared = _Prepared()

    def usable(self, offer: bytes) -> bool:
        problem = self._problem(offer)
        if problem is not None and problem not in self._told:
            self._told.add(problem)
            logger.info("%s is not usable: %s", NAME, problem)
        return problem is None

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        self._prepared.last = job, self._near(job)

    def receive(self, job: FetchJob, answer: bytes) -> int:
        try:
            named = msgspec.msgpack.decode(answer, type=_Named)
            remote = self._remotes[named.token]
            ids = np.frombuffer(named.block_ids, np.int32).tolist()
            theirs = Selection(ids, named.unit, named.first, named.count, named.heads)
            remote.cache.check(theirs)
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            raise DataCorrupt(f"answer does not name blocks on offer: {error}") from error
        near = self._prepared.take(job) or self._near(job)
        far = Pieces.of(remote.cache, remote.addresses, theirs)
        if job.blocks.unit != theirs.unit or not np.array_equal(near.per_region, far.per_region):
            raise DataCorrupt("the two sides do not mean the same selection", reason="range")
        lanes = max(1, min(_LANES, near.total // _LANE_BYTES))
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

    def close(self) -> None:
        """Forget the producers."""
        self._remotes.clear()
        self._helpers.shutdown(wait=False, cancel_futures=True)

    def _near(self, job: FetchJob) -> Pieces:
        return Pieces.of(self._cache, self._addresses, job.blocks)

    def _problem(self, offer: bytes) -> str | None:
        """Why this producer cannot be read; None if a read of it succeeded."""
        if not self._cache.on_host:
            return "the cache is device memory"
        if not offer:
            return "the producer's cache is device memory, or its system has no process_vm_readv"
        try:
            theirs = msgspec.msgpack.decode(offer, type=_Offer)
            if theirs.boot != _boot() or theirs.pid_namespace != _pid_namespace():
                return "the producer is on another host or in another pid namespace"
            remote = _Remote(theirs)
            if not remote.is_alive():
                return "the producer's process is gone"
            contents = [[r.memory.shape[3] for r in c.regions] for c in (self._cache, remote.cache)]
            if contents[0] != contents[1]:
                return "the producer's regions differ from ours"
            found = np.zeros(len(theirs.token), np.uint8)
            near = np.array([[found.ctypes.data, len(found)]], np.uint64)
            read(theirs.pid, near, np.array([[theirs.token_at, len(found)]], np.uint64))
            if found.tobytes() != theirs.token:
                return "another process has the producer's pid"
        except (msgspec.DecodeError, TransferError) as error:
            return str(error)
        except (OSError, ValueError, LookupError, RuntimeError, OverflowError) as error:
            return f"the offer makes no sense here: {error}"
        self._remotes[theirs.token] = remote
        for token, known in list(self._remotes.items()):
            if not known.is_alive():
                self._remotes.pop(token, None)
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


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
