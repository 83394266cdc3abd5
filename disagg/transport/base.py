"""The contract of a transport: what each end does, and when it may.

A transport has two ends that share its name. The producer's `Sender` and the consumer's
`Receiver` never talk on their own: the control channel carries `offer` at hello, and one
fetch's detail and answer. Both ends may be called from several threads at once.

Order of one handoff, seen from the transport:

1. `Sender.offer()` -> bytes, put into the hello reply. `Receiver.usable(offer)` says whether
   this pair of workers can use the transport; it probes, it does not guess.
2. `Receiver.request(job)` -> bytes, the detail of the fetch; whatever the sender needs of us.
   While the producer works on it, `Receiver.prepare(job)` does what needs no answer.
3. `Sender.send(blocks, detail, deadline)` -> bytes, while the lease is in use. A two-sided
   transport moves or stages the bytes here; a one-sided one only names the memory.
4. `Receiver.receive(job, answer)` -> bytes moved. Everything was checked when it returns.
5. `Sender.finish(answer)`: the lease is no longer in use; drop what was staged for it. When it
   returns, this transport reads no block of that fetch any more.

A one-sided read may overlap a free, if the consumer was silent for so long that the producer
gave the lease up. So what `receive` returned is believed only once `Release` was answered on
the same connection: the producer answers it only while the lease is still in use. What a sender
moved it read while the lease was in use (see 5), so all of it is right whatever comes after: the
producer is told when the blocks were put to use.

A `OneSidedReceiver` does without the producer's word where it can: within `reading` the producer
sees that its lease is in use (hazards.py), as it is posted in its memory (board.py); `read` fills
the blocks, and what was read is believed if `still_there` says so. The producer hears of it
afterwards, by `Release`.

Errors: every end raises `TransferError` and nothing else on purpose; its `reason` is the label
of `disagg_kv_load_failures_total`. After an error in `receive` the destination blocks hold
garbage, which the caller must not use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from disagg.transport.blocks import Selection
from disagg.transport.deadline import Deadline, Event
from disagg.transport.protocol import Part


@dataclass(frozen=True)
class FetchJob:
    """One fetch as the consumer sees it: fill these parts of the local cache.

    `after`: on a device, what the blocks were given to before may still be under way until then.
    """

    blocks: Selection
    deadline: Deadline
    after: Event | None = None


class Sender(Protocol):
    """The producer's end."""

    name: str

    def offer(self) -> bytes:
        """What the consumer needs to know before the first fetch."""

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        """Move, stage or name the blocks; returns what `Receiver.receive` is given."""

    def finish(self, answer: bytes) -> None:
        """Drop what `send` staged. Called exactly once per `send`; never raises."""

    def close(self) -> None:
        """Drop everything staged; no call follows."""


class Receiver(Protocol):
    """The consumer's end. `one_sided`: it reads the producer's memory by itself."""

    name: str
    one_sided: bool

    def usable(self, offer: bytes) -> bool:
        """Whether this worker can fetch from the producer that made the offer."""

    def request(self, job: FetchJob) -> bytes:
        """The detail that `Sender.send` is given. Changes nothing: it may never be sent."""

    def prepare(self, job: FetchJob) -> None:
        """The same thread calls `receive` next, if at all; until then the producer has the word."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        """Fill the job's blocks; returns the number of bytes moved."""

    def close(self) -> None:
        """Drop connections and mappings; no call follows."""


class OneSidedReceiver(ABC):
    """What a `Receiver` has besides if it can do without the producer's word.

    `None` and `False` say nothing of the lease: whoever gets them asks the producer.
    """

    @abstractmethod
    def reading(
        self, offer: bytes, slot: int, lease: int
    ) -> AbstractContextManager[PostedLease | None]:
        """The lease as it is posted by the producer that made the offer, which is `usable`; in use
        within the context, by the connection of this slot. None if it is not posted, or cannot be
        used so."""

    @abstractmethod
    def read(self, offer: bytes, posted: PostedLease, part: Part, job: FetchJob) -> int | None:
        """Fill the job's blocks with this part of it; returns the number of bytes moved. None if
        the lease has no such part."""

    @abstractmethod
    def still_there(self, offer: bytes, posted: PostedLease) -> bool:
        """Whether the lease kept its blocks all the time since it was looked up."""


class PostedLease(NamedTuple):
    """A lease as it stood on a board. `head`: as it was read, int64 [lease + 1, count, checksum];
    `at`: its address. `block_ids`: as in `Lease`."""

    head: bytes
    at: int
    block_ids: Sequence[int]
