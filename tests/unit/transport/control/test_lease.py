"""The lease table: blocks are handed back once, and never while in use."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from disagg.errors import LeaseGone, TransferError
from disagg.transport.control.lease import LeaseTable, Progress
from disagg.transport.deadline import Deadline

T = TypeVar("T")
STREAM, OTHER, PROMPT = b"s" * 16, b"t" * 16, b"p" * 16


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


# ---- while a prompt is computed ----------------------------------------------------------------


def growing(table: LeaseTable, lease: int = 0, stream: bytes = STREAM, blocks: int = 4) -> None:
    table.grow(lease, f"r{lease}", stream, PROMPT, blocks)


def meanwhile(wait: Callable[[], T], then: Callable[[], object]) -> T:
    """What a thread gets that waits, when something happens. It may wait for much longer."""
    got: queue.SimpleQueue[T] = queue.SimpleQueue()
    threading.Thread(target=lambda: got.put(wait()), daemon=True).start()
    with pytest.raises(queue.Empty):
        got.get(timeout=0.02)
    then()
    return got.get(timeout=30)


def test_a_lease_grows_and_is_granted() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    growing(table)
    held = table.follow(STREAM, PROMPT)
    assert (held.grows, list(held.block_ids)) == (True, [-1] * 4)
    assert table.progress(held, 0, 7, 0.0) == Progress(0, 0, False)
    table.extend(0, 0, [(0, [7]), (2, [9])], 48)
    assert list(held.block_ids) == [7, -1, 9, -1]
    table.extend(0, 0, [(1, [8])], 64)
    assert table.progress(held, 0, 48, 0.0) == Progress(0, 64, False)
    assert (table.held(), table.board.posted()) == (0, set()), "they are the running request's"
    clock.now += 1e9
    assert table.take_ended() == []
    table.grant(0, "r0", [7, 8, 9, 10], 30)
    assert table.progress(held, 0, 64, 600.0) == Progress(0, 64, True)
    assert (held.grows, list(held.block_ids)) == (False, [7, 8, 9, 10])
    assert (table.held(), table.board.posted()) == (1, {0})
    table.done_using(0)
    clock.now += 30
    assert table.take_ended() == [], "its time began with the grant"
    clock.now += 1
    assert [tuple(one) for one in table.take_ended()] == [("r0", "expired")]
    table.check_integrity()


def test_a_lease_that_was_followed_is_released_once() -> None:
    table = LeaseTable(20)
    growing(table)
    held = table.follow(STREAM, PROMPT)
    table.release(0, "fetched", readers=2)
    with pytest.raises(LeaseGone):
        table.progress(held, 0, 0, 0.0)  # nobody has fetched what is not whole
    table.grant(0, "r0", [1], 30)
    assert table.board.posted() == set()
    assert table.take_ended() == [], "in use"
    table.done_using(0)
    assert [tuple(one) for one in table.take_ended()] == [("r0", "aborted")]


def test_who_waits_for_a_stream_or_for_news_is_told_at_once() -> None:
    table = LeaseTable(20)
    assert not table.has_begun(STREAM)
    assert meanwhile(lambda: table.has_begun(STREAM, 600.0), lambda: growing(table))
    held = table.follow(STREAM, PROMPT)
    for epoch, tokens, happens, news in (
        (0, 0, lambda: table.extend(0, 0, [(0, [1])], 16), Progress(0, 16, False)),
        (0, 16, lambda: table.begin_anew(0, 1), Progress(1, 0, False)),
        (1, 0, lambda: table.extend(0, 1, [(0, [2])], 16), Progress(1, 16, False)),
        (1, 16, lambda: table.grant(0, "r0", [2, 3, 4, 5], 30), Progress(1, 16, True)),
    ):
        found = meanwhile(lambda: table.progress(held, epoch, tokens, 600.0), happens)  # noqa: B023
        assert found == news


@pytest.mark.parametrize("end", ["stop", "leave", "revoke", "take_back", "release"])
def test_who_waits_for_news_of_a_request_that_ends_is_told_at_once(end: str) -> None:
    table = LeaseTable(20)
    growing(table)
    held = table.follow(STREAM, PROMPT)
    happens: dict[str, Callable[[], object]] = {
        "stop": lambda: table.stop(0),
        "leave": lambda: table.leave(STREAM),
        "revoke": lambda: table.revoke(1),
        "take_back": lambda: table.take_back([0]),
        "release": lambda: table.release(0, "aborted"),
    }

    def news() -> str:
        try:
            return str(table.progress(held, 0, 0, 600.0))
        except LeaseGone:
            return "gone"

    assert meanwhile(news, happens[end]) == "gone"
    with pytest.raises(LeaseGone):
        table.follow(STREAM, PROMPT)
    table.done_using(0)
    table.stop(0)
    assert (len(table._leases), len(table._streams)) == (0, 0)
    assert table.take_ended() == []
    assert table.has_begun(STREAM), "it never will"


def test_a_lease_that_begins_anew_forgets_its_blocks() -> None:
    """Growth of the epoch before may come later: its steps were not done yet."""
    table = LeaseTable(20)
    growing(table)
    held = table.follow(STREAM, PROMPT)
    table.extend(0, 0, [(0, [1, 2])], 32)
    table.begin_anew(0, 1)
    assert list(held.block_ids) == [-1] * 4
    table.extend(0, 0, [(2, [3])], 48)
    assert list(held.block_ids) == [-1] * 4
    assert table.progress(held, 0, 32, 0.0) == Progress(1, 0, False)
    table.extend(0, 1, [(0, [5])], 16)
    assert list(held.block_ids) == [5, -1, -1, -1]


def test_what_is_granted_or_gone_grows_no_more() -> None:
    """A fence may pass late."""
    table = LeaseTable(20)
    growing(table)
    table.grant(0, "r0", [1, 2, 3, 4], 30)
    for lease in (0, 7):
        table.extend(lease, 0, [(0, [9])], 16)
        table.begin_anew(lease, 1)
        table.stop(lease)
    held = table.acquire(0, Deadline.after(1))
    assert list(held.block_ids) == [1, 2, 3, 4]
    assert table.progress(held, 0, 0, 0.0) == Progress(0, 0, True)
    assert table.held() == 1


def test_a_stream_serves_its_own_prompt_alone() -> None:
    table = LeaseTable(20)
    growing(table)
    for ask in (table.check_stream, table.follow):
        with pytest.raises(TransferError) as error:
            ask(STREAM, b"q" * 16)
        assert error.value.reason == "prompt_mismatch"
        with pytest.raises(LeaseGone):
            ask(OTHER, PROMPT)
    assert table._leases[0].users == 0
    assert table.check_stream(STREAM, PROMPT) is table.follow(STREAM, PROMPT)
    assert table._leases[0].users == 1


def test_a_stream_that_ran_out_is_gone() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    growing(table)
    table.grant(0, "r0", [1], 30)
    clock.now += 31
    with pytest.raises(LeaseGone):
        table.check_stream(STREAM, PROMPT)


def test_a_stream_that_nobody_wants_is_given_up_before_it_begins() -> None:
    """Its consumer left first. The request itself may keep other leases' blocks."""
    table = LeaseTable(20)
    table.leave(STREAM)
    assert table.has_begun(STREAM)
    growing(table)
    with pytest.raises(LeaseGone):
        table.follow(STREAM, PROMPT)
    table.grant(0, "r0", [1], 30)
    assert table.board.posted() == set()
    assert [tuple(one) for one in table.take_ended()] == [("r0", "aborted")]


def test_who_waits_for_a_stream_that_will_never_begin_is_told_at_once() -> None:
    table = LeaseTable(20)
    assert meanwhile(lambda: table.has_begun(STREAM, 600.0), lambda: table.leave(STREAM))
    with pytest.raises(LeaseGone):
        table.check_stream(STREAM, PROMPT)


def test_streams_that_are_past_are_forgotten_in_the_end() -> None:
    """Names come from peers; the last 4096 are known."""
    table = LeaseTable(20)
    names = [number.to_bytes(16, "big") for number in range(5000)]
    for name in names:
        table.leave(name)
    assert [table.has_begun(name) for name in names] == [False] * 904 + [True] * 4096


def test_a_stream_has_one_lease() -> None:
    """Another request that names it is granted one as if it had named none."""
    table = LeaseTable(20)
    growing(table)
    growing(table, lease=1)
    table.extend(1, 0, [(0, [5])], 16)
    table.check_integrity()
    assert table.check_stream(STREAM, PROMPT).id == 0
    table.grant(1, "r1", [5], 30)
    table.release(1, "fetched")
    assert [tuple(one) for one in table.take_ended()] == [("r1", "fetched")]
    assert table.check_stream(STREAM, PROMPT).id == 0
    table.check_integrity()


def test_a_lease_is_renewed_by_its_stream_once_it_is_whole() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    growing(table, 0)
    growing(table, 1, OTHER)
    table.renew([0], [STREAM])
    for lease in (0, 1):
        table.grant(lease, f"r{lease}", [lease], 30)
    table.grant(2, "r2", [2], 30)  # without a stream
    clock.now += 20
    table.renew([], [STREAM, b"unknown"])
    clock.now += 20
    assert [one.request_id for one in table.take_ended()] == ["r1", "r2"]
    clock.now += 11
    assert [one.request_id for one in table.take_ended()] == ["r0"]


def test_a_lease_that_grows_is_not_acquired_by_its_number() -> None:
    """Also if a later one was granted before. It can be, once it is granted."""
    table = LeaseTable(20)
    growing(table)
    table.grant(1, "r1", [5], 30)
    assert table.was_granted(1)
    assert not table.was_granted(0)
    granted = meanwhile(
        lambda: table.was_granted(0, 600.0), lambda: table.grant(0, "r0", [1, 2, 3, 4], 30)
    )
    assert granted
    assert table.acquire(0, Deadline.after(1)).request_id == "r0"


def test_who_follows_and_leaves_shortens_no_lease_that_grows() -> None:
    clock = Clock()
    table = LeaseTable(20, clock=clock)
    growing(table)
    table.follow(STREAM, PROMPT)
    table.done_using(0, left=True)
    clock.now += 100
    table.grant(0, "r0", [1], 30)
    clock.now += 29
    assert outcomes(table) == []
    table.follow(STREAM, PROMPT)
    table.done_using(0, left=True)
    clock.now += 2
    assert outcomes(table) == ["expired"]


def test_a_reset_ends_what_grew_before_it_and_nothing_else() -> None:
    table = LeaseTable(20)
    growing(table, 0)
    growing(table, 1, OTHER)
    table.revoke(1)
    with pytest.raises(LeaseGone):
        table.follow(STREAM, PROMPT)
    assert table.follow(OTHER, PROMPT).id == 1
    assert table.take_ended() == []
    table.check_integrity()
