"""CUDA IPC: the consumer's GPU reads blocks straight out of the memory of the producer's GPU.

For two processes on one host whose GPUs reach each other, or are the same. The producer exports
the allocations that hold its cache, the consumer maps them once, and one kernel copies from blocks
to blocks; nothing is staged, and the producer takes no part. Whether it works between two processes
(GPUs visible to each other, allocations that can be shared) depends on too much to be guessed, so
the consumer first reads a token in the producer's device memory the way it reads blocks.

Invariants. A dead producer's memory never stays mapped: until it is unmapped, no process can use
it, and a restarted engine does not fit. Memory is never unmapped while a kernel reads it: that
fault would end this process's use of its GPU. No call ever waits for the whole device.

As with process memory, the consumer reads the lease from the producer's board, or else asks for it;
asked, the bytes need no proof here, for the same reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import threading

import msgspec
import numpy as np

from disagg.errors import DataCorrupt, PeerLost, TransferError
from disagg.identity.process import start_time
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device import copy_plan
from disagg.transport.device.base import Device, DeviceMemory, Wait
from disagg.transport.device.staging import Staging
from disagg.transport.host.fd_watcher import FdWatcher
from disagg.transport.host.ptrace_scope import AllowedReaders
from disagg.transport.one_sided import offers
from disagg.transport.one_sided.cuda_mapping import (
    GONE,
    TOKEN_BYTES,
    CudaIpcOffer,
    MappedCache,
    decode_offer,
)
from disagg.transport.one_sided.lease_board import LeaseBoard
from disagg.transport.one_sided.remote_lease_board import BoardCache, board_offer, open_board

logger = logging.getLogger(__name__)

NAME = "cuda_ipc"
# What was launched cannot be stopped, so it must end soon: so much takes milliseconds.
_CHUNK_BYTES = 256 << 20
_AHEAD = 2
_TOKEN_S = 5.0
# CUDA cuts small allocations out of blocks of this size, and shares the whole block.
_PROBE_BYTES = 2 << 20


class CudaIpcSender(offers.NamingSender):
    """Names memory; moves nothing."""

    name = NAME

    def __init__(
        self, cache: BlockCache, staging: Staging | None, board: LeaseBoard | None = None
    ) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._staging, self._board, self._offer = staging, board, b""
        self._probe: DeviceMemory | None = None
        self._readers: AllowedReaders | None = None
        if staging is None:
            return
        try:
            self._offer = self._export(cache, staging)
            self._readers = AllowedReaders()
        except (TransferError, OSError) as error:
            logger.info("%s is not offered: %s", NAME, error)
            self._take_back()

    def offer(self) -> bytes:
        """Empty for a cache that no process could read: in host memory, or not shareable."""
        return self._offer

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._readers is not None:
            self._readers.close()
        self._take_back()

    def _take_back(self) -> None:
        probe, self._probe = self._probe, None
        if probe is None or self._staging is None:
            return
        try:
            # Opening an old offer fails from now on.
            _write(self._staging, probe.address, bytes(TOKEN_BYTES))
        except TransferError as error:
            logger.info("%s: the token could not be erased: %s", NAME, error)
            if isinstance(error, PeerLost):
                return  # it may still be written to
        with contextlib.suppress(TransferError):  # a device that failed takes nothing back
            probe.free()

    def _export(self, cache: BlockCache, staging: Staging) -> bytes:
        allocations: dict[bytes, tuple[int, int]] = {}

        def place(address: int) -> tuple[int, int]:
            found = staging.device.export(address)
            number, _ = allocations.setdefault(found.handle, (len(allocations), found.size))
            return number, found.offset

        staging.device.use()
        where = [place(region.memory.data_ptr()) for region in cache.regions]
        self._probe = staging.device.memory(_PROBE_BYTES)
        _write(staging, self._probe.address, self._token)
        token_at = place(self._probe.address)
        return msgspec.msgpack.encode(
            CudaIpcOffer.here(
                token=self._token,
                allocations=[(handle, size) for handle, (_, size) in allocations.items()],
                regions=np.column_stack([where, offers.geometry(cache)]).tobytes(),
                token_at=token_at,
                board=board_offer(self._board),
            )
        )


def _write(staging: Staging, address: int, content: bytes) -> None:
    """Put these bytes on the device; when it returns, other processes can read them."""
    deadline = Deadline.after(_TOKEN_S)
    with staging.sending.take(deadline) as slot:
        pinned = slot.pinned[0]
        pinned.array[: len(content)] = np.frombuffer(content, np.uint8)
        slot.stream.copy(address, pinned.address, len(content))
        Wait(deadline).until(slot.stream.record().is_done)


class _CudaCache(BoardCache):
    """A cache in another process's device memory."""

    name = NAME

    def __init__(self, ours: BlockCache, staging: Staging, mapped: MappedCache) -> None:
        super().__init__(mapped.offer.token, ours, mapped.cache, mapped.board)
        self._staging, self._mapped = staging, mapped

    def is_alive(self) -> bool:
        return not self._mapped.closed and self._mapped.offer.is_alive()

    def _copy(self, blocks: Selection, job: FetchJob) -> int:
        mapped, slots = self._mapped, self._staging.receiving
        wait = Wait(job.deadline, mapped.check)
        # The slot is given back first, and only when its work has ended.
        with mapped.reading(), slots.take(job.deadline, mapped.check) as slot:
            addresses = mapped.addresses()
            try:
                move = copy_plan.across(self._ours, job.blocks, mapped.cache, blocks, addresses)
            except ValueError as error:
                raise DataCorrupt(str(error), reason="range") from error
            slot.stream.load(move)
            # Here, not on the stream: work that waits there cannot be cancelled at the deadline.
            if job.after is not None:
                wait.until(job.after.is_done)
            done: list[Event] = []
            for chunk in move.chunks(max(_CHUNK_BYTES, int(move.row_bytes.max()))):
                if len(done) >= _AHEAD:
                    wait.until(done[-_AHEAD].is_done)
                job.deadline.left()
                slot.stream.launch(chunk)
                done.append(slot.stream.record())
            for event in done[-1:]:
                wait.until(event.is_done)
        return move.size


class CudaIpcReceiver:
    """Reads into the cache: one kernel, no staging.

    It owns the mappings, at most one per producer: until the producer's process ends, or `close`.
    """

    name = NAME

    def __init__(self, cache: BlockCache, staging: Staging | None) -> None:
        self._cache, self._staging = cache, staging
        self._refusals = offers.Refusals(NAME)
        self._mapped: dict[bytes, MappedCache] = {}  # by the token of the offer
        self._watcher = FdWatcher("disagg-cuda-ipc-watch")
        self._watched: set[int] = set()  # pidfds
        self._lock = threading.Lock()

    def open(self, offer: bytes) -> _CudaCache | None:
        return None if self._staging is None else self._refusals.opened(self._open, offer)

    def close(self) -> None:
        """Unmap all producers' memory; where a read is under way, when it has ended."""
        with self._lock:
            for pidfd in list(self._watched):
                if self._watcher.remove(pidfd):
                    os.close(pidfd)
            self._watcher.close()
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped = {}

    def _open(self, offer: bytes) -> _CudaCache:
        """Raises an error unless a read of the producer's memory succeeded."""
        assert self._staging is not None
        if not offer:
            raise TransferError("the producer's cache is host memory, or cannot be shared")
        theirs = decode_offer(offer)
        theirs.check_reachable()
        if (theirs.pid, theirs.started) == (os.getpid(), start_time(os.getpid())):
            raise TransferError("a process cannot open memory of its own")
        self._staging.device.use()
        mapped = self._map(theirs, self._staging.device)
        try:
            if self._token(mapped, self._staging) != theirs.token:
                mapped.proven = False
                raise TransferError(
                    "the producer's token is not where it should be: it closed, or is another"
                )
            with self._lock:
                if not mapped.proven:
                    self._watch_end(mapped)
                    mapped.board = open_board(NAME, theirs.pid, theirs.board)
                    mapped.proven = True
        finally:
            if not mapped.proven:
                mapped.close()
        return _CudaCache(self._cache, self._staging, mapped)

    def _map(self, offer: CudaIpcOffer, device: Device) -> MappedCache:
        """The memory of the producer that made the offer; mapped once. Unmaps that of the dead."""
        with self._lock:
            for token, known in list(self._mapped.items()):
                if known.closed or not known.offer.is_alive():
                    known.close()
                    self._mapped.pop(token)
            mapped = self._mapped.get(offer.token)
            if mapped is None:
                mapped = MappedCache(offer, device)
                try:
                    mapped.map()
                except BaseException:
                    mapped.close()
                    raise
                self._mapped[offer.token] = mapped
            if mapped.offer != offer:
                raise TransferError("the producer made another offer before")
            return mapped

    def _token(self, mapped: MappedCache, staging: Staging) -> bytes:
        """The bytes where the token should be, read as blocks are."""
        wait, slots = Wait(Deadline.after(_TOKEN_S), mapped.check), staging.receiving
        with mapped.reading(), slots.take(wait.deadline, wait.look) as slot:
            pinned = slot.pinned[0]
            slot.stream.copy(pinned.address, mapped.token_address(), TOKEN_BYTES)
            wait.until(slot.stream.record().is_done)
            return pinned.array[:TOKEN_BYTES].tobytes()

    def _watch_end(self, mapped: MappedCache) -> None:
        """Unmap the memory when its process ends. Raises `PeerLost` if it has ended already."""
        try:
            pidfd = os.pidfd_open(mapped.offer.pid)
        except (OSError, AttributeError) as error:  # the kernel has none, or does not allow it
            if not mapped.offer.is_alive():
                raise PeerLost(GONE) from error
            logger.info("%s: a producer's end may be noticed late: %s", NAME, error)
            return  # `_map` finds the dead when it opens the next offer

        def ended() -> None:
            self._watched.discard(pidfd)
            mapped.close()
            os.close(pidfd)

        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        # Readable: the process has ended, even if its parent has not reaped it and the pid exists.
        if poll.poll(0) or not mapped.offer.is_alive():
            os.close(pidfd)
            raise PeerLost(GONE)
        self._watched.add(pidfd)
        self._watcher.add(pidfd, ended)
