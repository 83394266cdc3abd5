"""Reading without asking: a producer's lease board, seen from a consumer on the same host.

The consumer reads the board (`lease_board.py`) out of the producer's memory, and marks what it is
reading in the hazard slots (`hazard_pointers.py`) that both processes map. Where one of the two is
not available, it asks the producer over the control channel.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Iterator

import msgspec

from disagg.errors import TransferError
from disagg.transport.base import FetchJob, LeaseEntry, ReadableCache
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.host.process_vm import peek
from disagg.transport.one_sided import lease_board, offers
from disagg.transport.one_sided.hazard_pointers import RemoteHazardPointers
from disagg.transport.protocol import Part

logger = logging.getLogger(__name__)


class LeaseBoardOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where a producer's board lies: its address and token, and the file of its hazard slots."""

    address: int
    token: bytes
    hazards: int


def board_offer(board: lease_board.LeaseBoard | None) -> LeaseBoardOffer | None:
    """The part of an offer that names the board. None where consumers have to ask."""
    if board is None or board.hazards is None:
        return None
    return LeaseBoardOffer(board.address, board.token, board.hazards.fd)


class RemoteLeaseBoard:
    """The board of process `pid`. Raises `TransferError` if it or its slots cannot be opened."""

    def __init__(self, pid: int, at: LeaseBoardOffer) -> None:
        self.pid, self.at = pid, at
        self.hazards = RemoteHazardPointers(pid, at.hazards, at.token)
        self.peek(at.address, 1)

    def peek(self, at: int, length: int) -> bytes:
        """Bytes of the producer's memory."""
        return peek(self.pid, at, length)

    @contextlib.contextmanager
    def reading(self, slot: int, lease: int) -> Iterator[LeaseEntry | None]:
        """As `ReadableCache.reading`."""
        if not self.hazards.have(slot, lease):
            yield None
            return
        with self.hazards.naming(slot, lease):
            yield lease_board.look_up(self.peek, self.at.address, self.at.token, lease)

    def still_there(self, entry: LeaseEntry) -> bool:
        """As `ReadableCache.still_there`."""
        return lease_board.still_there(self.peek, entry)


def open_board(transport: str, pid: int, at: LeaseBoardOffer | None) -> RemoteLeaseBoard | None:
    """The board of a producer whose offer was just opened. None if it has to be asked."""
    if at is None:
        return None
    try:
        return RemoteLeaseBoard(pid, at)
    except TransferError as error:
        logger.info("%s: cannot read the producer's leases, asks for them: %s", transport, error)
        return None


class BoardCache(ReadableCache):
    """A producer's cache with its lease board. token: of its offer. board: None if the producer has
    to be asked for leases. Subclasses copy the blocks that this class selects.
    """

    def __init__(
        self, token: bytes, ours: BlockCache, theirs: BlockCache, board: RemoteLeaseBoard | None
    ) -> None:
        self._token, self._ours, self._theirs = token, ours, theirs
        self.board = board

    @contextlib.contextmanager
    def reading(self, slot: int, lease: int) -> Iterator[LeaseEntry | None]:
        if self.board is None:
            yield None
            return
        with self.board.reading(slot, lease) as entry:
            yield entry

    def read(self, entry: LeaseEntry, part: Part, job: FetchJob) -> int | None:
        try:
            blocks = self._theirs.within(
                entry.block_ids, part.unit, part.spans, part.heads, part.regions
            )
        except ValueError:
            return None
        offers.compare(self._ours, job.blocks, self._theirs, blocks)
        return self._copy(blocks, job)

    def still_there(self, entry: LeaseEntry) -> bool:
        return self.board is not None and self.board.still_there(entry)

    def request(self, job: FetchJob) -> bytes:
        return b""

    def prepare(self, job: FetchJob) -> None:
        """Only the answer says what to read."""

    def receive(self, job: FetchJob, answer: bytes) -> int:
        blocks = offers.decode(answer, self._token, self._theirs, self._ours, job.blocks)
        return self._copy(blocks, job)

    @abstractmethod
    def _copy(self, blocks: Selection, job: FetchJob) -> int:
        """Fill the job's blocks from these of the producer; returns the number of bytes."""
