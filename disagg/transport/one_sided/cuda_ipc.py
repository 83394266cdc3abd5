"""CUDA IPC: the consumer's GPU reads blocks straight out of the memory of the producer's GPU.

For two processes of one host whose GPUs reach each other, or are one. The producer exports the
allocations that its cache lies in, the consumer maps them once, and one kernel copies from blocks
to blocks; nothing is staged, and the producer takes no part. Whether that works between these two
(GPUs that see each other, allocations that can be shared) depends on too much to be guessed: the
consumer reads a token in the producer's device memory as it reads blocks.

It must never keep a dead producer's memory mapped: until we let go, the GPU has it for nobody, and
the engine that is started anew does not fit. And it must never unmap what a kernel still reads: the
fault would end this whole process's use of its GPU. Nor does it ever wait for the whole device.

The lease is read from the producer's board, as with process memory; if that cannot be, the producer
is asked, and what was read then needs no proof here, as there.
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
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device import copy_plan
from disagg.transport.device.base import Device, DeviceMemory, Wait
from disagg.transport.device.staging import Staging
from disagg.transport.host.fd_watcher import FdWatcher
from disagg.transport.host.process_identity import start_time
from disagg.transport.host.ptrace_scope import AllowedReaders
from disagg.transport.one_sided import offers
from disagg.transport.one_sided.cuda_mapping import GONE, TOKEN_BYTES, CudaIpcOffer, Mapped
from disagg.transport.one_sided.lease_board import LeaseBoard
from disagg.transport.one_sided.remote_lease_board import BoardReceiver, open_board, posting

logger = logging.getLogger(__name__)

NAME = "cuda_ipc"
# What was launched cannot be stopped, so it must end soon: so much takes milliseconds.
_CHUNK_BYTES = 256 << 20
_AHEAD = 2
_TOKEN_S = 5.0
# CUDA cuts small allocations out of blocks of this size, and shares the whole block.
_PROBE_BYTES = 2 << 20


class CudaIpcSender:
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
        """Empty where nobody could read this cache: host memory, or what cannot be shared."""
        return self._offer

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        return offers.encode(self._token, blocks)

    def finish(self, answer: bytes) -> None:
        """Nothing was staged."""

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
            _write(self._staging, probe.address, bytes(TOKEN_BYTES))  # old offers are found out
        except TransferError as error:
            logger.info("%s: the token could not be taken back: %s", NAME, error)
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
                posting=posting(self._board),
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


class CudaIpcReceiver(BoardReceiver[Mapped]):
    """Reads into the cache: one kernel, no staging."""

    name, one_sided = NAME, True

    def __init__(self, cache: BlockCache, staging: Staging | None) -> None:
        super().__init__(cache)
        self._staging = staging
        self._reasons = offers.Reasons(NAME)
        self._producers: dict[bytes, Mapped] = {}
        self._watch = FdWatcher("disagg-cuda-ipc-watch")
        self._ends: set[int] = set()  # pidfds that are watched
        self._lock = threading.Lock()

    def usable(self, offer: bytes) -> bool:
        return self._staging is not None and self._reasons.none(self._problem, offer)

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        """What is read, only the answer says."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        producer, theirs = offers.decode(answer, self._producers, self._cache, job.blocks)
        return self._copy(producer, theirs, job)

    def close(self) -> None:
        """Forget the producers; those that are being read, when that has ended."""
        with self._lock:
            for end in list(self._ends):
                if self._watch.remove(end):
                    os.close(end)
            self._watch.close()
            for producer in self._producers.values():
                producer.let_go()
            self._producers, self._offered = {}, {}

    def _copy(self, producer: Mapped, theirs: Selection, job: FetchJob) -> int:
        assert self._staging is not None
        slots, wait = self._staging.receiving, Wait(job.deadline, producer.look)
        # The slot is given back first, and that only when its work has ended.
        with producer.reading(), slots.take(job.deadline, producer.look) as slot:
            addresses = producer.addresses()
            try:
                move = copy_plan.across(self._cache, job.blocks, producer.cache, theirs, addresses)
            except ValueError as error:
                raise DataCorrupt(str(error), reason="range") from error
            slot.stream.load(move)
            # Here, not on the stream: what waits there can't be taken back at the deadline.
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

    def _problem(self, offer: bytes) -> str | None:
        """Why this producer cannot be read; None if a read of it succeeded."""
        if self._staging is None:
            return "the cache is host memory"
        if not offer:
            return "the producer's cache is host memory, or cannot be shared"
        theirs = msgspec.msgpack.decode(offer, type=CudaIpcOffer)
        problem = theirs.problem()
        if problem is not None:
            return problem
        if (theirs.pid, theirs.started) == (os.getpid(), start_time(os.getpid())):
            return "a process cannot open memory of its own"
        self._staging.device.use()
        producer = self._known(theirs, self._staging.device)
        try:
            if self._token(producer, self._staging) != theirs.token:
                producer.proven = False
                return "the producer's token is not where it should be: it closed, or is another"
            with self._lock:
                if not producer.proven:
                    self._notice_end(producer)
                    producer.board = open_board(NAME, theirs.pid, theirs.posting)
                    producer.proven = True
                self._offered[offer] = producer
        finally:
            if not producer.proven:
                producer.let_go()
        return None

    def _known(self, offer: CudaIpcOffer, device: Device) -> Mapped:
        """The producer that made the offer, mapped."""
        with self._lock:
            for token, known in list(self._producers.items()):
                if known.gone or not known.offer.is_alive():
                    known.let_go()
                    self._producers.pop(token)
            for offered, known in list(self._offered.items()):
                if known.gone:
                    self._offered.pop(offered)
            producer = self._producers.get(offer.token)
            if producer is None:
                producer = Mapped(offer, device)
                try:
                    producer.map()
                except BaseException:
                    producer.let_go()
                    raise
                self._producers[offer.token] = producer
            if producer.offer != offer:
                raise TransferError("the producer made another offer before")
            return producer

    def _token(self, producer: Mapped, staging: Staging) -> bytes:
        """What lies where its token should be, read as blocks are."""
        wait, slots = Wait(Deadline.after(_TOKEN_S), producer.look), staging.receiving
        with producer.reading(), slots.take(wait.deadline, wait.look) as slot:
            pinned = slot.pinned[0]
            slot.stream.copy(pinned.address, producer.token_address(), TOKEN_BYTES)
            wait.until(slot.stream.record().is_done)
            return pinned.array[:TOKEN_BYTES].tobytes()

    def _notice_end(self, producer: Mapped) -> None:
        """Let go of it when its process ends. Raises `PeerLost` if it has ended by now."""
        try:
            end = os.pidfd_open(producer.offer.pid)
        except (OSError, AttributeError) as error:  # none in this kernel, or not allowed
            if not producer.offer.is_alive():
                raise PeerLost(GONE) from error
            logger.info("%s: the end of a producer may be noticed late: %s", NAME, error)
            return  # `_known` looks for the dead

        def ended() -> None:
            self._ends.discard(end)
            producer.let_go()
            os.close(end)

        poll = select.poll()
        poll.register(end, select.POLLIN)
        # Readable: it has ended, although nobody has waited for it and its pid is still taken.
        if poll.poll(0) or not producer.offer.is_alive():
            os.close(end)
            raise PeerLost(GONE)
        self._ends.add(end)
        self._watch.add(end, ended)
