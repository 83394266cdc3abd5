"""One fetch from acquire to release, over the first transport that works."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg.errors import PeerLost, PeerRefused, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob, OneSidedReceiver, Receiver
from disagg.transport.control.client import Connection, Endpoint, Peers, expect
from disagg.transport.control.lease import ABORTED, FETCHED
from disagg.transport.control.ticket import Handoff
from disagg.transport.deadline import Deadline

logger = logging.getLogger(__name__)

_TELL_S = 2.0


@dataclass(frozen=True)
class Moved:
    """What a fetch did; `failed_over` names the transports that failed before this one."""

    transport: str
    num_bytes: int
    seconds: float
    failed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What to fetch from one producer rank: a part of a lease that `readers` ranks of ours read.

    `layers`: what the regions of that part must hold, as the producer says at hello.
    """

    endpoint: Endpoint
    lease: int
    part: p.Part
    layers: Sequence[str]
    readers: int = 1


def fetch(peers: Peers, wanted: Wanted, job: FetchJob, receivers: Sequence[Receiver]) -> Moved:
    """`fetched`, when all is over."""
    with fetched(peers, wanted, job, receivers) as moved:
        return moved


@contextlib.contextmanager
def fetched(
    peers: Peers, wanted: Wanted, job: FetchJob, receivers: Sequence[Receiver]
) -> Iterator[Moved]:
    """Fill `job.blocks` with the wanted part; within the context they are there, and right.

    `receivers` are tried in order. When the context ends the producer has heard of it, if it could
    be told. Raises `TransferError` at its begin, and never at its end; the blocks then hold
    garbage, and the lease is released or will run out.
    """
    endpoint = wanted.endpoint
    with contextlib.ExitStack() as until_told:
        try:
            connection = until_told.enter_context(peers.connection(endpoint, job.deadline))
            one = _OneFetch(peers, connection, wanted, job, receivers, until_told)
            problem = _misfit(wanted, connection.welcome.layers)
            if problem is not None:
                one.release(ABORTED)
                raise PeerRefused(problem)
            moved = one.unasked() or one.asked()
        except PeerLost:
            peers.forget(endpoint)
            raise
        yield moved


def _misfit(wanted: Wanted, theirs: Sequence[str]) -> str | None:
    """Why the wanted regions are not what the consumer takes them for; None if they are."""
    first, last = wanted.part.regions or (0, len(theirs))
    found = tuple(theirs[first:last])
    if found == tuple(wanted.layers):
        return None
    if len(found) != len(wanted.layers):
        return f"layers differ: {len(wanted.layers)} here, {len(found)} there"
    pairs = zip(wanted.layers, found, strict=True)
    mine, other = next((mine, other) for mine, other in pairs if mine != other)
    return f"layers differ: {mine!r} here, {other!r} there"


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


def release(
    peers: Peers,
    endpoint: Endpoint,
    lease: int,
    outcome: str,
    deadline: Deadline,
    readers: int = 1,
) -> None:
    """End a lease that is not in use."""
    with peers.connection(endpoint, deadline) as connection:
        _release(connection, lease, outcome, deadline, readers)


def release_all(
    peers: Peers, endpoints: Sequence[Endpoint], lease: int, deadline: Deadline
) -> None:
    """End a lease on several ranks. One that cannot be told does not keep the others from it;
    the first error is raised when all were tried."""
    errors: list[TransferError] = []
    for endpoint in endpoints:
        try:
            release(peers, endpoint, lease, ABORTED, deadline)
        except TransferError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def release_everywhere(ticket: Handoff, secret: bytes, deadline: Deadline) -> None:
    """End a lease on all ranks of its producer, from a process that has no cache itself."""
    peers = Peers("release", {}, secret)
    try:
        release_all(peers, ticket.endpoints, ticket.lease, deadline)
    finally:
        peers.close()


def renew(peers: Peers, endpoint: Endpoint, leases: list[int], deadline: Deadline) -> None:
    """Keep leases of requests that still wait in our queue."""
    with peers.connection(endpoint, deadline) as connection:
        request = p.Renew(endpoint.generation, leases)
        connection.ask(request, p.Done, deadline)


@dataclass(frozen=True)
class _OneFetch:
    """`until_told`: what ends when the producer has heard of it."""

    peers: Peers
    connection: Connection
    wanted: Wanted
    job: FetchJob
    receivers: Sequence[Receiver]
    until_told: contextlib.ExitStack

    def unasked(self) -> Moved | None:
        """Fetch without a word from the producer, by the first transport, if that can. None: it
        is to be asked, and says what is the matter, if anything is."""
        began, lease = time.monotonic(), self.wanted.lease
        welcome = self.connection.welcome
        receiver = next(self._usable(), None)
        known = welcome.generation == self.connection.endpoint.generation
        if not known or not isinstance(receiver, OneSidedReceiver):
            return None
        offer = welcome.offers[receiver.name]
        try:
            with contextlib.ExitStack() as in_use:
                posted = in_use.enter_context(receiver.reading(offer, welcome.slot, lease))
                if posted is None:
                    return None
                num_bytes = receiver.read(offer, posted, self.wanted.part, self.job)
                if num_bytes is None or not receiver.still_there(offer, posted):
                    return None
                self.until_told.push(in_use.pop_all())
        except TransferError as error:
            logger.info("lease %d: %s; asking its producer", lease, error)
            return None
        self.until_told.callback(self._tell)
        return Moved(receiver.name, num_bytes, time.monotonic() - began)

    def asked(self) -> Moved:
        """Take the lease into use, and fetch over the first transport that works."""
        began = time.monotonic()
        acquire = p.Acquire(self.connection.endpoint.generation, self.wanted.lease)
        # The first of them nearly always works: asked with the lease it saves a round trip.
        first = list(itertools.islice(self._usable(), 1))

        def meanwhile() -> None:
            for receiver in first:
                receiver.prepare(self.job)

        acquired, *answers = self.connection.exchange(
            [acquire, *map(self._request, first)], self.job.deadline, meanwhile
        )
        expect(p.Acquired, acquired, acquire)
        failed: dict[str, TransferError] = {}
        for receiver in self._usable():
            try:
                num_bytes = self._over(receiver, answers.pop() if answers else None)
            except PeerLost:
                raise
            except TransferError as error:
                failed[receiver.name] = error
                continue
            if receiver.one_sided:
                self.release(FETCHED)  # only its answer says that the lease was in use until now
            else:
                self.until_told.callback(self._tell)
            return Moved(receiver.name, num_bytes, time.monotonic() - began, tuple(failed))
        # The lease is of no more use to anybody; say so rather than let it run out.
        self.release(ABORTED)
        if failed:
            *_, last = failed.values()
            text = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise TransferError(text, reason=last.reason) from last
        self.connection.common.forget()  # a folder that was away may be back next time
        offered = ", ".join(self.connection.welcome.offers) or "none"
        raise TransferError(
            f"no transport works between the two workers; the producer offers {offered}, "
            f"the consumer tried {', '.join(receiver.name for receiver in self.receivers)}",
            reason="no_transport",
        )

    def release(self, outcome: str) -> None:
        """End the lease, and wait for the answer."""
        lease, readers = self.wanted.lease, self.wanted.readers
        _release(self.connection, lease, outcome, self.job.deadline, readers)

    def _usable(self) -> Iterator[Receiver]:
        """Not asked before it matters: to find out may cost time and memory."""
        for receiver in self.receivers:
            offer = self.connection.welcome.offers.get(receiver.name)
            if offer is not None and self.connection.common.has(
                receiver.name, functools.partial(receiver.usable, offer), self.job.deadline
            ):
                yield receiver

    def _request(self, receiver: Receiver) -> p.Fetch:
        return p.Fetch(receiver.name, self.wanted.part, receiver.request(self.job))

    def _over(self, receiver: Receiver, got: p.Answer | None) -> int:
        """`got`: what the producer says to the request, if it was asked already."""
        request = self._request(receiver)
        if got is None:
            (got,) = self.connection.exchange(
                [request], self.job.deadline, lambda: receiver.prepare(self.job)
            )
        answer = expect(p.Fetched, got, request).answer
        try:
            return receiver.receive(self.job, answer)
        except PeerLost as error:
            # Whether the peer lives is for the control connection to say; another way may work.
            raise TransferError(str(error), reason=error.reason) from error

    def _tell(self) -> None:
        """That all is there."""
        lease, readers = self.wanted.lease, self.wanted.readers
        try:
            _release(self.connection, lease, FETCHED, Deadline.after(_TELL_S), readers)
        except TransferError as error:
            self.peers.forget(self.wanted.endpoint)
            logger.warning("lease %d was fetched, and has to run out: %s", lease, error)


def _release(
    connection: Connection, lease: int, outcome: str, deadline: Deadline, readers: int = 1
) -> None:
    request = p.Release(connection.endpoint.generation, lease, outcome, readers)
    connection.ask(request, p.Done, deadline)
