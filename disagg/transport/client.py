"""The consumer's end of the control channel: pooled connections to producers' workers.

A connection serves one handoff at a time and goes back to the pool when that handoff ended
well; after any error it is closed, which tells the producer at once. Nothing waits past the
deadline it was given.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from disagg.errors import LeaseGone, PeerLost, PeerRefused, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import Deadline
from disagg.transport.channel import Channel

A = TypeVar("A", p.Welcome, p.Acquired, p.Fetched, p.Done)

_POOLED_PER_PEER = 16


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where one producer worker listens. `generation` names its life: ports are used again."""

    host: str
    port: int
    generation: str


@dataclass
class Connection:
    """One connection past hello. `usable` caches which transports this pair has in common."""

    channel: Channel
    endpoint: Endpoint
    welcome: p.Welcome
    usable: dict[str, bool] = field(default_factory=dict)

    def ask(self, request: p.Request, answer: type[A], deadline: Deadline) -> A:
        """Send one request and wait for its answer; raises what a `Failed` says."""
        return _ask(self.channel, request, answer, deadline)


class Peers:
    """Connections by endpoint. Safe for use from any thread."""

    def __init__(self, engine: str, fingerprint: Mapping[str, str], secret: bytes) -> None:
        self._hello = p.Hello(p.VERSION, engine, dict(fingerprint))
        self._secret = secret
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def connection(self, endpoint: Endpoint, deadline: Deadline) -> Iterator[Connection]:
        """A connection for the time of the block; an error in the block closes it."""
        connection = self._take(endpoint) or self._open(endpoint, deadline)
        try:
            yield connection
        except BaseException:
            connection.channel.close()
            raise
        with self._lock:
            idle = self._idle.setdefault(endpoint, [])
            if len(idle) < _POOLED_PER_PEER:
                idle.append(connection)
                return
        connection.channel.close()

    def forget(self, endpoint: Endpoint) -> None:
        """Close the idle connections to an endpoint that failed."""
        with self._lock:
            idle = self._idle.pop(endpoint, [])
        for connection in idle:
            connection.channel.close()

    def close(self) -> None:
        """Close all idle connections."""
        for endpoint in list(self._idle):
            self.forget(endpoint)

    def _take(self, endpoint: Endpoint) -> Connection | None:
        with self._lock:
            idle = self._idle.get(endpoint)
            return idle.pop() if idle else None

    def _open(self, endpoint: Endpoint, deadline: Deadline) -> Connection:
        channel = Channel.connect(endpoint.host, endpoint.port, self._secret, deadline)
        try:
            welcome = _ask(channel, self._hello, p.Welcome, deadline)
        except PeerLost as error:
            channel.close()
            raise PeerLost(f"closed at hello, is the secret the same? ({error})") from error
        except BaseException:
            channel.close()
            raise
        return Connection(channel, endpoint, welcome)


def _ask(channel: Channel, request: p.Request, answer: type[A], deadline: Deadline) -> A:
    channel.send(p.encode(request), deadline)
    try:
        got = p.decode_answer(channel.receive(deadline))
    except msgspec.DecodeError as error:
        raise PeerRefused(f"answer not understood: {error}") from error
    if isinstance(got, answer):
        return got
    if not isinstance(got, p.Failed):
        raise PeerRefused(f"{type(request).__name__} was answered by {type(got).__name__}")
    if got.reason == LeaseGone.reason:
        raise LeaseGone(got.message)
    if got.reason == PeerRefused.reason:
        raise PeerRefused(got.message)
    raise TransferError(got.message, reason=got.reason)
