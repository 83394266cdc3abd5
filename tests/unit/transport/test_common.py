"""What two workers have in common is found out once, and what did not work is looked at again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from disagg.errors import PeerLost
from disagg.transport.control import client
from disagg.transport.control.client import CommonTransports
from disagg.transport.deadline import Deadline


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def has(common: CommonTransports, name: str, probe: Callable[[], bool]) -> bool:
    return common.has(name, probe, Deadline.after(10))


def test_many_who_ask_at_once_are_answered_by_one_look() -> None:
    common, looks = CommonTransports(), list[int]()

    def probe() -> bool:
        looks.append(1)
        time.sleep(0.05)
        return True

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(lambda _: has(common, "tcp", probe), range(32)))
    assert len(looks) == 1


def test_each_way_is_looked_at_by_itself() -> None:
    common = CommonTransports()
    assert has(common, "tcp", lambda: True)
    assert not has(common, "nccl", lambda: False)
    assert has(common, "tcp", lambda: False), "known"
    common.forget()
    assert not has(common, "tcp", lambda: False)


def test_what_did_not_work_is_looked_at_beside_those_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_AGAIN_S", 0.0)
    common, may, looks = CommonTransports(), threading.Event(), list[str]()
    assert not has(common, "tcp", lambda: False)

    def probe() -> bool:
        looks.append(threading.current_thread().name)
        assert may.wait(10)
        return True

    assert not has(common, "tcp", probe), "nobody waits for it"
    monkeypatch.setattr(client, "_AGAIN_S", 60.0)
    assert not has(common, "tcp", probe)
    until(lambda: len(looks) >= 1)
    may.set()
    until(lambda: has(common, "tcp", probe))
    assert set(looks) == {"disagg-probe"}


def test_not_again_before_its_time() -> None:
    common, looks = CommonTransports(), list[int]()

    def probe() -> bool:
        looks.append(1)
        return False

    for _ in range(5):
        assert not has(common, "tcp", probe)
    time.sleep(0.05)
    assert len(looks) == 1


def test_nobody_waits_past_its_deadline_for_another_ones_look() -> None:
    common, may, began = CommonTransports(), threading.Event(), threading.Event()
    assert not has(common, "nccl", lambda: False)

    def probe() -> bool:
        began.set()
        return may.wait(10)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(has, common, "tcp", probe)
        assert began.wait(10)
        with pytest.raises(PeerLost) as error:
            common.has("tcp", lambda: True, Deadline.after(0.05))
        assert error.value.reason == "deadline"
        assert not has(common, "nccl", lambda: True), "what is known is known at once"
        may.set()
        assert first.result(10)
