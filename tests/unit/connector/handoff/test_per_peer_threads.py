"""Work in threads, a few for each key."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from disagg.connector.handoff import per_peer_threads
from disagg.connector.handoff.per_peer_threads import PerPeerThreads


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_one_key_that_hangs_holds_up_no_other() -> None:
    made, gate, done = PerPeerThreads("hangs", 2), threading.Event(), list[str]()
    for _ in range(5):
        made.submit("stopped", lambda: done.append(str(gate.wait(10))))
    for number in range(5):
        made.submit("well", partial(done.append, str(number)))
    until(lambda: len(done) == 5)
    assert sorted(done) == list("01234")
    assert threads("hangs") == 4
    gate.set()
    until(lambda: len(done) == 10)


def test_no_more_than_so_many_at_once_and_all_in_their_order() -> None:
    made, lock = PerPeerThreads("busy", 3), threading.Lock()
    running, most, begun = Counter[str](), Counter[str](), list[tuple[str, int]]()

    def work(key: str, number: int) -> None:
        with lock:
            begun.append((key, number))
            running[key] += 1
            most[key] = max(most[key], running[key])
        time.sleep(random.choice([0, 0.001, 0.003]))
        with lock:
            running[key] -= 1

    for number in range(200):
        key = random.choice("abc")
        made.submit(key, partial(work, key, number))
        if number % 20 == 0:
            time.sleep(0.004)
    until(lambda: len(begun) == 200 and not +running)
    assert set(most.values()) == {3}
    assert threads("busy") <= 9


def test_alone_in_a_lane_they_are_in_order() -> None:
    made, seen = PerPeerThreads("one", 1), list[int]()
    for number in range(100):
        made.submit("a", partial(seen.append, number))
    until(lambda: len(seen) == 100)
    assert seen == list(range(100))


def test_nothing_stays_of_a_key_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_peer_threads, "_IDLE_S", 0.05)
    made, done = PerPeerThreads("gone", 4), list[int]()
    for key in range(50):
        made.submit(key, lambda: done.append(1))
    until(lambda: len(done) == 50)
    until(lambda: threads("gone") == 0)
    assert made._peers == {}
    made.submit(3, lambda: done.append(1))
    until(lambda: len(done) == 51)


def test_threads_are_used_again() -> None:
    made, seen = PerPeerThreads("again", 8), list[int]()

    def has(count: int) -> bool:
        return len(seen) == count

    for number in range(50):
        made.submit("a", lambda: seen.append(threading.get_ident()))
        until(partial(has, number + 1))
        time.sleep(0.002)
    assert len(set(seen)) == 1


def test_what_raises_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made, done = PerPeerThreads("raises", 1), list[int]()
    made.submit("a", lambda: 1 // 0)  # type: ignore[arg-type]
    made.submit("a", lambda: done.append(1))
    until(lambda: len(done) == 1)
    assert "ZeroDivisionError" in caplog.text


def test_closed() -> None:
    made, gate, done = PerPeerThreads("closed", 1), threading.Event(), list[int]()
    made.submit("a", lambda: done.append(gate.wait(10)))
    until(lambda: threads("closed") == 1)
    until(lambda: not made._peers["a"].waiting)
    made.submit("a", lambda: done.append(2))
    made.close()
    made.submit("a", lambda: done.append(3))
    gate.set()
    until(lambda: threads("closed") == 0)
    assert done == [True]
