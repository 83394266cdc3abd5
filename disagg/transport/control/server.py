"""The producer's end of the control channel: one listening port per worker rank.

A thread per connection (one per handoff in flight) answers requests in order. Whatever a peer
sends, it gets at worst an error and a closed connection: ids are checked against the lease, sizes
and numbers against limits. When a connection ends, the lease that it had in use is no longer in
use. No connection has a lease in use for longer than `use_limit_s`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import msgspec

from disagg.errors import LeaseGone, PeerLost, TransferError
from disagg.safe_logging import LimitedLog, foreign
from disagg.transport import protocol as p
from disagg.transport.base import Sender
from disagg.transport.blocks import BlockCache, BlocksGoneError
from disagg.transport.control.channel import Channel
from disagg.transport.control.lease import ABORTED, FETCHED, Lease, LeaseTable
from disagg.transport.control.listener import Listener
from disagg.transport.deadline import Deadline
from disagg.transport.one_sided.hazard_pointers import NO_SLOT

logger = logging.getLogger(__name__)

# Long enough for a machine that stalls for some seconds under load.
_HELLO_S = 10.0
_AT_ONCE = 16
# What a peer may send, far above what a consumer of ours does.
_MAX_FETCHES = 32
_MAX_LEASES_AHEAD = 1 << 16
_MORE_SPANS = 256
# How often it looks whether the peer still waits for a lease that is not granted yet.
_LOOK_S = 0.25
_LONGEST_STREAM = 64


class ControlServer:
    """Serves the leases of one worker. use_limit_s: how long a consumer may use a lease."""

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
        self._welcome, self._fingerprint = hello, p.shortened(fingerprint)
        self._cache, self._leases, self._use_limit_s = cache, leases, use_limit_s
        self._senders = {sender.name: sender for sender in senders}
        self._log = LimitedLog(logger)
        self._listener = Listener(
            host,
            port,
            secret,
            self._serve,
            name="disagg-control",
            ahead=True,
            most=p.MAX_REQUEST,
        )
        self.host, self.port = self._listener.host, self._listener.port

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self._listener.close()

    def connections(self) -> int:
        """How many are open."""
        return self._listener.connections()

    def _serve(self, channel: Channel) -> None:
        try:
            _Session(self, channel).run()
        except PeerLost as gone:
            logger.debug("control connection ended: %s", gone)
        except (TransferError, msgspec.DecodeError) as error:
            self._log.warning("control connection refused: %s", foreign(error))


class _Session:
    """One connection: at most one lease in use, and what was staged for it."""

    def __init__(self, server: ControlServer, channel: Channel) -> None:
        self._server, self._channel = server, channel
        self._may_fetch = False
        self._consumer = ""
        self._lease: Lease | None = None
        self._until: Deadline | None = None  # the end of the lease's use
        self._told_whole = False  # the peer knows that the lease that it follows is whole
        self._slot = NO_SLOT
        self._staged: list[tuple[Sender, bytes]] = []

    def run(self) -> None:
        try:
            self._hello()
            while True:
                answers = [self._next()]
                # A peer that sent several requests at once waits for all the answers.
                while self._channel.holds_more and len(answers) < _AT_ONCE:
                    answers.append(self._next())
                self._channel.send_all(answers, self._until or Deadline.after(_HELLO_S))
        finally:
            if self._lease is not None:
                self._server._log.warning(
                    "consumer %s disconnected during its fetch of request %s, or took too long",
                    self._consumer,
                    foreign(self._lease.request_id),
                )
            self._give_back(left=True)
            self._give_back_slot()

    def _next(self) -> bytes:
        """The encoded answer to the next request."""
        if self._lease is None:
            body = self._channel.receive_at_rest(None)
        else:
            body = self._channel.receive(self._until)
        return p.encode(self._answer(p.decode_request(body)))

    def _hello(self) -> None:
        hello = p.decode_request(self._channel.receive(Deadline.after(_HELLO_S)))
        if not isinstance(hello, p.Hello):
            raise TransferError("the first message must be Hello")
        self._consumer = foreign(hello.engine)
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
            self._server._log.warning(
                "engine %s refused at hello: %s", self._consumer, foreign(problem, 500)
            )
            answer = p.Failed("refused", problem)
        self._channel.send(p.encode(answer), Deadline.after(_HELLO_S))
        if problem is not None:
            raise PeerLost("refused at hello")

    def _answer(self, request: p.Request) -> p.Answer:
        try:
            match request:
                case p.Acquire():
                    return self._acquire(request)
                case p.Await():
                    return self._await(request)
                case p.Follow():
                    return self._follow(request)
                case p.Proceed():
                    return self._proceed(request)
                case p.Fetch():
                    return self._fetch(request)
                case p.Release():
                    return self._release(request)
                case p.Renew():
                    if request.generation == self._server._welcome.generation:
                        self._server._leases.renew(request.leases, request.streams)
                    return p.Done()
                case p.Hello():
                    return p.Failed("protocol", "Hello was sent before")
        except TransferError as error:
            return p.Failed(error.reason, str(error))

    def _may_begin(self, generation: str) -> p.Failed | None:
        """Why no lease can be taken into use on this connection; None if one can."""
        if not self._may_fetch:
            return p.Failed("protocol", "a peer without a cache may only release leases")
        if self._lease is not None:
            return p.Failed("protocol", "this connection has a lease in use")
        if generation != self._server._welcome.generation:
            return p.Failed("lease_gone", "the lease was granted by an earlier life of this engine")
        return None

    def _acquire(self, request: p.Acquire) -> p.Answer:
        if problem := self._may_begin(request.generation):
            return problem
        deadline = Deadline.after(self._server._use_limit_s)
        self._wait_for_grant(request.lease, deadline)
        self._lease = self._server._leases.acquire(request.lease, deadline)
        self._until = Deadline.after(self._server._use_limit_s)
        return p.Acquired(len(self._lease.block_ids))

    def _wait_for_grant(self, lease: int, deadline: Deadline) -> None:
        """Wait as `LeaseTable.acquire` does, and notice a peer that leaves meanwhile."""
        leases = self._server._leases
        while not leases.was_granted(lease, _LOOK_S):
            if self._channel.has_ended():
                raise PeerLost("the peer left while it waited for a lease")
            if leases.is_far_ahead(lease, _MAX_LEASES_AHEAD) or time.monotonic() > deadline.at:
                raise LeaseGone(f"lease {lease} was not granted")

    def _await(self, request: p.Await) -> p.Answer:
        if problem := self._may_begin(request.generation):
            return problem
        leases = self._server._leases
        if leases.has_begun(request.stream, self._patience_s(request.seconds)):
            leases.check_stream(request.stream, request.prompt)
            return p.Awaited(has_begun=True)
        return p.Awaited(has_begun=False, is_queued=leases.is_queued(request.stream))

    def _follow(self, request: p.Follow) -> p.Answer:
        if problem := self._may_begin(request.generation):
            return problem
        self._lease = self._server._leases.follow(request.stream, request.prompt)
        self._told_whole = False
        return self._grown(-1, 0, 0.0)

    def _proceed(self, request: p.Proceed) -> p.Answer:
        if self._lease is None or self._lease.growth is None:
            return p.Failed("protocol", "no stream is followed on this connection")
        # The consumer has what it fetched before.
        self._finish_staged()
        return self._grown(request.epoch, request.tokens, request.seconds)

    def _grown(self, epoch: int, tokens: int, seconds: float) -> p.Grown:
        """How far the lease in use is, as soon as that is news, or after `seconds`."""
        assert self._lease is not None
        leases, until = self._server._leases, time.monotonic() + self._patience_s(seconds)
        try:
            while True:
                left = max(0.0, until - time.monotonic())
                now = leases.progress(self._lease, epoch, tokens, min(left, _LOOK_S))
                if now.is_whole or (now.epoch, now.tokens) != (epoch, tokens) or left <= _LOOK_S:
                    break
                if self._channel.has_ended():
                    raise PeerLost("the peer left while it followed a stream")
        except LeaseGone:
            self._give_back()
            raise
        if not self._told_whole:  # a whole lease keeps blocks: no peer may use it for ever
            self._until = Deadline.after(self._server._use_limit_s)
        self._told_whole = now.is_whole
        return p.Grown(self._lease.id, now.epoch, now.tokens, now.is_whole)

    def _patience_s(self, asked: float) -> float:
        """How long to wait for news; a peer may send any number, and none."""
        return min(asked, self._server._use_limit_s) if asked > 0 else 0.0

    def _fetch(self, request: p.Fetch) -> p.Answer:
        if self._lease is None:
            return p.Failed("protocol", "no lease is in use on this connection")
        sender = self._server._senders.get(request.transport)
        if sender is None:
            return p.Failed("no_transport", f"{foreign(request.transport)} is not on offer")
        part, cache = request.part, self._server._cache
        if len(self._staged) >= _MAX_FETCHES:
            return p.Failed("protocol", f"more than {_MAX_FETCHES} fetches of one lease")
        if len(part.spans) > len(self._lease.block_ids) + _MORE_SPANS:
            return p.Failed("range", f"{len(part.spans)} spans")
        try:
            blocks = cache.within(
                self._lease.block_ids, part.unit, part.spans, part.heads, part.regions
            )
        except BlocksGoneError as error:
            return p.Failed("window", str(error))
        except ValueError as error:
            return p.Failed("range", str(error))
        assert self._until is not None
        answer = sender.send(blocks, request.detail, self._until)
        self._staged.append((sender, answer))
        return p.Fetched(answer)

    def _release(self, request: p.Release) -> p.Answer:
        if request.generation != self._server._welcome.generation:
            return p.Done()
        if request.outcome not in (FETCHED, ABORTED):
            return p.Failed("protocol", f"no outcome of a lease: {foreign(request.outcome)}")
        if request.stream:
            if len(request.stream) > _LONGEST_STREAM:
                return p.Failed("protocol", f"a stream's name of {len(request.stream)} bytes")
            self._server._leases.leave(request.stream)
            return p.Done()
        self._server._leases.release(request.lease, request.outcome, request.readers)
        if self._lease is not None and self._lease.id == request.lease:
            self._give_back()
        return p.Done()

    def _give_back_slot(self) -> None:
        reading = self._server._leases.board.give_back(self._slot)
        if reading is not None:
            self._server._log.warning(
                "consumer %s disconnected while it read lease %d", self._consumer, reading
            )
            self._server._leases.lost_reader(reading)

    def _give_back(self, *, left: bool = False) -> None:
        self._finish_staged()
        lease, self._lease, self._until = self._lease, None, None
        if lease is not None:
            self._server._leases.done_using(lease.id, left=left)

    def _finish_staged(self) -> None:
        staged, self._staged = self._staged, []
        for sender, answer in staged:
            sender.finish(answer)
