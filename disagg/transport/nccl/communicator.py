"""Two workers joined by NCCL: a communicator, and the connection that orders its use.

The consumer asks for one fetch at a time, and both sides put the same chunks on their streams in
the same order: so no two requests of a pair can wait for each other. The connection is also how
each side learns at once that the other is gone; NCCL itself would wait for ever.

After any error a lane is good for nothing: the communicator is aborted, which ends what is on the
streams, and the connection closed, which tells the peer. Nothing here starts again by itself.
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
from disagg.transport.control.channel import Channel, has_ended, is_quiet, shut
from disagg.transport.control.data_channel import decode, encode
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device.base import Communicator, Communicators, Wait
from disagg.transport.device.copy_plan import Chunk, Move
from disagg.transport.device.staging import DEPTH, Slot, Staging

logger = logging.getLogger(__name__)

HELLO = "disagg-nccl/1"
STALLED = "nccl_stalled"
# Chunks given to the device ahead of what it has done: enough that it never waits for the host,
# few enough that the host never waits in CUDA's own queue.
_AHEAD = 2 * DEPTH
_TOKEN = 16
_SETTLE_S = 5.0
# What waits for a peer takes a part of the GPU, and CUDA may have the model's own work wait behind
# it. A chunk takes milliseconds. The producer waits twice as long: the consumer is to know why.
_STALL_S = 3.0

_Size = Annotated[int, msgspec.Meta(ge=1)]


class Join(msgspec.Struct, frozen=True, array_like=True):
    """The consumer would like to be joined. `chunk`: the most that it can take at once."""

    hello: str
    version: str
    chunk: _Size


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """The communicator's name; `token` comes over it first; `chunk` is what both sides use."""

    identity: bytes
    token: bytes
    chunk: _Size


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """The consumer is, and waits for the token."""


class NcclPull(msgspec.Struct, frozen=True, array_like=True):
    """Send this fetch next."""

    key: bytes


class Sending(msgspec.Struct, frozen=True, array_like=True):
    """So many bytes follow over NCCL; None if there is no such fetch (any more)."""

    size: int | None


class PeerCommunicator:
    """One end. Used by one thread at a time; `cut` by any."""

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
        asked = decode(channel.receive(deadline), Join)
        if (asked.hello, asked.version) != (HELLO, communicators.version):
            raise PeerRefused(
                f"NCCL differs: {HELLO} of {communicators.version} here, {asked.hello} of "
                f"{asked.version} there"
            )
        identity, token = communicators.new_id(), secrets.token_bytes(_TOKEN)
        invite = Invite(identity, token, min(asked.chunk, staging.chunk_bytes))
        channel.send(encode(invite), deadline)
        lane = cls._joined(staging, channel, communicators, invite, 0, deadline)
        with lane._or_close():
            decode(channel.receive(deadline), Joined)
            wait = Wait(deadline, lane._look_for_end)
            with staging.sending.take(deadline, wait.look) as slot:
                lane._exchange(slot, token, wait, sends=True)
        return lane

    @classmethod
    def join(
        cls, staging: Staging, channel: Channel, communicators: Communicators, deadline: Deadline
    ) -> PeerCommunicator:
        """The consumer's side. Raises `TransferError`."""
        channel.send(encode(Join(HELLO, communicators.version, staging.chunk_bytes)), deadline)
        invite = decode(channel.receive(deadline), Invite)
        if invite.chunk > staging.chunk_bytes or len(invite.token) != _TOKEN:
            raise PeerRefused("an invitation that makes no sense", reason="protocol")
        lane = cls._joined(staging, channel, communicators, invite, 1, deadline)
        wait = Wait(deadline, lane._look)
        # As in a fetch, the consumer has its slot before the producer takes one.
        with lane._or_close(), staging.receiving.take(deadline, wait.look) as slot:
            channel.send(encode(Joined()), deadline)
            if lane._exchange(slot, invite.token, wait, sends=False) != invite.token:
                raise DataCorrupt("the first bytes over NCCL were others", reason="nccl")
        return lane

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
            # Not more: the consumer may have joined, and say so, before we have.
            if has_ended(channel.sock):
                raise PeerLost("the peer left while NCCL was joining")

        communicator = communicators.join(invite.identity, rank, Wait(deadline, look))
        try:
            return cls(staging, channel, communicator, invite.chunk)
        except BaseException:
            communicator.abort()
            raise

    def _exchange(self, slot: Slot, token: bytes, wait: Wait, *, sends: bool) -> bytes:
        """The first bytes: they show that the way works, and make NCCL connect."""
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
            # NCCL's work ends without bytes when it fails; only its state tells.
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
            self._look()  # the same, and whether the producer was there to the end

    def _chunks(
        self, slot: Slot, move: Move, done: list[Event], wait: Wait, patience: float
    ) -> Iterator[tuple[Chunk, int]]:
        """Each chunk and the address of its buffer, once few enough are under way; ends when
        all of them are done."""
        if move.row_bytes.max() > self.chunk:
            raise TransferError(
                f"a row of {move.row_bytes.max()} bytes is more than the {self.chunk} that both "
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
        """After an error the communicator ends before the slot is believed to be at rest."""
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
        """Whether an idle lane can be used."""
        return not self._closed and is_quiet(self.channel.sock)

    def _look(self) -> None:
        """The peer has nothing to say while a fetch is under way: if it does, it ended."""
        if self._closed or not is_quiet(self.channel.sock):
            raise PeerLost("the peer left amid the blocks")
        self._communicator.check()

    def _look_for_end(self) -> None:
        """The producer's: its consumer may have all, and ask for the next, before we know."""
        if self._closed or has_ended(self.channel.sock):
            raise PeerLost("the peer left amid the blocks")
        self._communicator.check()

    def cut(self) -> None:
        """End whatever is under way, on this side and the other; for any thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._staging.device.use()
        self._communicator.abort()
        shut(self.channel.sock)

    def _quieten(self) -> None:
        """Wait until nothing of this lane's is on its stream."""
        try:
            Wait(Deadline.after(_SETTLE_S)).until(self._wire.record().is_done)
        except TransferError as error:
            logger.error("nccl: a lane's work on the device does not end: %s", error)

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it and give everything back."""
        self.cut()
        self._quieten()
        self._wire.close()
        self.channel.close()


def _await(chunk: Event, wait: Wait, patience: float) -> None:
    """Wait for a chunk. Raises `TransferError` (reason STALLED) if it takes longer than that."""
    soon = Deadline(min(wait.deadline.at, time.monotonic() + patience))
    try:
        Wait(soon, wait.look).until(chunk.is_done)
    except PeerLost as error:
        if error.reason != "deadline" or soon.at == wait.deadline.at:
            raise
        raise TransferError(f"no block came or went for {patience:g} s", STALLED) from error
