"""The consumer's end of the control channel: pooled connections to producers' workers.

A connection serves one handoff at a time. It returns to the pool when every request on it was
answered and no lease is in use on it, whatever the answers; otherwise it is closed, which the
producer notices at once. Nothing waits past the deadline it was given. Only a hello is ever sent
again, on a new connection, where the producer reset the first one (`channel.open_channel`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from disagg.errors import LeaseGone, PeerLost, PeerRefused, TransferError
from disagg.safe_logging import foreign
from disagg.transport import protocol as p
from disagg.transport.base import ReadableCache, Receiver, RemoteCache
from disagg.transport.control.channel import FIRST_FRAME, Channel, open_channel
from disagg.transport.deadline import Deadline

A = TypeVar("A", p.Welcome, p.Acquired, p.Awaited, p.Grown, p.Fetched, p.Done)

logger = logging.getLogger(__name__)

_POOLED_PER_PEER = 16
_RETRY_S = 60.0


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where one producer worker listens. `generation` names its life: ports are used again."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    generation: str


class _Result(NamedTuple):
    """What opening an offer gave. cache: None if the two workers cannot use the transport."""

    cache: RemoteCache | None


class OpenedTransports:
    """The producer's cache over each transport, opened once. Safe for use from any thread.

    The first thread that wants a transport opens it; others wait for the result until their own
    deadline. A transport that did not work is tried again later, in a thread of its own: the
    machine was busy, or a folder was missing.
    """

    def __init__(self) -> None:
        self._results: dict[Receiver, _Result] = {}
        self._retry_at: dict[Receiver, float] = {}
        self._opening, self._lock = threading.Lock(), threading.Lock()

    def open(self, receiver: Receiver, offer: bytes, deadline: Deadline) -> RemoteCache | None:
        """The opened offer; None if the two workers cannot use this transport.

        The first call may take seconds. Raises `PeerLost` past the deadline, if another thread is
        still opening.
        """
        result = self._results.get(receiver)
        if result is None:
            return self._open_first(receiver, offer, deadline).cache
        if result.cache is None and self._is_retry_due(receiver):
            threading.Thread(
                target=self._retry, args=(receiver, offer), name="disagg-probe", daemon=True
            ).start()
        return result.cache

    def _open_first(self, receiver: Receiver, offer: bytes, deadline: Deadline) -> _Result:
        if not self._opening.acquire(timeout=deadline.left()):
            raise PeerLost(
                f"another fetch was still finding out whether {receiver.name} works",
                reason="deadline",
            )
        try:
            result = self._results.get(receiver)
            if result is None:
                result = _Result(receiver.open(offer))
                self._retry_at[receiver] = time.monotonic() + _RETRY_S
                self._results[receiver] = result
            return result
        finally:
            self._opening.release()

    def forget(self) -> None:
        """Open everything anew."""
        self._results.clear()

    def is_dead(self) -> bool:
        """Whether the producer's process is known to have ended, or an opened cache is closed."""
        opened = [result.cache for result in list(self._results.values())]
        return any(isinstance(one, ReadableCache) and not one.is_alive() for one in opened)

    def _is_retry_due(self, receiver: Receiver) -> bool:
        with self._lock:
            now = time.monotonic()
            is_due = now >= self._retry_at[receiver]
            if is_due:
                self._retry_at[receiver] = now + _RETRY_S
            return is_due

    def _retry(self, receiver: Receiver, offer: bytes) -> None:
        found = receiver.open(offer)
        if found is not None:
            logger.info("%s works now", receiver.name)
            self._results[receiver] = _Result(found)


@dataclass
class Connection:
    """One connection past hello. opened: the transports of its producer."""

    channel: Channel
    endpoint: Endpoint
    welcome: p.Welcome
    opened: OpenedTransports = field(default_factory=OpenedTransports)
    settled: bool = True  # nothing is pending: it can serve another handoff
    in_use: bool = False  # it has a lease in use

    def ask(self, request: p.Request, answer: type[A], deadline: Deadline) -> A:
        """Send one request and wait for its answer; raises what a `Failed` says."""
        return expect(answer, self.exchange([request], deadline)[0], request)

    def exchange(
        self,
        requests: Sequence[p.Request],
        deadline: Deadline,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[p.Answer]:
        """Send these at once, and wait for all their answers, which may say `Failed`."""
        self.settled = False
        answers = _exchange(self.channel, requests, deadline, meanwhile)
        for pair in zip(requests, answers, strict=True):
            match pair:
                case (p.Acquire(), p.Acquired()) | (p.Follow() | p.Proceed(), p.Grown()):
                    self.in_use = True
                case (p.Release(), p.Done()) | (p.Follow() | p.Proceed(), p.Failed()):
                    self.in_use = False
        self.settled = not self.in_use
        return answers


class Peers:
    """Connections by endpoint. Safe for use from any thread."""

    def __init__(self, engine: str, fingerprint: Mapping[str, str], secret: bytes) -> None:
        self._hello = p.Hello(p.VERSION, engine, p.shortened(fingerprint))
        self._secret = secret
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._opened: dict[Endpoint, OpenedTransports] = {}
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def connection(self, endpoint: Endpoint, deadline: Deadline) -> Iterator[Connection]:
        """A connection for the time of the block; afterwards it is pooled, or closed."""
        connection = self._take(endpoint) or self._open(endpoint, deadline)
        try:
            yield connection
        finally:
            self._put_back(connection)

    def forget(self, endpoint: Endpoint) -> None:
        """Close the idle connections to an endpoint that failed, and drop its opened transports."""
        with self._lock:
            idle = self._idle.pop(endpoint, [])
            self._opened.pop(endpoint, None)
        for connection in idle:
            connection.channel.close()

    def close(self) -> None:
        """Close all idle connections, and from now on those that are in use, once they are not."""
        with self._lock:
            self._closed = True
        for endpoint in list(self._idle):
            self.forget(endpoint)

    def _take(self, endpoint: Endpoint) -> Connection | None:
        while True:
            with self._lock:
                idle = self._idle.get(endpoint)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.channel.is_quiet():
                return connection
            # The producer has ended, or cut it for a newer one.
            connection.channel.close()

    def _put_back(self, connection: Connection) -> None:
        if connection.settled:
            with self._lock:
                idle = self._idle.setdefault(connection.endpoint, [])
                if len(idle) < _POOLED_PER_PEER and not self._closed:
                    idle.append(connection)
                    return
        connection.channel.close()

    def _open(self, endpoint: Endpoint, deadline: Deadline) -> Connection:
        size = len(p.encode(self._hello))
        if size > FIRST_FRAME:
            raise PeerRefused(f"hello of {size} bytes is over the limit of {FIRST_FRAME}")

        def hello(channel: Channel) -> p.Welcome:
            got = _exchange(channel, [self._hello], deadline)[0]
            return expect(p.Welcome, got, self._hello)

        try:
            channel, welcome = open_channel(
                endpoint.host, endpoint.port, self._secret, deadline, hello, ahead=True
            )
        except PeerLost as error:
            raise PeerLost(f"closed at hello, is the secret the same? ({error})") from error
        if welcome.generation != endpoint.generation:
            return Connection(channel, endpoint, welcome)  # another worker, which will refuse
        if endpoint not in self._opened:
            self._forget_dead()
        with self._lock:
            opened = self._opened.setdefault(endpoint, OpenedTransports())
        return Connection(channel, endpoint, welcome, opened)

    def _forget_dead(self) -> None:
        for endpoint, opened in list(self._opened.items()):
            if opened.is_dead() or self._has_left(endpoint):
                self.forget(endpoint)

    def _has_left(self, endpoint: Endpoint) -> bool:
        """Whether a producer closed all our idle connections: the one sign from another host."""
        # Under the lock, so that no other thread takes one meanwhile: only one may look at a time.
        with self._lock:
            idle = self._idle.get(endpoint, ())
            return bool(idle) and not any(one.channel.is_quiet() for one in idle)


def expect(answer: type[A], got: p.Answer, request: p.Request) -> A:
    """`got`, if it is this answer to the request; raises what a `Failed` says."""
    if isinstance(got, answer):
        return got
    if not isinstance(got, p.Failed):
        raise PeerRefused(f"{type(request).__name__} was answered by {type(got).__name__}")
    message = foreign(got.message, 500)
    if got.reason == LeaseGone.reason:
        raise LeaseGone(message)
    if got.reason == PeerRefused.reason:
        raise PeerRefused(message)
    raise TransferError(message, reason=got.reason if got.reason in p.REASONS else None)


def _exchange(
    channel: Channel,
    requests: Sequence[p.Request],
    deadline: Deadline,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[p.Answer]:
    channel.send_all([p.encode(request) for request in requests], deadline)
    meanwhile()
    try:
        return [p.decode_answer(channel.receive(deadline)) for _ in requests]
    except msgspec.DecodeError as error:
        raise PeerRefused(f"answer not understood: {foreign(error)}") from error
