"""The lease table: blocks are handed back once, and never while in use."""

from __future__ import annotations

import random
import threading
import time

import pytest

from disagg.errors import LeaseGone
from disagg.transport.control.lease import LeaseTable
from disagg.transport.deadline import Deadline


def test_released_in_use_ends_when_unused() -> None:
    table = LeaseTable(20)
    table.grant(0, "r", [1, 2], 30)
    table.acquire(0, Deadline.after(1))
    table.release(0, "aborted")
    assert table.take_ended() == []
    with pytest.raises(LeaseGone):
        table.acquire(0, Deadline.after(1))
    table.done_using(0)
    assert [tuple(ended) for ended in table.take_ended()] == [("r", "aborted")]
    assert table.held() == 0


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def outcomes(table: LeaseTable) -> list[str]:
    return [ended.outcome for ended in table.take_ended()]


def test_renewed_lease_lives_on() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    table.grant(0, "r", [1], 30)
    for _ in range(400):
        clock.now += 29
        table.renew([0, 99])
        assert outcomes(table) == []
    clock.now += 31
    table.renew([0])
    assert outcomes(table) == ["expired"]


def test_no_renewal_goes_beyond_the_total_life() -> None:
    clock = Clock()
    table = LeaseTable(20, limit_s=100, clock=clock)
    table.grant(0, "r", [1], 30)
    granted, ended = clock.now, list[str]()
    while not ended:
        clock.now += 1
        table.renew([0])
        ended = outcomes(table)
    assert (ended, clock.now - granted) == (["expired"], 101)


def test_a_silent_reader_keeps_no_lease_beyond_its_total_life() -> None:
    """It names the lease in its slot, and another consumer renews the lease."""
    clock = Clock()
    table = LeaseTable(read_limit_s=35, limit_s=100, clock=clock)
    assert table.board.hazards is not None
    slot = table.board.take_slot()
    table.grant(0, "r", [1], 30)
    table.board.hazards._slots[slot] = 1
    granted, ended = clock.now, list[str]()
    while not ended and clock.now < granted + 1000:
        clock.now += 5
        table.renew([0])
        ended = outcomes(table)
    assert ended == ["expired"]
    assert clock.now - granted <= 100 + 35 + 10


def test_the_first_time_may_be_longer_than_the_total_life() -> None:
    clock = Clock()
    table = LeaseTable(20, limit_s=10, clock=clock)
    table.grant(0, "r", [1], 30)
    clock.now += 29
    assert outcomes(table) == []
    table.renew([0])
    clock.now += 2
    assert outcomes(table) == ["expired"]


def test_what_is_taken_back_ends_for_everybody_but_its_reader() -> None:
    table = LeaseTable(20)
    for lease in range(3):
        table.grant(lease, str(lease), [lease], 30)
    table.acquire(1, Deadline.after(1))
    table.take_back([0, 1, 7])
    assert [tuple(ended) for ended in table.take_ended()] == [("0", "taken_back")]
    for lease in (0, 1):
        with pytest.raises(LeaseGone):
            table.acquire(lease, Deadline.after(1))
    table.release(1, "fetched")
    table.done_using(1)
    assert outcomes(table) == ["taken_back"]
    assert table.held() == 1
    table.take_back([2])
    table.take_back([2])
    assert outcomes(table) == ["taken_back"]


def test_a_reset_ends_what_was_granted_before_it() -> None:
    """In use or not; long before its time has passed."""
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    for lease in range(4):
        table.grant(lease, str(lease), [lease], 3600)
    table.acquire(1, Deadline.after(1))
    table.release(2, "fetched")
    table.revoke(3)
    assert table.board.posted() == {3}
    assert [tuple(one) for one in table.take_ended()] == [("0", "aborted"), ("2", "fetched")]
    for lease in range(3):
        with pytest.raises(LeaseGone):
            table.acquire(lease, Deadline.after(1))
    table.renew([1])
    table.done_using(1)
    assert outcomes(table) == ["aborted"]
    table.acquire(3, Deadline.after(1))
    table.done_using(3)


def test_a_lease_ends_behind_its_deadline() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    table.grant(0, "r", [1], 30)
    clock.now += 30
    table.acquire(0, Deadline.after(1))
    clock.now += 1
    assert outcomes(table) == [], "in use"
    table.done_using(0)
    assert outcomes(table) == ["expired"]


def test_who_left_has_two_seconds_to_return() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    for lease, seconds in ((0, 30), (1, 30), (2, 1)):
        table.grant(lease, str(lease), [lease], seconds)
        table.acquire(lease, Deadline.after(1))
    table.done_using(0, left=True)
    table.done_using(1)
    table.done_using(2, left=True)
    clock.now += 1.5
    assert [one.request_id for one in table.take_ended()] == ["2"], "its own time was shorter"
    clock.now += 1
    assert [one.request_id for one in table.take_ended()] == ["0"]
    assert table.held() == 1


def test_a_reader_that_looked_the_lease_up_just_before_its_end_keeps_it() -> None:
    """It names the lease after the producer looked at the slots, and before the lease leaves the
    board: the producer has to look again."""
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    table.grant(0, "r", [1], 30)
    clock.now += 31
    hazards, take_off = table.board.hazards, table.board.remove
    assert hazards is not None
    slot = table.board.take_slot()

    def found_meanwhile(lease: int) -> None:
        hazards._slots[slot] = lease + 1
        take_off(lease)

    table.board.remove = found_meanwhile  # type: ignore[method-assign]
    assert outcomes(table) == []
    assert table.board.posted() == set()
    clock.now += 20
    assert outcomes(table) == []
    hazards._slots[slot] = 0
    table.board.remove = take_off  # type: ignore[method-assign]
    assert outcomes(table) == ["expired"]


def test_a_reader_of_an_ended_lease_has_so_long() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    table.grant(0, "r", [1], 30)
    assert table.board.hazards is not None
    table.board.hazards._slots[table.board.take_slot()] = 1
    clock.now += 31
    assert outcomes(table) == []
    clock.now += 20
    assert outcomes(table) == []
    clock.now += 1
    assert outcomes(table) == ["expired"]


def test_what_is_renewed_in_time_counts_its_readers_time_anew() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    table.grant(0, "r", [1], 30)
    assert table.board.hazards is not None
    table.board.hazards._slots[table.board.take_slot()] = 1
    clock.now += 31
    assert outcomes(table) == [], "kept for its reader"
    clock.now += 19
    table.renew([0])
    clock.now += 29
    assert outcomes(table) == []
    clock.now += 2
    assert outcomes(table) == [], "kept for its reader, from now on"
    clock.now += 19
    assert outcomes(table) == []
    clock.now += 2
    assert outcomes(table) == ["expired"]


def test_a_lease_of_several_readers_ends_with_the_last_or_with_one_that_gives_up() -> None:
    table = LeaseTable(20)
    for lease in range(3):
        table.grant(lease, str(lease), [lease], 30)
    for _ in range(2):
        table.release(0, "fetched", readers=3)
        table.release(1, "fetched", readers=3)
    table.release(0, "fetched", readers=3)
    table.release(1, "aborted", readers=3)
    table.release(2, "fetched")
    table.release(2, "aborted")
    table.release(7, "aborted")
    found = {one.request_id: one.outcome for one in table.take_ended()}
    assert found == {"0": "fetched", "1": "aborted", "2": "fetched"}


def test_how_far_a_lease_is_ahead() -> None:
    table = LeaseTable(20)
    assert not table.is_far_ahead(0, 1)
    assert table.is_far_ahead(1, 1)
    table.grant(5, "r", [1], 30)
    table.grant(3, "s", [1], 30)
    assert not table.is_far_ahead(7, 2)
    assert table.is_far_ahead(8, 2)
    assert table.was_granted(5)
    assert table.was_granted(4)
    assert not table.was_granted(6)


def test_a_granted_lease_is_acquired_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    table = LeaseTable(20)
    table.grant(0, "r", [1], 30)
    monkeypatch.setattr(table._changed, "wait", lambda timeout: pytest.fail("it waits"))
    assert table.acquire(0, Deadline.after(5)).request_id == "r"


def test_unknown_is_told_from_gone_without_waiting() -> None:
    table = LeaseTable(20)
    table.grant(5, "r", [1], 30)
    began = time.monotonic()
    with pytest.raises(LeaseGone):
        table.acquire(4, Deadline.after(5))
    assert time.monotonic() - began < 1


def test_each_lease_ends_once_under_contention() -> None:
    table, ended = LeaseTable(20), []
    generator = random.Random(3)

    def consumer(numbers: list[int]) -> None:
        for number in numbers:
            try:
                table.acquire(number, Deadline.after(5))
            except LeaseGone:
                continue
            table.release(number, "fetched")
            table.done_using(number)

    for number in range(300):
        table.grant(number, str(number), [number], generator.choice([0.001, 30]))
    orders = [generator.sample(range(300), 300) for _ in range(4)]
    threads = [threading.Thread(target=consumer, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or table.held():
        ended += [lease.request_id for lease in table.take_ended()]
        table.check_integrity()
    assert sorted(ended, key=int) == [str(number) for number in range(300)]
