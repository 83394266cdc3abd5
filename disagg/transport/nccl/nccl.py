"""NCCL between GPUs of any hosts, through one communicator for each pair of workers.

A fetch is registered under a random key that works once; the control channel carries the key. The
consumer requests the fetch on the pair's own connection (`communicator.py`), which is authenticated
like the control channel, with a key of its own. Then both sides put its chunks on their streams:
the producer gathers one chunk while the previous one is sent, the consumer receives one while the
previous one is scattered. Chunks lie in the worker's staging memory, and never need more.

Joining takes some tenths of a second. It happens when two workers first meet, and again after an
error. After failed joins and stalls, each further try comes later than the last, and meanwhile
other transports are used. When a peer ends, the connection shows it at once, during and between
fetches, and the communicator's memory is freed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from disagg.errors import DataCorrupt, PeerLost, TransferError
from disagg.safe_logging import LimitedLog, foreign
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.control.channel import Channel, open_channel
from disagg.transport.control.data_channel import decoder, encode
from disagg.transport.control.listener import Listener
from disagg.transport.control.secret import secret_for
from disagg.transport.deadline import Deadline
from disagg.transport.device import copy_plan
from disagg.transport.device.base import Communicators, Wait
from disagg.transport.device.staging import Staging
from disagg.transport.host.fd_watcher import FdWatcher
from disagg.transport.nccl.communicator import (
    STALLED,
    NcclPull,
    PeerCommunicator,
    Sending,
    decode_pull,
    decode_sending,
)

NAME = "nccl"

logger = logging.getLogger(__name__)

_JOIN_S = 15.0
_MAX_STAGED = 4096
# A consumer may release a fetch before the producer has noticed that all bytes were sent.
_GRACE_S = 0.5
_LEAVE_S = 10.0
# NCCL keeps a thread for each id that is never joined, so joining must not be tried too often.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 3600.0


class _NcclOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where consumers join. life: identifies this life of the producer."""

    host: str
    port: int
    life: bytes


class _Staged(msgspec.Struct, frozen=True, array_like=True):
    """A fetch that the consumer can request. size: in bytes."""

    at: _NcclOffer
    key: bytes
    size: int


_decode_offer = decoder(_NcclOffer)
_decode_staged = decoder(_Staged)


def _secret(secret: bytes) -> bytes:
    return secret_for(b"disagg nccl lanes", secret)


@dataclass
class _Fetch:
    """A staged fetch. communicator: the one that sends it now."""

    blocks: Selection
    deadline: Deadline
    communicator: PeerCommunicator | None = None


class NcclSender:
    """Listens for consumers on exactly `host`; one thread each, asleep between fetches.

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
        self._log = LimitedLog(logger)
        self._communicators = _communicators(staging)
        self._listener: Listener | None = None
        self._offer: _NcclOffer | None = None
        if self._communicators is not None:
            self._listener = Listener(host, 0, self._secret, self._serve, name="disagg-nccl")
            at = self._listener
            self._offer = _NcclOffer(at.host, at.port, secrets.token_bytes(16))

    def offer(self) -> bytes:
        """Empty if no consumer could join."""
        return encode(self._offer) if self._offer else b""

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        if self._offer is None:
            raise TransferError("NCCL is not on offer", reason="no_transport")
        key = secrets.token_bytes(16)
        with self._changed:
            if self._closed or len(self._fetches) >= _MAX_STAGED:
                raise TransferError(f"closed, or {_MAX_STAGED} fetches staged", reason="nccl_full")
            self._fetches[key] = _Fetch(blocks, deadline)
        return encode(_Staged(self._offer, key, self._cache.num_bytes(blocks)))

    def finish(self, answer: bytes) -> None:
        self._drop(_decode_staged(answer).key, _GRACE_S)

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
        """Drop a fetch; when it returns, no communicator reads its blocks."""
        with self._changed:
            fetch = self._fetches.pop(key, None)
            if fetch is None or self._changed.wait_for(lambda: fetch.communicator is None, grace):
                return
            communicator = fetch.communicator
        if communicator is not None:
            communicator.cut()
        with self._changed:
            # vLLM frees the blocks next, so this wait must not give up.
            while not self._changed.wait_for(lambda: fetch.communicator is None, _LEAVE_S):
                logger.error(
                    "nccl: a communicator still reads blocks %.0f s after its end", _LEAVE_S
                )

    # ---- consumers -----------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> None:
        assert self._staging is not None
        assert self._communicators is not None
        communicator: PeerCommunicator | None = None
        try:
            opening = Deadline.after(_JOIN_S)
            self._staging.device.use()
            communicator = PeerCommunicator.invite(
                self._staging, channel, self._communicators, opening
            )
            while True:
                self._answer(communicator, decode_pull(channel.receive_at_rest(None)).key)
        except PeerLost as gone:
            logger.debug("a communicator ended: %s", gone)
        except TransferError as error:
            self._log.warning("a communicator failed: %s", foreign(error))
        finally:
            if communicator is not None:
                communicator.close()

    def _answer(self, communicator: PeerCommunicator, key: bytes) -> None:
        assert self._staging is not None
        with self._changed:
            fetch = self._fetches.get(key)
            if fetch is not None and fetch.communicator is None:
                fetch.communicator = communicator
            else:
                fetch = None
        if fetch is None:
            communicator.channel.send(encode(Sending(None)), Deadline.after(_JOIN_S))
            return
        try:
            with self._staging.sending.take(fetch.deadline, lambda: self._look(key)) as slot:
                move = copy_plan.gather(self._cache, fetch.blocks)
                communicator.channel.send(encode(Sending(move.size)), fetch.deadline)
                communicator.send(slot, move, fetch.deadline)
        finally:
            with self._changed:
                # A key works once.
                self._fetches.pop(key, None)
                fetch.communicator = None
                self._changed.notify_all()

    def _look(self, key: bytes) -> None:
        if key not in self._fetches:
            raise PeerLost("the fetch ended before it had memory to stage in")


class NcclReceiver:
    """Joins each producer at the first fetch; its fetches from one producer run one at a time."""

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
            at = _decode_offer(offer)
            if self._peer(at).communicator is not None:
                return self
            with self._joined(at, Deadline.after(_JOIN_S)):
                return self
        except TransferError as error:
            logger.warning("cannot be joined over NCCL: %s", foreign(error))
            return None

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        """Nothing to do without the answer."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        staged = _decode_staged(answer)
        move = copy_plan.scatter(self._cache, job.blocks)
        if staged.size != move.size:
            raise DataCorrupt(f"{staged.size} bytes instead of {move.size}", reason="nccl_size")
        assert self._staging is not None
        # First, so that no send or receive waits on a GPU for the end of one of our steps.
        if job.after is not None:
            Wait(job.deadline).until(job.after.is_done)
        with (
            self._joined(staged.at, job.deadline) as communicator,
            # Before the producer takes its slot, so that the sender never waits for the receiver.
            self._staging.receiving.take(job.deadline) as slot,
        ):
            communicator.channel.send(encode(NcclPull(staged.key)), job.deadline)
            sending = decode_sending(communicator.channel.receive(job.deadline)).size
            if sending is None:
                raise _NoSuchFetch("the producer has no such fetch")
            if sending != move.size:
                raise DataCorrupt(f"{sending} bytes instead of {move.size}", "nccl_size")
            communicator.receive(slot, move, job.deadline)
        self._peer(staged.at).pauses = 0
        return move.size

    def close(self) -> None:
        self._watch.close()
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            if peer.communicator is not None:
                peer.communicator.cut()  # a fetch that uses it fails
            with peer.busy:
                peer.close()

    @contextlib.contextmanager
    def _joined(self, at: _NcclOffer, deadline: Deadline) -> Iterator[PeerCommunicator]:
        """The communicator to this producer, for one fetch; joins if needed. Errors end it."""
        peer = self._peer(at)
        if not peer.busy.acquire(timeout=deadline.left()):
            raise PeerLost(
                "other fetches used the communicator until the deadline", reason="deadline"
            )
        try:
            communicator = peer.communicator
            if communicator is not None:
                self._watch.remove(communicator.channel.sock.fileno())
            if communicator is None or not communicator.is_open:
                peer.close()
                communicator = peer.communicator = self._join(at, peer, deadline)
            try:
                yield communicator
            except _NoSuchFetch:
                raise
            except BaseException as error:
                peer.close()
                if isinstance(error, TransferError) and error.reason == STALLED:
                    peer.pause()
                raise
            finally:
                if peer.communicator is not None:
                    self._rest(at, peer, communicator)
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
        staging, communicators = self._staging, self._communicators
        assert staging is not None
        assert communicators is not None
        peer.check_pause()
        staging.device.use()
        opening = Deadline(min(deadline.at, time.monotonic() + _JOIN_S))
        try:
            channel, invite = open_channel(
                at.host,
                at.port,
                self._secret,
                opening,
                lambda one: PeerCommunicator.ask(staging, one, communicators, opening),
            )
            try:
                communicator = PeerCommunicator.join(
                    staging, channel, communicators, invite, opening
                )
            except BaseException:
                channel.close()
                raise
        except TransferError:
            peer.pause()
            raise
        logger.info("joined %s:%d over NCCL", at.host, at.port)
        return communicator

    def _rest(self, at: _NcclOffer, peer: _Peer, communicator: PeerCommunicator) -> None:
        """Between fetches: end the communicator at once when the producer ends."""

        def left() -> None:
            # A fetch that uses it finds out by itself.
            if peer.busy.acquire(blocking=False):
                try:
                    if peer.communicator is communicator and not communicator.is_open:
                        peer.close()
                        logger.info("%s:%d left; its NCCL communicator ends", at.host, at.port)
                finally:
                    peer.busy.release()

        self._watch.add(communicator.channel.sock.fileno(), left)


class _Peer:
    """One life of a producer: its communicator, or when to try to join again."""

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.communicator: PeerCommunicator | None = None
        self.pauses = 0
        self._not_before = time.monotonic()  # also its age: new entries are kept

    def close(self) -> None:
        """End the communicator, if any."""
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            communicator.close()

    def pause(self) -> None:
        """After a failure: double the time until the next try."""
        seconds = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.pauses)
        self.pauses += 1
        self._not_before = time.monotonic() + seconds

    def check_pause(self) -> None:
        """Raise `TransferError` before the next try is due."""
        left = self._not_before - time.monotonic()
        if left > 0:
            raise TransferError(
                f"NCCL failed {self.pauses} times in a row, not tried for {left:.0f} s more",
                reason="nccl_paused",
            )

    def is_forgotten(self) -> bool:
        """Whether it can be dropped: no communicator, and no recent failure to remember."""
        old = time.monotonic() > self._not_before + _LONGEST_PAUSE_S
        return self.communicator is None and old and not self.busy.locked()


class _NoSuchFetch(TransferError):
    """The communicator can be used on."""

    reason = "nccl_gone"


def _communicators(staging: Staging | None) -> Communicators | None:
    if staging is None:
        return None
    try:
        return staging.device.communicators()
    except TransferError as error:
        logger.info("%s is not usable: %s", NAME, error)
        return None
