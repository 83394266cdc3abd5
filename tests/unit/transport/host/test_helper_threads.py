"""Threads that help beside their caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from disagg.transport.host.helper_threads import HelperThreads, cores


@pytest.fixture
def helpers() -> Iterator[HelperThreads]:
    made = HelperThreads(1, "test")
    try:
        yield made
    finally:
        made.close()


def test_it_works_elsewhere(helpers: HelperThreads) -> None:
    assert helpers.submit(threading.get_ident).result(5) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        helpers.submit(lambda: 1 / 0).result(5)


@pytest.mark.skipif(cores() < 2, reason="there is no other core")
def test_on_another_core(helpers: HelperThreads) -> None:
    helpers.submit(int).result(5)  # not before it lives
    ours = os.sched_getaffinity(0)
    core = min(ours)
    os.sched_setaffinity(0, {core})  # here we are
    try:
        assert helpers.submit(lambda: os.sched_getaffinity(0)).result(5) == ours
        os.sched_setaffinity(0, ours)
        theirs = helpers.submit(lambda: os.sched_getaffinity(0)).result(5)
    finally:
        os.sched_setaffinity(0, ours)
    assert theirs < ours
    assert len(theirs) == len(ours) - 1
