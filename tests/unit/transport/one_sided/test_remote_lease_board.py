"""A lease board as a consumer sees it, read out of this process's own memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from disagg.errors import DataCorrupt, TransferError
from disagg.transport.base import FetchJob, LeaseEntry
from disagg.transport.blocks import BlockCache, Region, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.one_sided import offers
from disagg.transport.one_sided.lease_board import LeaseBoard
from disagg.transport.one_sided.remote_lease_board import (
    BoardCache,
    LeaseBoardOffer,
    RemoteLeaseBoard,
    board_offer,
    open_board,
)
from disagg.transport.protocol import Part

TOKENS = 4
LEASE, BLOCK_IDS = 5, [3, 1]


class Named(BoardCache):
    """Keeps which blocks it was to copy, as (block ids, first, count)."""

    name = "named"

    def is_alive(self) -> bool:
        return True

    def _copy(self, blocks: Selection, job: FetchJob) -> int:
        self.copied = [*blocks.block_ids], blocks.first, blocks.count
        return 77


def cache(content: int = 8) -> BlockCache:
    return BlockCache([Region("a", torch.zeros((8, 1, TOKENS, content), dtype=torch.uint8), "U8")])


def offered(board: LeaseBoard) -> LeaseBoardOffer:
    offer = board_offer(board)
    assert offer is not None
    return offer


@pytest.fixture
def board() -> LeaseBoard:
    board = LeaseBoard()
    board.post(LEASE, BLOCK_IDS)
    return board


@pytest.fixture
def remote(board: LeaseBoard) -> RemoteLeaseBoard:
    return RemoteLeaseBoard(os.getpid(), offered(board))


@pytest.fixture
def named(board: LeaseBoard, remote: RemoteLeaseBoard) -> Named:
    return Named(board.token, cache(), cache(), remote)


def job(ours: BlockCache, block_ids: list[int]) -> FetchJob:
    return FetchJob(ours.whole(block_ids), Deadline.after(5))


def entry_of(named: BoardCache, board: LeaseBoard) -> LeaseEntry:
    with named.reading(board.take_slot(), LEASE) as entry:
        assert entry is not None
        return entry


def test_without_slots_no_board_is_offered(board: LeaseBoard) -> None:
    assert board_offer(None) is None
    board.hazards = None
    assert board_offer(board) is None
    assert open_board("any", os.getpid(), None) is None


def without_address(offer: LeaseBoardOffer) -> LeaseBoardOffer:
    return LeaseBoardOffer(8, offer.token, offer.hazards)


def of_another(offer: LeaseBoardOffer) -> LeaseBoardOffer:
    return LeaseBoardOffer(offer.address, bytes(len(offer.token)), offer.hazards)


@pytest.mark.parametrize("change", [without_address, of_another])
def test_a_board_that_cannot_be_read_is_not_opened(
    board: LeaseBoard, change: Callable[[LeaseBoardOffer], LeaseBoardOffer]
) -> None:
    offer = change(offered(board))
    with pytest.raises(TransferError):
        RemoteLeaseBoard(os.getpid(), offer)
    assert open_board("any", os.getpid(), offer) is None


def test_a_lease_is_named_while_it_is_read(board: LeaseBoard, named: Named) -> None:
    slot = board.take_slot()
    with named.reading(slot, LEASE) as entry:
        assert entry is not None
        assert entry.block_ids == BLOCK_IDS
        assert board.is_read(LEASE)
        assert named.still_there(entry)
        board.remove(LEASE)
        assert not named.still_there(entry)
    assert not board.is_read(LEASE)
    with named.reading(slot, LEASE) as entry:
        assert entry is None, "it is not on the board any more"


@pytest.mark.parametrize(("slot", "lease"), [(-1, LEASE), (1024, LEASE), (0, -1), (0, 1 << 62)])
def test_what_no_slot_can_name_is_not_read(named: Named, slot: int, lease: int) -> None:
    with named.reading(slot, lease) as entry:
        assert entry is None


def test_without_a_board_the_producer_is_asked(board: LeaseBoard, named: Named) -> None:
    asks = Named(board.token, cache(), cache(), None)
    with asks.reading(0, LEASE) as entry:
        assert entry is None
    assert not asks.still_there(entry_of(named, board))
    assert asks.request(job(cache(), [0])) == b""


def test_the_lease_says_what_is_copied(board: LeaseBoard, named: Named) -> None:
    entry, wanted = entry_of(named, board), job(cache(), [6])
    assert named.read(entry, Part(TOKENS, ((1, 2),)), wanted) == 77
    assert named.copied == ([1], 0, 1)
    assert named.read(entry, Part(TOKENS, ((1, 3),)), wanted) is None, "it has two blocks"


def test_the_answer_says_what_is_copied(board: LeaseBoard, named: Named) -> None:
    answer = offers.encode(board.token, cache().whole([7]))
    assert named.receive(job(cache(), [6]), answer) == 77
    assert named.copied == ([7], 0, 1)


def test_blocks_of_another_size_are_not_copied(board: LeaseBoard, remote: RemoteLeaseBoard) -> None:
    named = Named(board.token, cache(), cache(content=16), remote)
    with pytest.raises(DataCorrupt, match="the same selection"):
        named.read(entry_of(named, board), Part(TOKENS, ((0, 1),)), job(cache(), [6]))
    assert not hasattr(named, "copied")
