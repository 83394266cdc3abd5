"""The circuit breaker: who is let through, and when."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from disagg.store.objects.base import FULL, TIMEOUT, UNREACHABLE, StoreError
from disagg.store.objects.guard import Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Store:
    """Fails with its reason, if it has one; counts the calls that reach it."""

    reason, calls = "", 0

    def __call__(self) -> str:
        self.calls += 1
        if self.reason:
            raise StoreError(self.reason)
        return "answer"


def failing(breaker: Breaker, store: Store) -> str:
    with pytest.raises(StoreError) as caught:
        breaker.run(store)
    return caught.value.reason


def test_it_opens_after_failures_in_a_row_and_tries_again() -> None:
    clock, store = Clock(), Store()
    breaker = Breaker("there", failures=3, pause_s=2, clock=clock)
    store.reason = TIMEOUT
    assert [failing(breaker, store) for _ in range(2)] == [TIMEOUT] * 2
    store.reason = ""
    assert breaker.run(store) == "answer"
    store.reason, store.calls = TIMEOUT, 0
    assert [failing(breaker, store) for _ in range(9)] == [TIMEOUT] * 3 + [UNREACHABLE] * 6
    assert store.calls == 3
    clock.now += 1.5
    assert failing(breaker, store) == UNREACHABLE
    clock.now += 1
    assert [failing(breaker, store) for _ in range(2)] == [TIMEOUT, UNREACHABLE]
    clock.now += 3  # the pause is doubled
    assert failing(breaker, store) == UNREACHABLE
    assert breaker.is_open
    clock.now += 20
    store.reason = ""
    assert breaker.run(store) == "answer"
    assert not breaker.is_open
    store.reason = TIMEOUT
    assert [failing(breaker, store) for _ in range(4)] == [TIMEOUT] * 3 + [UNREACHABLE]


def test_one_caller_tries_while_the_others_fail() -> None:
    clock, store = Clock(), Store()
    breaker = Breaker("there", failures=1, pause_s=2, clock=clock)
    store.reason = TIMEOUT
    failing(breaker, store)
    clock.now += 10
    trying, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        trying.set()
        assert go_on.wait(10)
        return "answer"

    with ThreadPoolExecutor(1) as pool:
        tried = pool.submit(breaker.run, slow)
        assert trying.wait(10)
        assert failing(breaker, store) == UNREACHABLE
        go_on.set()
        assert tried.result(10) == "answer"
    assert store.calls == 1


def test_a_full_store_is_not_out() -> None:
    store, breaker = Store(), Breaker("there", failures=1)
    store.reason = FULL
    assert [failing(breaker, store) for _ in range(5)] == [FULL] * 5
    assert not breaker.is_open


def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, store = Clock(), Store()
    breaker = Breaker("there", failures=2, clock=clock)
    store.reason = TIMEOUT
    for _ in range(50):
        failing(breaker, store)
        clock.now += 5
    store.reason = ""
    clock.now += 100
    breaker.run(store)
    assert [record.getMessage() for record in caplog.records] == [
        "there is out (timeout: timeout): until it is back, blocks are computed, and not kept "
        "there",
        "there answers again",
    ]
