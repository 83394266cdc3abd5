"""The consumer's end of the control channel: pooled connections to producers' workers.

A connection serves one handoff at a time. It goes back to the pool when everything asked on it
was answered and no lease is in use on it, whatever the answers; otherwise it is closed, which
tells the producer at once. Nothing waits past the deadline it was given.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from disagg.errors import LeaseGone, PeerLost, PeerRefused, TransferError
from disagg.transport import protocol as p
from disagg.transport.control.channel import Channel
from disagg.transport.deadline import Deadline

A = TypeVar("A", p.Welcome, p.Acquired, p.Fetched, p.Done)

logger = logging.getLogger(__name__)

_POOLED_PER_PEER = 16
_AGAIN_S = 60.0


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where one producer worker listens. `generation` names its life: ports are used again."""

    host: str
    port: int
    generation: str


class CommonTransports:
    """Which transports two workers have in common. Safe for use from any thread.

    The first who wants to know finds out, and others meanwhile wait for that, as long as they may.
    What did not work is looked at again, beside the fetches: a machine was busy, a folder was away.
    """

    def __init__(self) -> None:
        self._found: dict[str, bool] = {}
        self._again_at: dict[str, float] = {}
        self._finding_out, self._lock = threading.Lock(), threading.Lock()

    def has(self, name: str, probe: Callable[[], bool], deadline: Deadline) -> bool:
        """Whether this one is; `probe` finds out, which may take seconds. Raises `PeerLost` past
        the deadline, if somebody else is finding out."""
        found = self._found.get(name)
        if found is None:
            if not self._finding_out.acquire(timeout=deadline.left()):
                raise PeerLost(
                    f"another fetch was still finding out whether {name} works", reason="deadline"
                )
            try:
                found = self._found.get(name)
                if found is None:
                    found = probe()
                    self._again_at[name] = time.monotonic() + _AGAIN_S
                    self._found[name] = found
            finally:
                self._finding_out.release()
        elif not found and self._is_time(name):
            look = threading.Thread(
                target=self._look, args=(name, probe), name="disagg-probe", daemon=True
            )
            look.start()
        return found

    def forget(self) -> None:
        """Find out anew."""
        self._found.clear()

    def _is_time(self, name: str) -> bool:
        with self._lock:
            now = time.monotonic()
            is_time = now >= self._again_at[name]
            if is_time:
                self._again_at[name] = now + _AGAIN_S
            return is_time

    def _look(self, name: str, probe: Callable[[], bool]) -> None:
        if probe():
            logger.info("%s works now", name)
            self._found[name] = True


@dataclass
class Connection:
    """One connection past hello. `common`: of its two ends."""

    channel: Channel
    endpoint: Endpoint
    welcome: p.Welcome
    common: CommonTransports = field(default_factory=CommonTransports)
    settled: bool = True  # fit for another handoff
    in_use: bool = False  # a lease, by us

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
                case p.Acquire(), p.Acquired():
                    self.in_use = True
                case p.Release(), p.Done():
                    self.in_use = False
        self.settled = not self.in_use
        return answers


class Peers:
    """Connections by endpoint. Safe for use from any thread."""

    def __init__(self, engine: str, fingerprint: Mapping[str, str], secret: bytes) -> None:
        self._hello = p.Hello(p.VERSION, engine, dict(fingerprint))
        self._secret = secret
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._common: dict[Endpoint, CommonTransports] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def connection(self, endpoint: Endpoint, deadline: Deadline) -> Iterator[Connection]:
        """A connection for the time of the block; afterwards it is pooled, or closed."""
        connection = self._take(endpoint) or self._open(endpoint, deadline)
        try:
            yield connection
        finally:
            self._put_back(connection)

    def forget(self, endpoint: Endpoint) -> None:
        """Close the idle connections to an endpoint that failed."""
        with self._lock:
            idle = self._idle.pop(endpoint, [])
            self._common.pop(endpoint, None)
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

    def _put_back(self, connection: Connection) -> None:
        if connection.settled:
            with self._lock:
                idle = self._idle.setdefault(connection.endpoint, [])
                if len(idle) < _POOLED_PER_PEER:
                    idle.append(connection)
                    return
        connection.channel.close()

    def _open(self, endpoint: Endpoint, deadline: Deadline) -> Connection:
        address = endpoint.host, endpoint.port
        channel = Channel.connect(*address, self._secret, deadline, ahead=True)
        try:
            got = _exchange(channel, [self._hello], deadline)[0]
            welcome = expect(p.Welcome, got, self._hello)
        except PeerLost as error:
            channel.close()
            raise PeerLost(f"closed at hello, is the secret the same? ({error})") from error
        except BaseException:
            channel.close()
            raise
        if welcome.generation != endpoint.generation:
            return Connection(channel, endpoint, welcome)  # another worker, which will refuse
        with self._lock:
            common = self._common.setdefault(endpoint, CommonTransports())
        return Connection(channel, endpoint, welcome, common)


def expect(answer: type[A], got: p.Answer, request: p.Request) -> A:
    """`got`, if it is this answer to the request; raises what a `Failed` says."""
    if isinstance(got, answer):
        return got
    if not isinstance(got, p.Failed):
        raise PeerRefused(f"{type(request).__name__} was answered by {type(got).__name__}")
    if got.reason == LeaseGone.reason:
        raise LeaseGone(got.message)
    if got.reason == PeerRefused.reason:
        raise PeerRefused(got.message)
    raise TransferError(got.message, reason=got.reason)


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
        raise PeerRefused(f"answer not understood: {error}") from error
