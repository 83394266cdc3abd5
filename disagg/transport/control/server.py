"""The producer's end of the control channel: one listening port per worker rank.

A thread per connection (one per handoff in flight) answers requests in order. Whatever a peer
sends, it gets at worst an error and a closed connection: ids are checked against the lease, sizes
against limits. When a connection ends, the lease that it had in use is no longer in use.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence

import msgspec

from disagg.errors import PeerLost, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import Sender
from disagg.transport.blocks import BlockCache, BlocksGoneError
from disagg.transport.control.channel import Channel, tune
from disagg.transport.control.lease import Lease, LeaseTable
from disagg.transport.control.listener import Listener
from disagg.transport.deadline import Deadline
from disagg.transport.one_sided.hazard_pointers import NO_SLOT

logger = logging.getLogger(__name__)

# Long enough for a machine that stalls for some seconds under load.
_HELLO_S = 10.0
_AT_ONCE = 16


class ControlServer:
    """Serves the leases of one worker. use_limit_s: the longest silence of a consumer."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        secret: bytes,
        hello: p.Welcome,
        fingerprint: Mapping[str, str],
        cache: BlockCache,
        leases: LeaseTable,
        senders: Sequence[Sender],
        use_limit_s: float,
    ) -> None:
        self._secret, self._welcome, self._fingerprint = secret, hello, dict(fingerprint)
        self._cache, self._leases, self._use_limit_s = cache, leases, use_limit_s
        self._senders = {sender.name: sender for sender in senders}
        self._listener = Listener(host, port, self._serve, name="disagg-control")
        self.host, self.port = self._listener.host, self._listener.port

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self._listener.close()

    def connections(self) -> int:
        """How many are open."""
        return self._listener.connections()

    def _serve(self, sock: socket.socket) -> None:
        try:
            tune(sock)
            opening = Deadline.after(_HELLO_S)
            channel = Channel.accept(sock, self._secret, opening, ahead=True)
            _Session(self, channel).run()
        except PeerLost as gone:
            logger.debug("control connection ended: %s", gone)
        except (TransferError, msgspec.DecodeError) as error:
            logger.warning("control connection refused: %s", error)


class _Session:
    """One connection: at most one lease in use, and what was staged for it."""

    def __init__(self, server: ControlServer, channel: Channel) -> None:
        self._server, self._channel = server, channel
        self._may_fetch = False
        self._consumer = ""
        self._lease: Lease | None = None
        self._slot = NO_SLOT
        self._staged: list[tuple[Sender, bytes]] = []

    def run(self) -> None:
        try:
            self._hello()
            while True:
                wait = Deadline.after(self._server._use_limit_s) if self._lease else None
                answers = [self._next(wait)]
                # A peer that sent several requests at once waits for all the answers.
                while self._channel.holds_more and len(answers) < _AT_ONCE:
                    answers.append(self._next(wait))
                self._channel.send_all(answers, Deadline.after(_HELLO_S))
        finally:
            if self._lease is not None:
                logger.warning(
                    "consumer %s disconnected during its fetch of request %s",
                    self._consumer,
                    self._lease.request_id,
                )
            self._give_back(left=True)
            self._give_back_slot()

    def _next(self, wait: Deadline | None) -> bytes:
        request = p.decode_request(self._channel.receive(wait))
        return p.encode(self._answer(request))

    def _hello(self) -> None:
        hello = p.decode_request(self._channel.receive(Deadline.after(_HELLO_S)))
        if not isinstance(hello, p.Hello):
            raise TransferError("the first message must be Hello")
        self._consumer = hello.engine
        problem = None
        if hello.version != p.VERSION:
            problem = f"protocol version differs: {p.VERSION} here, {hello.version} there"
        elif hello.fingerprint:
            problem = p.misfit(self._server._fingerprint, hello.fingerprint)
            self._may_fetch = problem is None
        if self._may_fetch:
            self._slot = self._server._leases.board.take_slot()
        answer: p.Answer = msgspec.structs.replace(self._server._welcome, slot=self._slot)
        if problem is not None:
            logger.warning("engine %s refused at hello: %s", hello.engine, problem)
            answer = p.Failed("refused", problem)
        self._channel.send(p.encode(answer), Deadline.after(_HELLO_S))
        if problem is not None:
            raise PeerLost("refused at hello")

    def _answer(self, request: p.Request) -> p.Answer:
        try:
            match request:
                case p.Acquire():
                    return self._acquire(request)
                case p.Fetch():
                    return self._fetch(request)
                case p.Release():
                    return self._release(request)
                case p.Renew():
                    if request.generation == self._server._welcome.generation:
                        self._server._leases.renew(request.leases)
                    return p.Done()
                case p.Hello():
                    return p.Failed("protocol", "Hello was sent before")
        except TransferError as error:
            return p.Failed(error.reason, str(error))

    def _acquire(self, request: p.Acquire) -> p.Answer:
        if not self._may_fetch:
            return p.Failed("protocol", "a peer without a cache may only release leases")
        if self._lease is not None:
            return p.Failed("protocol", "this connection has a lease in use")
        if request.generation != self._server._welcome.generation:
            return p.Failed("lease_gone", "the lease was granted by an earlier life of this engine")
        deadline = Deadline.after(self._server._use_limit_s)
        self._lease = self._server._leases.acquire(request.lease, deadline)
        return p.Acquired(len(self._lease.block_ids))

    def _fetch(self, request: p.Fetch) -> p.Answer:
        if self._lease is None:
            return p.Failed("protocol", "no lease is in use on this connection")
        sender = self._server._senders.get(request.transport)
        if sender is None:
            return p.Failed("no_transport", f"{request.transport!r} is not on offer")
        part, cache = request.part, self._server._cache
        try:
            blocks = cache.within(
                self._lease.block_ids, part.unit, part.spans, part.heads, part.regions
            )
        except BlocksGoneError as error:
            return p.Failed("window", str(error))
        except ValueError as error:
            return p.Failed("range", str(error))
        deadline = Deadline.after(self._server._use_limit_s)
        answer = sender.send(blocks, request.detail, deadline)
        self._staged.append((sender, answer))
        return p.Fetched(answer)

    def _release(self, request: p.Release) -> p.Answer:
        if request.generation != self._server._welcome.generation:
            return p.Done()
        self._server._leases.release(request.lease, request.outcome, request.readers)
        if self._lease is not None and self._lease.id == request.lease:
            self._give_back()
        return p.Done()

    def _give_back_slot(self) -> None:
        reading = self._server._leases.board.give_back(self._slot)
        if reading is not None:
            logger.warning(
                "consumer %s disconnected while it read lease %d", self._consumer, reading
            )
            self._server._leases.lost_reader(reading)

    def _give_back(self, *, left: bool = False) -> None:
        staged, self._staged = self._staged, []
        for sender, answer in staged:
            sender.finish(answer)
        lease, self._lease = self._lease, None
        if lease is not None:
            self._server._leases.done_using(lease.id, left=left)
