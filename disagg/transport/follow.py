"""Following a lease that grows: its final part is fetched while the rest of the prompt is computed.

What was fetched counts only when the producer's next answer says that the lease is still there, in
the same epoch: then the request has kept the blocks in between, as the producer hears of a loss
before it runs the step that could overwrite them. What was fetched in another epoch is discarded.
Its last answer says that the lease is whole. From then on it is a lease like any other.

With several KV cache groups vLLM may write to a step's blocks before the producer hears of the step
(`LeaseGrowth.add`). Then only the answer that the lease is whole counts, as a loss comes before it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from disagg.errors import PeerLost, PeerRefused, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob, Receiver
from disagg.transport.control.client import Connection, Endpoint, Peers
from disagg.transport.control.lease import ABORTED, FETCHED
from disagg.transport.deadline import Deadline
from disagg.transport.fetch import FetchRequest, Moved, OneFetch, misfit

_RELEASE_S = 2.0


@dataclass(frozen=True)
class Stream:
    """A lease that grows, as its consumer names it. prompt: a digest of the prompt."""

    name: bytes
    prompt: bytes


class Followed:
    """One producer rank's lease while it is followed. grown: the producer's last answer."""

    def __init__(
        self,
        peers: Peers,
        connection: Connection,
        request: FetchRequest,
        receivers: Sequence[Receiver],
        grown: p.Grown,
    ) -> None:
        self._peers, self._connection, self._receivers = peers, connection, receivers
        self.request, self.grown = replace(request, lease=grown.lease), grown
        self._needs_proof = False

    def proceed(self, seconds: float, deadline: Deadline) -> bool:
        """Ask for news, and wait at most `seconds` for them. Returns whether all that was fetched
        so far counts; if not, the request began anew. Raises `TransferError`: then what was fetched
        since the last answer does not count."""
        before = self.grown
        message = p.Proceed(before.epoch, before.tokens, seconds)
        self.grown = self._connection.ask(message, p.Grown, deadline)
        return self.grown.epoch == before.epoch

    def fetch(self, part: p.Part, job: FetchJob) -> Moved:
        """Fill the job's blocks with a part that is final. It counts only after the next `proceed`
        or `end`. Raises `TransferError`; the lease is then given up."""
        request = replace(self.request, part=part)
        with contextlib.ExitStack() as unused:
            one = OneFetch(self._peers, self._connection, request, job, self._receivers, unused)
            taken = one.take(time.monotonic(), [])
        self._needs_proof |= taken.needs_proof
        return taken.moved

    def end(self, deadline: Deadline, later: contextlib.ExitStack) -> None:
        """All is fetched: release the lease, now or at the end of `later`. Raises `TransferError`
        if what was fetched may be wrong."""
        if self._needs_proof:
            self._release(FETCHED, deadline)
            return

        def release_later() -> None:
            with contextlib.suppress(TransferError):  # it will expire
                self._release(FETCHED, Deadline.after(_RELEASE_S))

        later.callback(release_later)

    def give_up(self) -> None:
        """Nobody needs the lease any more. Never raises."""
        if self._connection.in_use:
            with contextlib.suppress(TransferError):
                self._release(ABORTED, Deadline.after(_RELEASE_S))

    def _release(self, outcome: str, deadline: Deadline) -> None:
        generation, readers = self._connection.endpoint.generation, self.request.readers
        message = p.Release(generation, self.request.lease, outcome, readers)
        self._connection.ask(message, p.Done, deadline)


@contextlib.contextmanager
def followed(
    peers: Peers,
    request: FetchRequest,
    stream: Stream,
    receivers: Sequence[Receiver],
    deadline: Deadline,
) -> Iterator[Followed]:
    """Follow a lease within the context. Its prompt's first step has begun.

    request: its part is the whole of what will be fetched, its lease number is not used. deadline:
    for its beginning. Raises `TransferError`; a connection that is then in use is closed.
    """
    endpoint = request.endpoint
    try:
        with peers.connection(endpoint, deadline) as connection:
            problem = misfit(request, connection.welcome.layers)
            if problem is not None:
                raise PeerRefused(problem)
            message = p.Follow(endpoint.generation, stream.name, stream.prompt)
            grown = connection.ask(message, p.Grown, deadline)
            lease = Followed(peers, connection, request, receivers, grown)
            try:
                yield lease
            except BaseException:
                lease.give_up()
                raise
    except PeerLost:
        peers.forget(endpoint)
        raise


def awaited(
    peers: Peers, endpoint: Endpoint, stream: Stream, seconds: float, deadline: Deadline
) -> p.Awaited:
    """Whether the prompt's first step has begun; waits at most `seconds` for it. Raises
    `TransferError` if it never will."""
    with peers.connection(endpoint, deadline) as connection:
        message = p.Await(endpoint.generation, stream.name, stream.prompt, seconds)
        return connection.ask(message, p.Awaited, deadline)
