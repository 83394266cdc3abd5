"""NCCL between GPUs of any hosts, through one communicator for each pair of workers.

A fetch is staged under a random key, told over the control channel, that works once. The consumer
asks for it on the pair's own connection (`nccl_lane.py`), which was authenticated like the control
channel but under another context; then both sides put its chunks on their streams: the producer
gathers one while the one before is sent, the consumer receives one while the one before is
scattered. What is gathered and scattered lies in the worker's staging memory, never in more.

Joining takes some tenths of a second. It is done when two workers first meet, and again after an
error; where it failed, or blocks stood still, later each time, and other transports are used. A
side whose peer ends learns it by the connection, whether a fetch is under way or not, and gives the
communicator's memory back.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from disagg.errors import DataCorrupt, PeerLost, TransferError
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.control.channel import Channel, tune
from disagg.transport.control.data_channel import decode, encode, secret_for
from disagg.transport.control.listener import Listener
from disagg.transport.deadline import Deadline
from disagg.transport.device import copy_plan
from disagg.transport.device.base import Communicators, Wait
from disagg.transport.device.staging import Staging
from disagg.transport.host.fd_watcher import FdWatcher
from disagg.transport.nccl import communicator
from disagg.transport.nccl.communicator import NcclPull, PeerCommunicator, Sending

NAME = "nccl"

logger = logging.getLogger(__name__)

_JOIN_S = 15.0
_MAX_STAGED = 4096
# A fetch whose bytes have all arrived is released before its producer has looked.
_GRACE_S = 0.5
_LEAVE_S = 10.0
# NCCL keeps a thread for each id of its own that nobody joins: it must not be asked too often.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 3600.0


class _NcclOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where lanes are joined, and what this life of the producer is called."""

    host: str
    port: int
    life: bytes


class _Staged(msgspec.Struct, frozen=True, array_like=True):
    """What waits for the consumer."""

    at: _NcclOffer
    key: bytes
    size: int


def _secret(secret: bytes) -> bytes:
    return secret_for(b"disagg nccl lanes", secret)


@dataclass
class _Fetch:
    """One staged fetch, and the lane that reads the cache for it now."""

    blocks: Selection
    deadline: Deadline
    lane: PeerCommunicator | None = None


class NcclSender:
    """Listens for lanes on exactly `host`; a thread for each, asleep between fetches.

    Without `staging` (a cache in host memory) it offers nothing. Raises `ConfigError` for a host
    that is not one address, `OSError` if it cannot be bound.
    """

    name = NAME

    def __init__(
        self, cache: BlockCache, staging: Staging | None, host: str, secret: bytes
    ) -> None:
        self._cache, self._staging, self._secret = cache, staging, _secret(secret)
        self._fetches: dict[bytes, _Fetch] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._communicators = _communicators(staging)
        self._listener: Listener | None = None
        self._offer: _NcclOffer | None = None
        if self._communicators is not None:
            self._listener = Listener(host, 0, self._serve, name="disagg-nccl")
            at = self._listener
            self._offer = _NcclOffer(at.host, at.port, secrets.token_bytes(16))

    def offer(self) -> bytes:
        """Empty where no lane could be joined."""
        return encode(self._offer) if self._offer else b""

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        if self._offer is None:
            raise TransferError("nothing is on offer", reason="no_transport")
        key = secrets.token_bytes(16)
        with self._changed:
            if self._closed or len(self._fetches) >= _MAX_STAGED:
                raise TransferError(f"closed, or {_MAX_STAGED} fetches staged", reason="nccl_full")
            self._fetches[key] = _Fetch(blocks, deadline)
        return encode(_Staged(self._offer, key, self._cache.num_bytes(blocks)))

    def finish(self, answer: bytes) -> None:
        self._drop(decode(answer, _Staged).key, _GRACE_S)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            keys = list(self._fetches)
        if self._listener is not None:
            self._listener.close()
        for key in keys:
            self._drop(key, 0)
        if self._listener is not None:
            self._listener.join(_LEAVE_S)

    def _drop(self, key: bytes, grace: float) -> None:
        """Forget a fetch; when it returns, no lane reads its blocks."""
        with self._changed:
            fetch = self._fetches.pop(key, None)
            if fetch is None or self._changed.wait_for(lambda: fetch.lane is None, grace):
                return
            lane = fetch.lane
        if lane is not None:
            lane.cut()
        with self._changed:
            # The blocks are freed next: to give up here would break the promise.
            while not self._changed.wait_for(lambda: fetch.lane is None, _LEAVE_S):
                logger.error("nccl: a lane still reads blocks %.0f s after its end", _LEAVE_S)

    # ---- lanes -----------------------------------------------------------------------------

    def _serve(self, sock: socket.socket) -> None:
        assert self._staging is not None
        assert self._communicators is not None
        lane: PeerCommunicator | None = None
        try:
            tune(sock)
            opening = Deadline.after(_JOIN_S)
            channel = Channel.accept(sock, self._secret, opening)
            self._staging.device.use()
            lane = PeerCommunicator.invite(self._staging, channel, self._communicators, opening)
            while True:
                self._answer(lane, decode(channel.receive(None), NcclPull).key)
        except PeerLost as gone:
            logger.debug("a lane ended: %s", gone)
        except TransferError as error:
            logger.warning("a lane broke: %s", error)
        finally:
            if lane is not None:
                lane.close()

    def _answer(self, lane: PeerCommunicator, key: bytes) -> None:
        assert self._staging is not None
        with self._changed:
            fetch = self._fetches.get(key)
            if fetch is not None and fetch.lane is None:
                fetch.lane = lane
            else:
                fetch = None
        if fetch is None:
            lane.channel.send(encode(Sending(None)), Deadline.after(_JOIN_S))
            return
        try:
            with self._staging.sending.take(fetch.deadline, lambda: self._look(key)) as slot:
                move = copy_plan.gather(self._cache, fetch.blocks)
                lane.channel.send(encode(Sending(move.size)), fetch.deadline)
                lane.send(slot, move, fetch.deadline)
        finally:
            with self._changed:
                # A key works once.
                self._fetches.pop(key, None)
                fetch.lane = None
                self._changed.notify_all()

    def _look(self, key: bytes) -> None:
        if key not in self._fetches:
            raise PeerLost("the fetch ended before it had memory to stage in")


class NcclReceiver:
    """Joins producers when it first meets them, and fetches from each one after the other."""

    name = NAME

    def __init__(self, cache: BlockCache, staging: Staging | None, secret: bytes) -> None:
        self._cache, self._staging, self._secret = cache, staging, _secret(secret)
        self._communicators = _communicators(staging)
        self._peers: dict[_NcclOffer, _Peer] = {}
        self._lock = threading.Lock()
        self._watch = FdWatcher("disagg-nccl-watch")
        self._closed = False

    def open(self, offer: bytes) -> NcclReceiver | None:
        if not offer or self._communicators is None:
            return None
        try:
            at = decode(offer, _NcclOffer)
            if self._peer(at).lane is not None:
                return self
            with self._lane(at, Deadline.after(_JOIN_S)):
                return self
        except TransferError as error:
            logger.warning("cannot be joined over NCCL: %s", error)
            return None

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        """Nothing can be done without the answer."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        staged = decode(answer, _Staged)
        move = copy_plan.scatter(self._cache, job.blocks)
        if staged.size != move.size:
            raise DataCorrupt(f"{staged.size} bytes where {move.size} were due", reason="nccl_size")
        assert self._staging is not None
        # First, so that no send or receive waits on either GPU for the end of a step of ours.
        if job.after is not None:
            Wait(job.deadline).until(job.after.is_done)
        with (
            self._lane(staged.at, job.deadline) as lane,
            # Before the producer takes its own: who sends then never waits for who receives.
            self._staging.receiving.take(job.deadline) as slot,
        ):
            lane.channel.send(encode(NcclPull(staged.key)), job.deadline)
            sending = decode(lane.channel.receive(job.deadline), Sending).size
            if sending is None:
                raise _NoSuchFetch("the producer has no such fetch")
            if sending != move.size:
                raise DataCorrupt(f"{sending} bytes where {move.size} were due", "nccl_size")
            lane.receive(slot, move, job.deadline)
        self._peer(staged.at).pauses = 0
        return move.size

    def close(self) -> None:
        self._watch.close()
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            if peer.lane is not None:
                peer.lane.cut()  # whoever uses it gives up
            with peer.busy:
                peer.close()

    @contextlib.contextmanager
    def _lane(self, at: _NcclOffer, deadline: Deadline) -> Iterator[PeerCommunicator]:
        """The lane to this producer, for one fetch; joined if there is none. An error ends it."""
        peer = self._peer(at)
        if not peer.busy.acquire(timeout=deadline.left()):
            raise PeerLost("other fetches were first until the deadline", reason="deadline")
        try:
            lane = peer.lane
            if lane is not None:
                self._watch.remove(lane.channel.sock.fileno())
            if lane is None or not lane.is_open:
                peer.close()
                lane = peer.lane = self._join(at, peer, deadline)
            try:
                yield lane
            except _NoSuchFetch:
                raise
            except BaseException as error:
                peer.close()
                if isinstance(error, TransferError) and error.reason == communicator.STALLED:
                    peer.pause()
                raise
            finally:
                if peer.lane is not None:
                    self._rest(at, peer, lane)
        finally:
            peer.busy.release()

    def _peer(self, at: _NcclOffer) -> _Peer:
        with self._lock:
            if self._closed:
                raise TransferError("closed", reason="nccl_closed")
            for known, peer in list(self._peers.items()):
                if peer.is_forgotten():
                    del self._peers[known]
            return self._peers.setdefault(at, _Peer())

    def _join(self, at: _NcclOffer, peer: _Peer, deadline: Deadline) -> PeerCommunicator:
        assert self._staging is not None
        assert self._communicators is not None
        peer.check_pause()
        self._staging.device.use()
        opening = Deadline(min(deadline.at, time.monotonic() + _JOIN_S))
        try:
            channel = Channel.connect(at.host, at.port, self._secret, opening)
            try:
                lane = PeerCommunicator.join(self._staging, channel, self._communicators, opening)
            except BaseException:
                channel.close()
                raise
        except TransferError:
            peer.pause()
            raise
        logger.info("joined %s:%d over NCCL", at.host, at.port)
        return lane

    def _rest(self, at: _NcclOffer, peer: _Peer, lane: PeerCommunicator) -> None:
        """Between fetches: if the producer ends, so does the lane, at once."""

        def left() -> None:
            # Who has it in use finds out without us.
            if peer.busy.acquire(blocking=False):
                try:
                    if peer.lane is lane and not lane.is_open:
                        peer.close()
                        logger.info("%s:%d left, and its NCCL lane ends", at.host, at.port)
                finally:
                    peer.busy.release()

        self._watch.add(lane.channel.sock.fileno(), left)


class _Peer:
    """One life of a producer: its lane, and when to try again if there is none."""

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.lane: PeerCommunicator | None = None
        self.pauses = 0
        self._not_before = time.monotonic()  # also its age: it is not forgotten while it is new

    def close(self) -> None:
        """End the lane, if there is one."""
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.close()

    def pause(self) -> None:
        """It failed: the next try comes later than the last one did."""
        seconds = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.pauses)
        self.pauses += 1
        self._not_before = time.monotonic() + seconds

    def check_pause(self) -> None:
        """Raise `TransferError` while it is too early."""
        left = self._not_before - time.monotonic()
        if left > 0:
            raise TransferError(
                f"NCCL failed {self.pauses} times in a row, not tried for {left:.0f} s more",
                reason="nccl_paused",
            )

    def is_forgotten(self) -> bool:
        """Whether nothing is lost without it."""
        old = time.monotonic() > self._not_before + _LONGEST_PAUSE_S
        return self.lane is None and old and not self.busy.locked()


class _NoSuchFetch(TransferError):
    """The lane is as good as before."""

    reason = "nccl_gone"


def _communicators(staging: Staging | None) -> Communicators | None:
    if staging is None:
        return None
    try:
        return staging.device.communicators()
    except TransferError as error:
        logger.info("%s is not usable: %s", NAME, error)
        return None
