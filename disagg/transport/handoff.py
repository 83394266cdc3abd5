"""One fetch from acquire to release, over the first transport that works."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg.errors import PeerLost, PeerRefused, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import Deadline, FetchJob, OneSidedReceiver, Receiver
from disagg.transport.client import Connection, Endpoint, Peers, expect
from disagg.transport.lease import ABORTED, FETCHED
from disagg.transport.ticket import Handoff

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
            problem = _misfit(wanted, connection.welcome.layers)
            if problem is not None:
                _release(connection, wanted.lease, ABORTED, job.deadline)
                raise PeerRefused(problem)
            moved = _unasked(connection, wanted, job, receivers, until_told)
            if moved is not None:
                until_told.callback(_tell, peers, connection, wanted)
            else:
                moved = _fetch(connection, wanted, job, receivers)
        except PeerLost:
            peers.forget(endpoint)
            raise
        yield moved


def _tell(peers: Peers, connection: Connection, wanted: Wanted) -> None:
    """What was fetched without a word."""
    deadline = Deadline.after(_TELL_S)
    try:
        _release(connection, wanted.lease, FETCHED, deadline, wanted.readers)
    except TransferError as error:
        peers.forget(wanted.endpoint)
        logger.warning("lease %d was fetched, and has to run out: %s", wanted.lease, error)


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


def _fetch(
    connection: Connection, wanted: Wanted, job: FetchJob, receivers: Sequence[Receiver]
) -> Moved:
    began, lease = time.monotonic(), wanted.lease
    requests: list[p.Request] = [p.Acquire(connection.endpoint.generation, lease)]
    # The first of them nearly always works: asked with the lease it saves a round trip.
    first = list(
        itertools.islice((one for one in receivers if _is_usable(connection, one, job)), 1)
    )
    requests += [_request(receiver, wanted.part, job) for receiver in first]

    def meanwhile() -> None:
        for receiver in first:
            receiver.prepare(job)

    acquired, *asked = connection.exchange(requests, job.deadline, meanwhile)
    expect(p.Acquired, acquired, requests[0])
    errors: list[str] = []
    failed: list[str] = []
    last: TransferError | None = None
    for receiver in receivers:
        if not _is_usable(connection, receiver, job):
            continue
        try:
            answer = asked.pop() if asked else None
            num_bytes = _over(connection, receiver, wanted.part, job, answer)
        except PeerLost:
            raise
        except TransferError as error:
            failed.append(receiver.name)
            errors.append(f"{receiver.name}: {error}")
            last = error
            continue
        # Only its answer says that the lease was in use until now.
        _release(connection, lease, FETCHED, job.deadline, wanted.readers)
        seconds = time.monotonic() - began
        return Moved(receiver.name, num_bytes, seconds, tuple(failed))
    # The lease is of no more use to anybody; say so rather than let it run out.
    _release(connection, lease, ABORTED, job.deadline)
    if last is None:
        connection.common.forget()  # a folder that was away may be back next time
        offered = ", ".join(connection.welcome.offers) or "none"
        raise TransferError(
            f"no transport works between the two workers; the producer offers {offered}, "
            f"the consumer tried {', '.join(receiver.name for receiver in receivers)}",
            reason="no_transport",
        )
    raise TransferError("; ".join(errors), reason=last.reason) from last


def _unasked(
    connection: Connection,
    wanted: Wanted,
    job: FetchJob,
    receivers: Sequence[Receiver],
    until_told: contextlib.ExitStack,
) -> Moved | None:
    """Fetch without a word from the producer, by the first transport, if that can; the lease is in
    use until it is told. None: it is to be asked, and says what is the matter, if anything is."""
    began = time.monotonic()
    receiver = next((one for one in receivers if _is_usable(connection, one, job)), None)
    known = connection.welcome.generation == connection.endpoint.generation
    if not known or not isinstance(receiver, OneSidedReceiver):
        return None
    offer = connection.welcome.offers[receiver.name]
    try:
        with contextlib.ExitStack() as in_use:
            reading = receiver.reading(offer, connection.welcome.slot, wanted.lease)
            posted = in_use.enter_context(reading)
            if posted is None:
                return None
            num_bytes = receiver.read(offer, posted, wanted.part, job)
            if num_bytes is None or not receiver.still_there(offer, posted):
                return None
            until_told.push(in_use.pop_all())
    except TransferError as error:
        logger.info("lease %d: %s; asking its producer", wanted.lease, error)
        return None
    return Moved(receiver.name, num_bytes, time.monotonic() - began)


def _is_usable(connection: Connection, receiver: Receiver, job: FetchJob) -> bool:
    """Not asked before it matters: to find out may cost time and memory."""
    offer = connection.welcome.offers.get(receiver.name)
    if offer is None:
        return False
    return connection.common.has(receiver.name, lambda: receiver.usable(offer), job.deadline)


def _request(receiver: Receiver, part: p.Part, job: FetchJob) -> p.Fetch:
    return p.Fetch(receiver.name, part, receiver.request(job))


def _over(
    connection: Connection, receiver: Receiver, part: p.Part, job: FetchJob, got: p.Answer | None
) -> int:
    """`got`: what the producer says to the request, if it was asked already."""
    request = _request(receiver, part, job)
    if got is None:
        (got,) = connection.exchange([request], job.deadline, lambda: receiver.prepare(job))
    answer = expect(p.Fetched, got, request).answer
    try:
        return receiver.receive(job, answer)
    except PeerLost as error:
        # Whether the peer lives is for the control connection to say; another way may work.
        raise TransferError(str(error), reason=error.reason) from error


def _release(
    connection: Connection, lease: int, outcome: str, deadline: Deadline, readers: int = 1
) -> None:
    request = p.Release(connection.endpoint.generation, lease, outcome, readers)
    connection.ask(request, p.Done, deadline)
