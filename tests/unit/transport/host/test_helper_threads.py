"""Threads that help beside their caller."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from disagg.transport.host.helper_threads import HelperThreads, cores


@pytest.fixture
def helpers() -> Iterator[HelperThreads]:
    made = HelperThreads("test")
    try:
        yield made
    finally:
        made.close()


def elsewhere(helpers: HelperThreads, ask: Callable[[], object]) -> object:
    """What a helper answers; the caller waits for it at its own part."""
    answers: dict[int, object] = {}
    both = threading.Barrier(2, timeout=5)

    def work(_: int) -> None:
        answers[threading.get_ident()] = ask()
        both.wait()

    helpers.share([0, 1], work, 2)
    (other,) = set(answers) - {threading.get_ident()}
    return answers[other]


def test_parts_are_shared(helpers: HelperThreads) -> None:
    assert elsewhere(helpers, threading.get_ident) != threading.get_ident()
    done: list[int] = []
    helpers.share(range(1000), done.append, 2)
    assert sorted(done) == list(range(1000))
    helpers.share([], done.append, 1)
    assert len(done) == 1000


def test_closed_in_the_middle(helpers: HelperThreads) -> None:
    done: list[int] = []
    helpers.close()
    helpers.share(range(10), done.append, 2)
    assert done == list(range(10))


@pytest.mark.parametrize("in_helper", [True, False])
def test_after_an_error_nobody_works(helpers: HelperThreads, in_helper: bool) -> None:
    ours, both = threading.get_ident(), threading.Barrier(2, timeout=5)
    working, begun = set[int](), list[int]()

    def work(part: int) -> None:
        begun.append(part)
        working.add(part)
        both.wait()
        try:
            if (threading.get_ident() != ours) == in_helper:
                raise ZeroDivisionError
            time.sleep(0.2)
        finally:
            working.remove(part)

    with pytest.raises(ZeroDivisionError):
        helpers.share(range(10), work, 2)
    assert not working
    assert sorted(begun) == [0, 1]


@pytest.mark.skipif(cores() < 2, reason="there is no other core")
def test_on_another_core(helpers: HelperThreads) -> None:
    elsewhere(helpers, int)  # not before it lives
    ours = os.sched_getaffinity(0)
    core = min(ours)
    os.sched_setaffinity(0, {core})  # here we are
    try:
        assert elsewhere(helpers, lambda: os.sched_getaffinity(0)) == ours
        os.sched_setaffinity(0, ours)
        theirs = elsewhere(helpers, lambda: os.sched_getaffinity(0))
    finally:
        os.sched_setaffinity(0, ours)
    assert isinstance(theirs, set)
    assert theirs < ours
    assert len(theirs) == len(ours) - 1
