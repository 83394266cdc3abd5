"""The contract of a transport: what each end does, and when it may.

A transport has two ends that share its name: the producer's `Sender` and the consumer's
`Receiver`. They never talk on their own: the control channel carries the offer at hello, and one
fetch's detail and answer. Both ends may be called from several threads at once.

Order of one handoff, seen from the transport:

1. `Sender.offer()` -> bytes, part of the hello reply. `Receiver.open(offer)` -> `RemoteCache`, the
   producer's cache as this worker can fetch from it; None if this pair of workers cannot use the
   transport. It probes, it does not guess. The control client keeps the result per producer.
2. `RemoteCache.request(job)` -> bytes, the detail of the fetch: whatever the sender needs to know.
   While the producer works on it, `RemoteCache.prepare(job)` does what needs no answer.
3. `Sender.send(blocks, detail, deadline)` -> bytes, while the lease is in use. A two-sided
   transport moves or stages the bytes here; a one-sided one only names the blocks.
4. `RemoteCache.receive(job, answer)` -> bytes moved. Everything was checked when it returns.
5. `Sender.finish(answer)`: the lease is no longer in use; drop what was staged for it. When it
   returns, this transport reads no block of that fetch any more.

A one-sided read may overlap a free, if the consumer was silent for so long that the producer ended
the lease. So the blocks that `receive` filled are valid only once `Release` was answered on the
same connection: the producer answers it only while the lease is still in use. A two-sided sender
reads the blocks while the lease is in use (see 5), so they are valid at once, and the consumer
releases the lease after it has put them to use.

A one-sided transport can also read without asking the producer: see `ReadableCache`.

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

    after: on a device, the blocks' previous users may still run until this event.
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
        """Move, stage or name the blocks; returns the answer for `RemoteCache.receive`."""

    def finish(self, answer: bytes) -> None:
        """Drop what `send` staged. Called exactly once per `send`; never raises."""

    def close(self) -> None:
        """Drop everything staged; no call follows."""


class RemoteCache(Protocol):
    """A producer's cache, to fetch from over one transport."""

    name: str

    def request(self, job: FetchJob) -> bytes:
        """The detail for `Sender.send`. Changes nothing: it may never be sent."""

    def prepare(self, job: FetchJob) -> None:
        """Called while the producer works; the same thread calls `receive` next, if at all."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        """Fill the job's blocks; returns the number of bytes moved."""


class Receiver(Protocol):
    """The consumer's end."""

    name: str

    def open(self, offer: bytes) -> RemoteCache | None:
        """The cache behind the offer; None if this worker cannot fetch from it.

        A transport that needs nothing of the offer after its probe returns itself.
        """

    def close(self) -> None:
        """Drop connections and mappings; no call follows."""


class ReadableCache(ABC):
    """A `RemoteCache` that the consumer can read without asking the producer (one-sided).

    The producer publishes its leases in its memory (`one_sided/lease_board.py`), and sees which of
    them are being read (`one_sided/hazard_pointers.py`). Within `reading` the lease is in use;
    `read` fills the blocks, which are valid if `still_there` confirms it. The consumer sends
    `Release` afterwards.

    None and False do not mean that the lease is gone: the caller then asks the producer.
    """

    name: str

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the producer's process exists, and its cache is still open here."""

    @abstractmethod
    def reading(self, slot: int, lease: int) -> AbstractContextManager[LeaseEntry | None]:
        """The lease's entry; in use within the context, by the connection that has this slot. None
        if there is no such entry, or it cannot be used this way."""

    @abstractmethod
    def read(self, entry: LeaseEntry, part: Part, job: FetchJob) -> int | None:
        """Fill the job's blocks with this part of the lease; returns the number of bytes moved.
        None if the lease has no such part."""

    @abstractmethod
    def still_there(self, entry: LeaseEntry) -> bool:
        """Whether the lease has kept its blocks ever since its entry was looked up."""

    @abstractmethod
    def request(self, job: FetchJob) -> bytes:
        """As `RemoteCache.request`."""

    @abstractmethod
    def prepare(self, job: FetchJob) -> None:
        """As `RemoteCache.prepare`."""

    @abstractmethod
    def receive(self, job: FetchJob, answer: bytes) -> int:
        """As `RemoteCache.receive`."""


class LeaseEntry(NamedTuple):
    """A lease as it was read from a producer's board. head: int64 [lease + 1, count, checksum], as
    read; at: its address. block_ids: as in `Lease`."""

    head: bytes
    at: int
    block_ids: Sequence[int]
