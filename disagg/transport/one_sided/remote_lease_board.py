"""What fetches that ask nothing have in common: the producer's board of leases, on the same host.

The board (board.py) is read out of the producer's memory, and what is read now is said in the slots
(hazards.py) that both ends map. Where one of them cannot be had the producer is asked, as ever.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from disagg.errors import TransferError
from disagg.transport.base import FetchJob, OneSidedReceiver, PostedLease
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.host.process_vm import peek
from disagg.transport.one_sided import lease_board, offers
from disagg.transport.one_sided.hazard_pointers import RemoteHazardPointers
from disagg.transport.protocol import Part

logger = logging.getLogger(__name__)


class LeaseBoardOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where a producer's board lies: its address and token, and the file of its slots."""

    address: int
    token: bytes
    hazards: int


def posting(of: lease_board.LeaseBoard | None) -> LeaseBoardOffer | None:
    """For an offer. None where the producer is to be asked."""
    if of is None or of.hazards is None:
        return None
    return LeaseBoardOffer(of.address, of.token, of.hazards.fd)


class RemoteLeaseBoard:
    """The board of process `pid`. Raises `TransferError` if it cannot be read, or nothing said."""

    def __init__(self, pid: int, at: LeaseBoardOffer) -> None:
        self.pid, self.at = pid, at
        self.hazards = RemoteHazardPointers(pid, at.hazards, at.token)
        self.peek(at.address, 1)

    def peek(self, at: int, length: int) -> bytes:
        """Of the producer's memory."""
        return peek(self.pid, at, length)

    @contextlib.contextmanager
    def reading(self, slot: int, lease: int) -> Iterator[PostedLease | None]:
        """As `OneSidedReceiver.reading`."""
        if not self.hazards.have(slot, lease):
            yield None
            return
        with self.hazards.naming(slot, lease):
            yield lease_board.look_up(self.peek, self.at.address, self.at.token, lease)

    def still_there(self, posted: PostedLease) -> bool:
        """As `OneSidedReceiver.still_there`."""
        return lease_board.still_there(self.peek, posted)


class Producer(offers.Producer, Protocol):
    """Whoever made an offer. `board`: None if its leases are to be asked for."""

    board: RemoteLeaseBoard | None


R = TypeVar("R", bound=Producer)


class BoardReceiver(OneSidedReceiver, Generic[R]):
    """Looks leases up on the boards of those whose offers are in `_offered`, which makes an offer
    `usable`."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._offered: dict[bytes, R] = {}

    @contextlib.contextmanager
    def reading(self, offer: bytes, slot: int, lease: int) -> Iterator[PostedLease | None]:
        producer = self._offered.get(offer)
        if producer is None or producer.board is None:
            yield None
            return
        with producer.board.reading(slot, lease) as posted:
            yield posted

    def read(self, offer: bytes, posted: PostedLease, part: Part, job: FetchJob) -> int | None:
        producer = self._offered.get(offer)
        if producer is None:
            return None  # it is dead, and was forgotten
        try:
            theirs = producer.cache.within(
                posted.block_ids, part.unit, part.spans, part.heads, part.regions
            )
        except ValueError:
            return None
        offers.compare(self._cache, job.blocks, producer.cache, theirs)
        return self._copy(producer, theirs, job)

    def still_there(self, offer: bytes, posted: PostedLease) -> bool:
        producer = self._offered.get(offer)
        found = producer.board if producer is not None else None
        return found is not None and found.still_there(posted)

    @abstractmethod
    def _copy(self, producer: R, theirs: Selection, job: FetchJob) -> int:
        """Fill the job's blocks from these of the producer's, and return the number of bytes."""


def open_board(transport: str, pid: int, at: LeaseBoardOffer | None) -> RemoteLeaseBoard | None:
    """The board of a process that was just met. None if its leases are to be asked for."""
    if at is None:
        return None
    try:
        return RemoteLeaseBoard(pid, at)
    except TransferError as error:
        logger.info("%s: its leases are asked for: %s", transport, error)
        return None
