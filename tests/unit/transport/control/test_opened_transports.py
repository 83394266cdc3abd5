"""A producer's transports are opened once, and those that did not work are tried again later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from disagg.errors import PeerLost
from disagg.transport.base import FetchJob
from disagg.transport.control import client
from disagg.transport.control.client import OpenedTransports
from disagg.transport.deadline import Deadline


@dataclass(eq=False)
class Way:
    """A transport that works if `works` says so."""

    name: str
    works: Callable[[], bool]

    def open(self, offer: bytes) -> Way | None:
        return self if self.works() else None

    def request(self, job: FetchJob) -> bytes:
        raise NotImplementedError

    def prepare(self, job: FetchJob) -> None:
        raise NotImplementedError

    def receive(self, job: FetchJob, answer: bytes) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def opens(transports: OpenedTransports, way: Way, seconds: float = 10) -> bool:
    return transports.open(way, b"", Deadline.after(seconds)) is not None


def test_many_threads_wait_for_one_opening() -> None:
    transports, openings = OpenedTransports(), list[int]()

    def works() -> bool:
        openings.append(1)
        time.sleep(0.05)
        return True

    way = Way("tcp", works)
    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(lambda _: opens(transports, way), range(32)))
    assert len(openings) == 1


def test_each_transport_is_opened_by_itself() -> None:
    transports = OpenedTransports()
    tcp, nccl = Way("tcp", lambda: True), Way("nccl", lambda: False)
    assert opens(transports, tcp)
    assert not opens(transports, nccl)
    tcp.works = lambda: False
    assert opens(transports, tcp), "known"
    transports.forget()
    assert not opens(transports, tcp)


def test_a_retry_runs_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_RETRY_S", 0.0)
    transports, may, threads = OpenedTransports(), threading.Event(), list[str]()
    tcp = Way("tcp", lambda: False)
    assert not opens(transports, tcp)

    def works() -> bool:
        threads.append(threading.current_thread().name)
        assert may.wait(10)
        return True

    tcp.works = works
    assert not opens(transports, tcp), "nobody waits for it"
    monkeypatch.setattr(client, "_RETRY_S", 60.0)
    for _ in range(5):
        assert not opens(transports, tcp)
    until(lambda: len(threads) == 2)  # one for each time that it was due
    may.set()
    until(lambda: opens(transports, tcp))
    assert threads == ["disagg-probe"] * 2


def test_no_retry_before_its_time() -> None:
    transports, openings = OpenedTransports(), list[int]()

    def works() -> bool:
        openings.append(1)
        return False

    way = Way("tcp", works)
    for _ in range(5):
        assert not opens(transports, way)
    time.sleep(0.05)
    assert len(openings) == 1


def test_no_thread_waits_past_its_deadline_for_another_ones_opening() -> None:
    transports, may, began = OpenedTransports(), threading.Event(), threading.Event()
    nccl = Way("nccl", lambda: False)
    assert not opens(transports, nccl)

    def works() -> bool:
        began.set()
        return may.wait(10)

    tcp = Way("tcp", works)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(opens, transports, tcp)
        assert began.wait(10)
        with pytest.raises(PeerLost) as error:
            opens(transports, tcp, 0.05)
        assert error.value.reason == "deadline"
        nccl.works = lambda: True
        assert not opens(transports, nccl), "what is known is known at once"
        may.set()
        assert first.result(10)
