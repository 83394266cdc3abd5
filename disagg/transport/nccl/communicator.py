"""Two workers joined by NCCL: a communicator, and the connection that orders its use.

The consumer requests one fetch at a time, and both sides put the same chunks on their streams in
the same order, so no two fetches of a pair can deadlock. The connection also shows each side at
once that the other has ended; NCCL itself would wait forever.

After any error both are closed: aborting the communicator ends the work on the streams, and closing
the connection informs the peer. Nothing here rejoins by itself.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from disagg.errors import DataCorrupt, PeerLost, PeerRefused, TransferError
from disagg.safe_logging import foreign
from disagg.transport.control.channel import Channel, has_ended, is_quiet, shut
from disagg.transport.control.data_channel import decoder, encode
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device.base import Communicator, Communicators, Wait
from disagg.transport.device.copy_plan import Chunk, Move
from disagg.transport.device.staging import DEPTH, Slot, Staging

logger = logging.getLogger(__name__)

HELLO = "disagg-nccl/1"
STALLED = "nccl_stalled"
# Chunks queued on the device: enough that the device never waits for the host, few enough that the
# host never blocks on CUDA's own queue.
_AHEAD = 2 * DEPTH
_TOKEN = 16
_SETTLE_S = 5.0
# An NCCL kernel that waits for its peer occupies a part of the GPU, and CUDA may queue the model's
# work behind it. A chunk takes milliseconds. The producer waits twice as long, so that the consumer
# fails first and reports the reason.
_STALL_S = 3.0

_Size = Annotated[int, msgspec.Meta(ge=1)]


class Join(msgspec.Struct, frozen=True, array_like=True):
    """The consumer asks to be joined. chunk: the most bytes that it can receive at once."""

    hello: str
    version: str
    chunk: _Size


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """identity: NCCL's id of the communicator. token: the first bytes sent over it. chunk: bytes
    per chunk, for both sides."""

    identity: bytes
    token: bytes
    chunk: _Size


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """The consumer has joined, and waits for the token."""


class NcclPull(msgspec.Struct, frozen=True, array_like=True):
    """Send this fetch next."""

    key: bytes


class Sending(msgspec.Struct, frozen=True, array_like=True):
    """size: how many bytes follow over NCCL; None if there is no such fetch (any more)."""

    size: int | None


decode_pull = decoder(NcclPull)
decode_sending = decoder(Sending)
_decode_join = decoder(Join)
_decode_joined = decoder(Joined)
_decode_invite = decoder(Invite)


class PeerCommunicator:
    """One end. Used by one thread at a time, except `cut`."""

    def __init__(
        self, staging: Staging, channel: Channel, communicator: Communicator, chunk: int
    ) -> None:
        self._staging, self.channel = staging, channel
        self._communicator, self.chunk = communicator, chunk
        self._wire = staging.device.stream(launches=False)
        self._closing = threading.Lock()
        self._closed = False

    # ---- beginning -------------------------------------------------------------------------

    @classmethod
    def invite(
        cls, staging: Staging, channel: Channel, communicators: Communicators, deadline: Deadline
    ) -> PeerCommunicator:
        """The producer's side of the opening. Raises `TransferError`."""
        asked = _decode_join(channel.receive(deadline))
        if (asked.hello, asked.version) != (HELLO, communicators.version):
            raise PeerRefused(
                f"NCCL differs: {HELLO} of {communicators.version} here, {foreign(asked.hello)} of "
                f"{foreign(asked.version)} there"
            )
        identity, token = communicators.new_id(), secrets.token_bytes(_TOKEN)
        invite = Invite(identity, token, min(asked.chunk, staging.chunk_bytes))
        channel.send(encode(invite), deadline)
        peer = cls._joined(staging, channel, communicators, invite, 0, deadline)
        with peer._or_close():
            _decode_joined(channel.receive(deadline))
            wait = Wait(deadline, peer._look_for_end)
            with staging.sending.take(deadline, wait.look) as slot:
                peer._exchange(slot, token, wait, sends=True)
        return peer

    @staticmethod
    def ask(
        staging: Staging, channel: Channel, communicators: Communicators, deadline: Deadline
    ) -> Invite:
        """The consumer's side, before NCCL is called. Raises `TransferError`."""
        channel.send(encode(Join(HELLO, communicators.version, staging.chunk_bytes)), deadline)
        invite = _decode_invite(channel.receive(deadline))
        if invite.chunk > staging.chunk_bytes or len(invite.token) != _TOKEN:
            raise PeerRefused("an implausible invitation", reason="protocol")
        return invite

    @classmethod
    def join(
        cls,
        staging: Staging,
        channel: Channel,
        communicators: Communicators,
        invite: Invite,
        deadline: Deadline,
    ) -> PeerCommunicator:
        """The consumer's side, after `ask`. Raises `TransferError`."""
        peer = cls._joined(staging, channel, communicators, invite, 1, deadline)
        wait = Wait(deadline, peer._look)
        # As in a fetch, the consumer has its slot before the producer takes one.
        with peer._or_close(), staging.receiving.take(deadline, wait.look) as slot:
            channel.send(encode(Joined()), deadline)
            if peer._exchange(slot, invite.token, wait, sends=False) != invite.token:
                raise DataCorrupt("the first bytes over NCCL were wrong", reason="nccl")
        return peer

    @classmethod
    def _joined(
        cls,
        staging: Staging,
        channel: Channel,
        communicators: Communicators,
        invite: Invite,
        rank: int,
        deadline: Deadline,
    ) -> PeerCommunicator:
        def look() -> None:
            # Only that: the consumer may join, and report it, before we have.
            if has_ended(channel.sock):
                raise PeerLost("the peer disconnected while NCCL was joining")

        communicator = communicators.join(invite.identity, rank, Wait(deadline, look))
        try:
            return cls(staging, channel, communicator, invite.chunk)
        except BaseException:
            communicator.abort()
            raise

    def _exchange(self, slot: Slot, token: bytes, wait: Wait, *, sends: bool) -> bytes:
        """Move the token: it proves that the pair works, and makes NCCL connect."""
        memory, host = slot.chunks[0].address, slot.pinned[0]
        with self._using(slot):
            if sends:
                host.array[:_TOKEN] = np.frombuffer(token, np.uint8)
                self._wire.copy(memory, host.address, _TOKEN)
                self._communicator.send(memory, _TOKEN, self._wire, wait)
            else:
                self._communicator.receive(memory, _TOKEN, self._wire, wait)
                self._wire.copy(host.address, memory, _TOKEN)
            wait.until(self._wire.record().is_done)
            self._communicator.check()
        return host.array[:_TOKEN].tobytes()

    # ---- fetches ---------------------------------------------------------------------------

    def send(self, slot: Slot, move: Move, deadline: Deadline) -> None:
        """Send a selection; when it returns or raises, its blocks are no longer read."""
        with self._using(slot):
            wait = Wait(deadline, self._look_for_end)
            slot.stream.load(move)
            sent: list[Event] = []
            for chunk, at in self._chunks(slot, move, sent, wait, 2 * _STALL_S):
                if len(sent) >= DEPTH:
                    slot.stream.wait(sent[-DEPTH])
                slot.stream.launch(chunk, to_shift=at - chunk.at)
                self._wire.wait(slot.stream.record())
                self._communicator.send(at, chunk.size, self._wire, wait)
                sent.append(self._wire.record())
            # NCCL's work also ends when it fails; only its state shows that.
            self._communicator.check()

    def receive(self, slot: Slot, move: Move, deadline: Deadline) -> None:
        """Fill a selection; when it returns or raises, nothing writes to it."""
        with self._using(slot):
            wait = Wait(deadline, self._look)
            slot.stream.load(move)
            filled: list[Event] = []
            for chunk, at in self._chunks(slot, move, filled, wait, _STALL_S):
                if len(filled) >= DEPTH:
                    self._wire.wait(filled[-DEPTH])
                self._communicator.receive(at, chunk.size, self._wire, wait)
                slot.stream.wait(self._wire.record())
                slot.stream.launch(chunk, from_shift=at - chunk.at)
                filled.append(slot.stream.record())
            self._look()  # the same, and that the producer stayed connected to the end

    def _chunks(
        self, slot: Slot, move: Move, done: list[Event], wait: Wait, patience: float
    ) -> Iterator[tuple[Chunk, int]]:
        """Each chunk and the address of its buffer, with at most `_AHEAD` chunks under way; returns
        when all of them are done."""
        if move.row_bytes.max() > self.chunk:
            raise TransferError(
                f"a row of {move.row_bytes.max()} bytes exceeds the {self.chunk} bytes that both "
                "sides stage; raise the smaller transfer.staging_bytes",
                reason="nccl_chunk",
            )
        for number, chunk in enumerate(move.chunks(self.chunk)):
            if number >= _AHEAD:
                _await(done[number - _AHEAD], wait, patience)
            yield chunk, slot.chunks[number % DEPTH].address
        for event in done[-_AHEAD:]:
            _await(event, wait, patience)

    @contextlib.contextmanager
    def _using(self, slot: Slot) -> Iterator[None]:
        """After an error, end the communicator before the slot counts as idle."""
        try:
            yield
        except BaseException:
            self.cut()
            with contextlib.suppress(TransferError):
                slot.stream.wait(self._wire.record())
            raise

    # ---- ends ------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it can be used for the next fetch."""
        return not self._closed and is_quiet(self.channel.sock)

    def _look(self) -> None:
        """For the consumer. The producer sends no message during a fetch, so news is its end."""
        if self._closed or not is_quiet(self.channel.sock):
            raise PeerLost("the peer disconnected during the transfer")
        self._communicator.check()

    def _look_for_end(self) -> None:
        """For the producer. Its consumer may request the next fetch before this one is done."""
        if self._closed or has_ended(self.channel.sock):
            raise PeerLost("the peer disconnected during the transfer")
        self._communicator.check()

    def cut(self) -> None:
        """End what is under way on both sides. Any thread may call it."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._staging.device.use()
        self._communicator.abort()
        shut(self.channel.sock)

    def _quieten(self) -> None:
        """Wait until its stream is idle."""
        try:
            Wait(Deadline.after(_SETTLE_S)).until(self._wire.record().is_done)
        except TransferError as error:
            logger.error("nccl: work of a communicator on the device does not end: %s", error)

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it and free everything."""
        self.cut()
        self._quieten()
        self._wire.close()
        self.channel.close()


def _await(chunk: Event, wait: Wait, patience: float) -> None:
    """Wait for a chunk. Raises `TransferError` (reason STALLED) after `patience` seconds."""
    soon = Deadline(min(wait.deadline.at, time.monotonic() + patience))
    try:
        Wait(soon, wait.look).until(chunk.is_done)
    except PeerLost as error:
        if error.reason != "deadline" or soon.at == wait.deadline.at:
            raise
        raise TransferError(f"no block was moved for {patience:g} s", STALLED) from error
