"""The board of leases: what is on it, and that nothing else is ever taken for it."""

from __future__ import annotations

import contextlib
import ctypes
import random
import time

import numpy as np
import pytest

from disagg.errors import LeaseGone, PeerLost
from disagg.transport.base import LeaseEntry
from disagg.transport.control.lease import LeaseTable
from disagg.transport.deadline import Deadline
from disagg.transport.one_sided.lease_board import LeaseBoard, look_up, still_there

ROWS, MOST_IDS = 1024, 1018


def peek(at: int, length: int) -> bytes:
    """This process's own memory."""
    return ctypes.string_at(at, length)


def found(board: LeaseBoard, lease: int, token: bytes | None = None) -> LeaseEntry | None:
    return look_up(peek, board.address, token or board.token, lease)


def head(board: LeaseBoard, lease: int) -> np.ndarray:
    heads: np.ndarray = board._heads
    return heads[lease % ROWS]


@pytest.mark.parametrize("ids", [[], [7], [3, -1, -1, 9], list(range(MOST_IDS))])
def test_posted_and_taken_off(ids: list[int]) -> None:
    board = LeaseBoard()
    assert found(board, 5) is None
    board.post(5, ids)
    posted = found(board, 5)
    assert posted is not None
    assert list(posted.block_ids) == ids
    assert still_there(peek, posted)
    board.remove(4)
    board.remove(5 + ROWS)
    assert still_there(peek, posted)
    board.remove(5)
    assert not still_there(peek, posted)
    assert found(board, 5) is None


def test_of_two_that_want_one_row_the_later_has_it() -> None:
    board = LeaseBoard()
    board.post(1, [1, 2])
    first = found(board, 1)
    board.post(1 + ROWS, [3])
    assert first is not None
    assert not still_there(peek, first)
    assert found(board, 1) is None
    board.remove(1)
    second = found(board, 1 + ROWS)
    assert second is not None
    assert list(second.block_ids) == [3]


def test_a_closed_board_has_nothing() -> None:
    board = LeaseBoard()
    board.post(1, [1, 2])
    posted = found(board, 1)
    board.close()
    board.post(2, [3])
    board.remove(1)
    assert posted is not None
    assert not still_there(peek, posted)
    assert board.posted() == set()


@pytest.mark.parametrize("word", range(3))
def test_a_row_that_is_half_another(word: int) -> None:
    """Whichever part of it was read too early or too late."""
    board = LeaseBoard()
    board.post(1, [1, 2, 3, 4])
    head(board, 1)[word] = [1 + ROWS, 3, 12345][word]
    assert found(board, 1) is None


def test_ids_of_another_lease() -> None:
    board = LeaseBoard()
    board.post(1, [1, 2, 3, 4])
    board._ids[1, 2] = 7
    assert found(board, 1) is None


@pytest.mark.parametrize("count", [-1, MOST_IDS + 1, 1 << 40])
def test_counts_that_cannot_be(count: int) -> None:
    board = LeaseBoard()
    board.post(1, [1])
    head(board, 1)[1] = count
    assert found(board, 1) is None


def test_more_blocks_than_a_row_has_room_for() -> None:
    board = LeaseBoard()
    board.post(1, range(MOST_IDS + 1))
    assert board.posted() == set()
    assert found(board, 1) is None


def test_another_boards_rows() -> None:
    """As of another process that has the same addresses."""
    board = LeaseBoard()
    board.post(1, [1])
    assert found(board, 1, bytes(16)) is None


@pytest.mark.parametrize("seed", range(20))
def test_only_what_may_be_taken_into_use_is_posted(seed: int) -> None:
    """Whatever happens to leases, in any order; and none that was given back ever is."""
    table, generator = LeaseTable(20), random.Random(seed)
    given: dict[int, list[int]] = {}
    ended: set[int] = set()
    in_use: list[int] = []
    for step in range(400):
        lease = generator.choice([*given, 0])
        match generator.randrange(8):
            case 0 | 1:
                given[step] = [generator.randrange(100) for _ in range(generator.randrange(9))]
                table.grant(step, str(step), given[step], generator.choice([0.001, 30]))
            case 2:
                with contextlib.suppress(LeaseGone, PeerLost):
                    table.acquire(lease, Deadline.after(0.001))
                    in_use.append(lease)
            case 3 if in_use:
                left = generator.random() < 0.5
                table.done_using(in_use.pop(generator.randrange(len(in_use))), left=left)
            case 4:
                table.release(lease, generator.choice(["fetched", "aborted"]), 2)
            case 5 if generator.random() < 0.1:
                table.revoke(lease)
            case 6:
                time.sleep(0.001)
            case _:
                ended |= {int(one.request_id) for one in table.take_ended()}
        table.check_integrity()
        assert not table.board.posted() & ended
        for one in table.board.posted():
            posted = found(table.board, one)
            assert posted is not None
            assert list(posted.block_ids) == given[one]
    assert ended
