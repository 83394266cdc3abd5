"""Hazard pointers: who reads what, and how long that keeps it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest

from disagg.errors import LeaseGone, TransferError
from disagg.transport.control.lease import LeaseTable
from disagg.transport.deadline import Deadline
from disagg.transport.one_sided.hazard_pointers import NO_SLOT, HazardPointers, RemoteHazardPointers

TOKEN = b"0123456789abcdef"
LIMIT_S = 0.3


def remote(hazards: HazardPointers, token: bytes = TOKEN) -> RemoteHazardPointers:
    return RemoteHazardPointers(os.getpid(), hazards.fd, token)


@contextlib.contextmanager
def reading(table: LeaseTable, lease: int) -> Iterator[int]:
    """As a consumer that asks nothing does."""
    board = table.board
    assert board.hazards is not None
    slot = board.take_slot()
    with remote(board.hazards, board.token).naming(slot, lease):
        yield slot


def ended(table: LeaseTable) -> list[tuple[str, str]]:
    return [(one.request_id, one.outcome) for one in table.take_ended()]


def test_a_lease_is_named_while_it_is_read() -> None:
    hazards = HazardPointers(TOKEN)
    first, second = hazards.take(), hazards.take()
    ours, others = remote(hazards), remote(hazards)
    with ours.naming(first, 0), others.naming(second, 7):
        assert [hazards.names(lease) for lease in (0, 7, 1, 8)] == [True, True, False, False]
    assert not hazards.names(0)
    assert not hazards.names(7)
    with pytest.raises(RuntimeError), ours.naming(first, 3):
        raise RuntimeError
    assert not hazards.names(3)


def test_who_leaves_names_nothing() -> None:
    hazards = HazardPointers(TOKEN)
    slot = hazards.take()
    with remote(hazards).naming(slot, 5):
        assert hazards.give_back(slot) == 5
        assert not hazards.names(5)
    assert hazards.give_back(hazards.take()) is None


def test_as_many_as_there_are() -> None:
    hazards = HazardPointers(TOKEN)
    taken = [hazards.take() for _ in range(1024)]
    assert sorted(taken) == list(range(1024))
    assert hazards.take() == NO_SLOT
    assert hazards.give_back(NO_SLOT) is None
    hazards.give_back(77)
    assert hazards.take() == 77


def test_who_lost_its_connection_takes_no_sign_away() -> None:
    """Its slot is another one's by now, and it does not know yet."""
    hazards = HazardPointers(TOKEN)
    slot = hazards.take()
    late, other = remote(hazards), remote(hazards)
    with contextlib.ExitStack() as reading:
        reading.enter_context(late.naming(slot, 5))
        hazards.give_back(slot)
        assert [hazards.take() for _ in range(1024)][-1] == slot, "the last to be used again"
        with other.naming(slot, 6):
            reading.close()
            assert hazards.names(6)
    assert not hazards.names(6)


@pytest.mark.parametrize(("slot", "lease"), [(-1, 0), (1024, 0), (0, -1), (0, 1 << 62)])
def test_what_has_no_room(slot: int, lease: int) -> None:
    ours = remote(HazardPointers(TOKEN))
    assert ours.have(0, 0)
    assert not ours.have(slot, lease)


def test_slots_of_somebody_else() -> None:
    with pytest.raises(TransferError, match="other slots"):
        remote(HazardPointers(TOKEN), bytes(16))
    with open(os.devnull, "r+b") as file, pytest.raises(TransferError, match="cannot map"):
        RemoteHazardPointers(os.getpid(), file.fileno(), TOKEN)
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(TransferError, match="not sealed"):
        RemoteHazardPointers(os.getpid(), fd, TOKEN)
    os.close(fd)
    hazards = HazardPointers(TOKEN)
    ours = remote(hazards)
    hazards.close()
    with pytest.raises(TransferError, match="cannot map"):
        remote(hazards)
    with ours.naming(0, 1):  # into the void
        pass


def test_no_file_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        hazards = HazardPointers(TOKEN)
        remote(hazards)
        del hazards
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("outcome", ["fetched", "aborted", None])
def test_what_is_read_is_kept(outcome: str | None) -> None:
    """However the lease ends meanwhile; the board shows the reader that it has ended."""
    table = LeaseTable(20)
    table.grant(0, "r", [1, 2], 30 if outcome else 0.01)
    with reading(table, 0):
        if outcome:
            table.release(0, outcome)
        time.sleep(0.02)
        assert ended(table) == []
        assert table.board.posted() == (set() if outcome else {0})
        table.check_integrity()
    assert ended(table) == [("r", outcome or "expired")]


def test_what_is_read_for_too_long_is_not(caplog: pytest.LogCaptureFixture) -> None:
    table = LeaseTable(LIMIT_S)
    table.grant(0, "r", [1], 0.01)
    time.sleep(0.02)
    with reading(table, 0):
        assert ended(table) == []
        assert not caplog.records
        time.sleep(LIMIT_S + 0.05)
        assert ended(table) == [("r", "expired")]
        assert "lease 0: its blocks are free" in caplog.text
        assert table.board.posted() == set()


def test_a_reader_is_a_user() -> None:
    """One lease for several ranks: it has not run out while one of them reads it."""
    table = LeaseTable(20)
    table.grant(0, "r", [1], 0.02)
    with reading(table, 0):
        time.sleep(0.04)
        table.acquire(0, Deadline.after(1))
        table.done_using(0)
        table.renew([0])
    assert ended(table) == []
    time.sleep(0.04)
    with pytest.raises(LeaseGone):
        table.acquire(0, Deadline.after(1))
    assert ended(table) == [("r", "expired")]


def test_a_reader_that_left() -> None:
    """The lease serves for a moment more."""
    table = LeaseTable(20)
    table.grant(0, "r", [1], 30)
    with reading(table, 0) as slot:
        assert table.board.give_back(slot) == 0
        table.lost_reader(0)
        table.lost_reader(9)  # a number that never was
    assert ended(table) == []
    assert 1 < table._leases[0].deadline - time.monotonic() < 2.1
