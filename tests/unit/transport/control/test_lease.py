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
