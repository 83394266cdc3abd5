"""TCP between any two hosts: the producer streams blocks over the consumer's data connections.

A fetch is registered under a random key that works once per stream; the control channel carries the
key. The consumer requests the fetch on its own data connections, which are authenticated like the
control channel, with a key of their own. Per stream it gets the size, the bytes straight from cache
to cache, and their signed checksum. The checksum detects damage, not forgery: the network has to
prevent eavesdropping and tampering.

The producer reads blocks of a fetch only between `send` and the return of `finish`, which cuts
the fetch's connections and waits until their threads have left the cache.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from dataclasses import dataclass, field

from disagg.errors import DataCorrupt, PeerLost, PeerRefused, TransferError
from disagg.safe_logging import LimitedLog, foreign
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.control.channel import Channel, shut
from disagg.transport.control.listener import Listener
from disagg.transport.deadline import Deadline
from disagg.transport.device.staging import Staging
from disagg.transport.host.helper_threads import cores
from disagg.transport.tcp import messages as w
from disagg.transport.tcp.pool import Pool, Streams
from disagg.transport.tcp.stream import landing, receive_blocks, send_blocks, share

NAME = "tcp"

logger = logging.getLogger(__name__)

# Long enough for a machine that stalls for some seconds under load.
_HELLO_S = 10.0
_PROBE_S = 3.0
_IDLE_S = 600.0
_LEAVE_S = 10.0
_MAX_STAGED = 4096
# A further stream takes a thread and a connection, so it pays only above this size.
_STREAM_BYTES = 64 << 20
_CORES_PER_STREAM = 4


@dataclass
class _Fetch:
    """A registered fetch. waiting: streams not requested yet. reading: connections that read the
    cache now."""

    blocks: Selection
    streams: int
    deadline: Deadline
    waiting: set[int]
    reading: set[socket.socket] = field(default_factory=set)


class TcpSender:
    """Listens for data connections on exactly `host`; one thread each, asleep between streams.

    staging: for a cache on a device; then a fetch has one stream. Raises `ConfigError` for a host
    that is not one address, `OSError` if it cannot be bound.
    """

    name = NAME

    def __init__(
        self,
        cache: BlockCache,
        host: str,
        secret: bytes,
        *,
        port: int = 0,
        staging: Staging | None = None,
    ) -> None:
        self._cache, self._secret, self._staging = cache, w.data_secret(secret), staging
        self._fetches: dict[bytes, _Fetch] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._log = LimitedLog(logger)
        self._listener = Listener(host, port, self._secret, self._serve, name="disagg-tcp")
        self._offer = w.TcpOffer(self._listener.host, self._listener.port)

    def offer(self) -> bytes:
        return w.encode(self._offer)

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        requested = w.decode_request(detail).streams
        # Staging memory is scarce: a fetch with two slots would delay others.
        most = w.MAX_STREAMS if self._staging is None else 1
        streams = max(1, min(requested, blocks.count, most))
        key = secrets.token_bytes(16)
        with self._changed:
            if self._closed or len(self._fetches) >= _MAX_STAGED:
                raise TransferError(f"closed, or {_MAX_STAGED} fetches staged", reason="tcp_full")
            self._fetches[key] = _Fetch(blocks, streams, deadline, set(range(streams)))
        return w.encode(w.Staged(self._offer, key, self._cache.num_bytes(blocks), streams))

    def finish(self, answer: bytes) -> None:
        self._drop(w.decode_staged(answer).key)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            keys = list(self._fetches)
        self._listener.close()
        for key in keys:
            self._drop(key)
        self._listener.join(_LEAVE_S)

    def _drop(self, key: bytes) -> None:
        """Drop a fetch; when it returns, no thread reads its blocks."""
        with self._changed:
            fetch = self._fetches.pop(key, None)
            if fetch is None:
                return
            for sock in fetch.reading:
                shut(sock)
            # Once cut off, a thread ends within one chunk. vLLM frees the blocks next, so this wait
            # must not give up: it only logs.
            while not self._changed.wait_for(lambda: not fetch.reading, _LEAVE_S):
                logger.error("tcp: a stream still reads blocks %.0f s after its end", _LEAVE_S)

    # ---- data connections ------------------------------------------------------------------

    def _serve(self, channel: Channel) -> None:
        try:
            opening = Deadline.after(_HELLO_S)
            if channel.receive(opening) != w.HELLO:
                raise PeerRefused(f"the consumer does not speak {w.HELLO.decode()}")
            channel.send(w.HELLO, opening)
            while True:
                pull = w.decode_pull(channel.receive_at_rest(Deadline.after(_IDLE_S)))
                self._answer(channel, pull)
        except PeerLost as gone:
            logger.debug("data connection ended: %s", gone)
        except TransferError as error:
            self._log.warning("data connection refused: %s", foreign(error))

    def _answer(self, channel: Channel, pull: w.TcpPull) -> None:
        with self._changed:
            fetch = self._fetches.get(pull.key)
            if fetch is not None and pull.stream in fetch.waiting:
                fetch.waiting.remove(pull.stream)
                fetch.reading.add(channel.sock)
            else:
                fetch = None
        if fetch is None:
            channel.send(w.encode(w.Sending(None)), Deadline.after(_HELLO_S))
            return
        try:
            blocks = share(fetch.blocks, pull.stream, fetch.streams)
            channel.send(w.encode(w.Sending(self._cache.num_bytes(blocks))), fetch.deadline)
            checksum = send_blocks(
                channel.sock,
                self._cache,
                blocks,
                fetch.deadline,
                self._staging,
                lambda: self._look_for_end(pull.key),
            )
        finally:
            with self._changed:
                fetch.reading.remove(channel.sock)
                self._changed.notify_all()
        # Only now: a consumer with the checksum may release the lease, and `finish` must not cut a
        # connection that is done.
        channel.send(checksum, fetch.deadline)

    def _look_for_end(self, key: bytes) -> None:
        if key not in self._fetches:
            raise PeerLost("the fetch ended before it had memory to stage in")


class TcpReceiver:
    """Pulls fetches over pooled data connections, straight into a host cache.

    streams: how many share one fetch; by default, its size and this machine's cores decide.
    staging: for a cache on a device; then a fetch has one stream.
    """

    name = NAME

    def __init__(
        self,
        cache: BlockCache,
        secret: bytes,
        *,
        streams: int | None = None,
        staging: Staging | None = None,
    ) -> None:
        if streams is not None and not 1 <= streams <= w.MAX_STREAMS:
            raise ValueError(f"streams must be 1 to {w.MAX_STREAMS}, not {streams}")
        self._cache, self._streams, self._staging = cache, streams, staging
        self._pool = Pool(secret)

    def open(self, offer: bytes) -> TcpReceiver | None:
        try:
            at = w.decode_offer(offer)
            with self._pool.connection((at.host, at.port), Deadline.after(_PROBE_S)):
                return self
        except TransferError as error:
            logger.warning("no data connection over tcp: %s", foreign(error))
            return None

    def request(self, job: FetchJob) -> bytes:
        return w.encode(w.Request(self._streams or self._worthwhile(job.blocks)))

    def prepare(self, job: FetchJob) -> None:
        """Nothing to do without the answer."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        staged = w.decode_staged(answer)
        size = self._cache.num_bytes(job.blocks)
        if staged.size != size or not 1 <= staged.streams <= w.MAX_STREAMS:
            raise DataCorrupt(f"{staged.size} bytes instead of {size}", reason="tcp_size")
        Streams().run(staged.streams, lambda *of: self._pull(job, staged, *of))
        return size

    def close(self) -> None:
        self._pool.close()

    def _worthwhile(self, blocks: Selection) -> int:
        if self._staging is not None:
            return 1
        most = min(cores() // _CORES_PER_STREAM, w.MAX_STREAMS // 2)
        return max(1, min(most, self._cache.num_bytes(blocks) // _STREAM_BYTES))

    def _pull(self, job: FetchJob, staged: w.Staged, stream: int, together: Streams) -> None:
        blocks, deadline = share(job.blocks, stream, staged.streams), job.deadline
        size = self._cache.num_bytes(blocks)
        with (
            self._pool.connection((staged.at.host, staged.at.port), deadline) as channel,
            together.using(channel.sock),
            landing(self._cache, blocks, job, self._staging) as pieces,
        ):
            channel.send(w.encode(w.TcpPull(staged.key, stream)), deadline)
            sending = w.decode_sending(channel.receive(deadline)).size
            if sending is None:
                raise TransferError("the producer has no such fetch", reason="tcp_gone")
            if sending != size:
                raise DataCorrupt(f"{sending} bytes instead of {size}", reason="tcp_size")
            checksum = receive_blocks(channel.sock, pieces, deadline)
            if channel.receive(deadline) != checksum:
                raise DataCorrupt("checksum differs", reason="tcp_checksum")
