"""One fetch from acquire to release, over the first transport that works."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.errors import PeerLost, PeerRefused, TransferError
from disagg.safe_logging import foreign
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob, ReadableCache, Receiver, RemoteCache
from disagg.transport.control.client import Connection, Endpoint, Peers, expect
from disagg.transport.control.lease import ABORTED, FETCHED
from disagg.transport.control.ticket import Handoff
from disagg.transport.deadline import Deadline

logger = logging.getLogger(__name__)

_RELEASE_S = 2.0


@dataclass(frozen=True)
class Moved:
    """A fetch's result. failed_over: the transports that failed before this one."""

    transport: str
    num_bytes: int
    seconds: float
    failed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class FetchRequest:
    """One fetch from one producer rank: a part of a lease.

    layers: what the regions of that part must hold, as the producer's hello names them. readers:
    how many of our ranks read this rank's lease.
    """

    endpoint: Endpoint
    lease: int
    part: p.Part
    layers: Sequence[str]
    readers: int = 1


def fetch(
    peers: Peers, request: FetchRequest, job: FetchJob, receivers: Sequence[Receiver]
) -> Moved:
    """As `fetched`; returns after the lease was released."""
    with fetched(peers, request, job, receivers) as moved:
        return moved


@contextlib.contextmanager
def fetched(
    peers: Peers, request: FetchRequest, job: FetchJob, receivers: Sequence[Receiver]
) -> Iterator[Moved]:
    """Fill `job.blocks` with the wanted part; within the context they are complete and valid.

    receivers: tried in order. At the context's end the lease is released, if the producer can be
    reached. Raises `TransferError` on entry, never on exit; the blocks then hold garbage, and the
    lease is released or will expire.
    """
    endpoint = request.endpoint
    with contextlib.ExitStack() as until_released:
        try:
            connection = until_released.enter_context(peers.connection(endpoint, job.deadline))
            one = OneFetch(peers, connection, request, job, receivers, until_released)
            problem = misfit(request, connection.welcome.layers)
            if problem is not None:
                one.release(ABORTED)
                raise PeerRefused(problem)
            moved = one.read_directly() or one.ask()
        except PeerLost:
            peers.forget(endpoint)
            raise
        yield moved


def misfit(request: FetchRequest, theirs: Sequence[str]) -> str | None:
    """How the producer's regions differ from the consumer's; None if they do not."""
    first, last = request.part.regions or (0, len(theirs))
    found = tuple(theirs[first:last])
    if found == tuple(request.layers):
        return None
    if len(found) != len(request.layers):
        return f"layers differ: {len(request.layers)} here, {len(found)} there"
    pairs = zip(request.layers, found, strict=True)
    mine, other = next((mine, other) for mine, other in pairs if mine != other)
    return f"layers differ: {mine!r} here, {foreign(other)!r} there"


def total(moved: Sequence[Moved]) -> Moved:
    """Several fetches of one load, one after the other, as one."""
    transports = dict.fromkeys(one.transport for one in moved)
    failed = dict.fromkeys(name for one in moved for name in one.failed_over)
    return Moved(
        "+".join(transports),
        sum(one.num_bytes for one in moved),
        sum(one.seconds for one in moved),
        tuple(failed),
    )


class LeaseName(NamedTuple):
    """How a consumer names a lease: by the stream, where it does not know the number."""

    number: int
    stream: bytes = b""

    def __str__(self) -> str:
        return self.stream.hex() if self.stream else str(self.number)


def release(
    peers: Peers,
    endpoint: Endpoint,
    lease: LeaseName,
    outcome: str,
    deadline: Deadline,
    readers: int = 1,
) -> None:
    """End a lease that is not in use."""
    with peers.connection(endpoint, deadline) as connection:
        _release(connection, lease, outcome, deadline, readers)


def release_all(
    peers: Peers, endpoints: Sequence[Endpoint], lease: LeaseName, deadline: Deadline
) -> None:
    """End a lease on several ranks. Tries all of them, and raises the first error afterwards."""
    errors: list[TransferError] = []
    for endpoint in endpoints:
        try:
            release(peers, endpoint, lease, ABORTED, deadline)
        except TransferError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def release_everywhere(ticket: Handoff, secret: bytes, deadline: Deadline) -> None:
    """End a lease on all ranks of its producer, from a process without a cache."""
    peers = Peers("release", {}, secret)
    try:
        release_all(peers, ticket.endpoints, LeaseName(ticket.lease), deadline)
    finally:
        peers.close()


def renew(peers: Peers, endpoint: Endpoint, lease: LeaseName, deadline: Deadline) -> None:
    """Renew the lease of a request that still waits in our queue."""
    with peers.connection(endpoint, deadline) as connection:
        request = p.Renew(endpoint.generation, [lease.number])
        if lease.stream:
            request = p.Renew(endpoint.generation, [], [lease.stream])
        connection.ask(request, p.Done, deadline)


class Taken(NamedTuple):
    """needs_proof: the producer may have freed the blocks while they were read. Its next answer on
    the same connection says that it has not."""

    moved: Moved
    needs_proof: bool


@dataclass(frozen=True)
class OneFetch:
    """`until_released`: what ends when the producer has heard of it."""

    peers: Peers
    connection: Connection
    request: FetchRequest
    job: FetchJob
    receivers: Sequence[Receiver]
    until_released: contextlib.ExitStack

    def read_directly(self) -> Moved | None:
        """Read over the first transport, if that needs no answer of the producer. None: ask it;
        then it also reports what is wrong, if anything is."""
        began, lease = time.monotonic(), self.request.lease
        welcome = self.connection.welcome
        cache = next(self._usable(), None)
        known = welcome.generation == self.connection.endpoint.generation
        if not known or not isinstance(cache, ReadableCache):
            return None
        try:
            with contextlib.ExitStack() as in_use:
                entry = in_use.enter_context(cache.reading(welcome.slot, lease))
                if entry is None:
                    return None
                num_bytes = cache.read(entry, self.request.part, self.job)
                if num_bytes is None or not cache.still_there(entry):
                    return None
                self.until_released.push(in_use.pop_all())
        except TransferError as error:
            logger.info("lease %d: %s; asking its producer", lease, foreign(error))
            return None
        self.until_released.callback(self._release_fetched)
        return Moved(cache.name, num_bytes, time.monotonic() - began)

    def ask(self) -> Moved:
        """Acquire the lease, and fetch over the first transport that works."""
        began = time.monotonic()
        acquire = p.Acquire(self.connection.endpoint.generation, self.request.lease)
        # The first transport nearly always works: sending its message with Acquire saves a trip.
        first = list(itertools.islice(self._usable(), 1))

        def meanwhile() -> None:
            for cache in first:
                cache.prepare(self.job)

        acquired, *answers = self.connection.exchange(
            [acquire, *map(self._message, first)], self.job.deadline, meanwhile
        )
        expect(p.Acquired, acquired, acquire)
        return self._end(self.take(began, answers))

    def _end(self, taken: Taken) -> Moved:
        """End the lease: now, where only that proves that it was in use until now."""
        if taken.needs_proof:
            self.release(FETCHED)
        else:
            self.until_released.callback(self._release_fetched)
        return taken.moved

    def take(self, began: float, answers: list[p.Answer]) -> Taken:
        """Fetch the part of a lease in use over the first transport that works. answers: to the
        fetch over the first one, if that was sent already."""
        failed: dict[str, TransferError] = {}
        for cache in self._usable():
            try:
                num_bytes = self._receive(cache, answers.pop() if answers else None)
            except PeerLost:
                raise
            except TransferError as error:
                failed[cache.name] = error
                continue
            moved = Moved(cache.name, num_bytes, time.monotonic() - began, tuple(failed))
            return Taken(moved, isinstance(cache, ReadableCache))
        # Nobody can use the lease any more; it need not run out.
        self.release(ABORTED)
        if failed:
            *_, last = failed.values()
            text = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise TransferError(text, reason=last.reason) from last
        self.connection.opened.forget()  # a folder that was missing may be there next time
        offered = foreign(", ".join(self.connection.welcome.offers)) or "none"
        raise TransferError(
            f"no transport works between the two workers; the producer offers {offered}, "
            f"the consumer tried {', '.join(receiver.name for receiver in self.receivers)}",
            reason="no_transport",
        )

    def release(self, outcome: str) -> None:
        """End the lease, and wait for the answer."""
        lease, readers = LeaseName(self.request.lease), self.request.readers
        _release(self.connection, lease, outcome, self.job.deadline, readers)

    def _usable(self) -> Iterator[RemoteCache]:
        """The producer's cache over each transport that works, in order. Opened as late as
        possible: that may cost time and memory."""
        for receiver in self.receivers:
            offer = self.connection.welcome.offers.get(receiver.name)
            if offer is None:
                continue
            cache = self.connection.opened.open(receiver, offer, self.job.deadline)
            if cache is not None:
                yield cache

    def _message(self, cache: RemoteCache) -> p.Fetch:
        return p.Fetch(cache.name, self.request.part, cache.request(self.job))

    def _receive(self, cache: RemoteCache, got: p.Answer | None) -> int:
        """got: the producer's answer, if the request was sent already."""
        message = self._message(cache)
        if got is None:
            (got,) = self.connection.exchange(
                [message], self.job.deadline, lambda: cache.prepare(self.job)
            )
        answer = expect(p.Fetched, got, message).answer
        try:
            return cache.receive(self.job, answer)
        except PeerLost as error:
            # Only the control connection decides whether the peer lives; another transport may
            # work.
            raise TransferError(str(error), reason=error.reason) from error

    def _release_fetched(self) -> None:
        lease, readers = self.request.lease, self.request.readers
        try:
            name, deadline = LeaseName(lease), Deadline.after(_RELEASE_S)
            _release(self.connection, name, FETCHED, deadline, readers)
        except TransferError as error:
            self.peers.forget(self.request.endpoint)
            logger.warning(
                "lease %d was fetched, not released; it will expire: %s", lease, foreign(error)
            )


def _release(
    connection: Connection, lease: LeaseName, outcome: str, deadline: Deadline, readers: int = 1
) -> None:
    request = p.Release(
        connection.endpoint.generation, lease.number, outcome, readers, lease.stream
    )
    connection.ask(request, p.Done, deadline)
