"""Blocks of a lease count once the model's stream has passed the steps that filled them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from transport.host_device import HostDevice, HostStream

from disagg.connector.handoff.lease_growth import LeaseGrowth
from disagg.connector.handoff.messages import Grown
from disagg.errors import TransferError
from disagg.transport.control.lease import LeaseTable, Progress
from disagg.transport.deadline import Event

STREAM, PROMPT = b"s" * 16, b"p" * 16
FIRST, SECOND = Grown(0, 0, 16, [(0, [7])]), Grown(0, 0, 32, [(1, [8])])
ANEW, AGAIN = Grown(0, 1, 0, []), Grown(0, 1, 16, [(0, [9])])


class Device(HostDevice):
    """Its model's steps end when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.models = HostStream()

    def model_fence(self) -> Event:  # type: ignore[override]
        return self.models.record()

    def launch(self, ends: threading.Event, result: Callable[[], object] = bool) -> None:
        """A step that runs until `ends`."""

        def step() -> None:
            ends.wait(60)
            result()

        self.models.add(step)


class BrokenDevice(Device):
    def model_fence(self) -> Event:  # type: ignore[override]
        raise TransferError("an event on the model's stream: lost", reason="device")


class Worker:
    """A table of one lease that grows. device: of its cache; None: it is on a CPU."""

    def __init__(self, device: Device | None) -> None:
        staging: Any = None if device is None else SimpleNamespace(device=device)
        self.table = LeaseTable(20)
        self.table.grow(0, "r0", STREAM, PROMPT, 3)
        self.held = self.table.follow(STREAM, PROMPT)
        self.growth = LeaseGrowth(self.table, staging)

    def now(self) -> Progress:
        return self.table.progress(self.held, -1, 0, 0.0)

    def comes_to(self, progress: Progress, blocks: list[int]) -> None:
        deadline = time.monotonic() + 20
        while self.now() != progress:
            assert time.monotonic() < deadline, self.now()
            time.sleep(0.002)
        assert list(self.held.block_ids) == blocks


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.models.close()


def threads() -> int:
    return sum(one.name == "disagg-growth" for one in threading.enumerate())


def gone(count: int) -> None:
    """Wait for the threads to end, but so many."""
    deadline = time.monotonic() + 20
    while threads() > count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_on_a_cpu_a_step_is_done_when_it_returns() -> None:
    worker, before = Worker(None), threads()
    worker.growth.add([FIRST])
    assert worker.now() == Progress(0, 16, False)
    worker.growth.add([ANEW, AGAIN])
    assert worker.now() == Progress(1, 16, False)
    assert list(worker.held.block_ids) == [9, -1, -1]
    assert threads() == before
    worker.growth.close()


def test_on_a_device_each_step_is_waited_for(device: Device) -> None:
    worker, ends, before = Worker(device), [threading.Event() for _ in range(2)], threads()
    for end, grown in zip(ends, (FIRST, SECOND), strict=True):
        device.launch(end)
        worker.growth.add([grown])
    time.sleep(0.02)
    assert worker.now() == Progress(0, 0, False)
    ends[0].set()
    worker.comes_to(Progress(0, 16, False), [7, -1, -1])
    time.sleep(0.02)
    assert worker.now() == Progress(0, 16, False)
    ends[1].set()
    worker.comes_to(Progress(0, 32, False), [7, 8, -1])
    assert threads() == before + 1
    worker.growth.close()
    gone(before)


def test_a_request_that_begins_anew_has_lost_its_blocks_at_once(device: Device) -> None:
    """The stream may still be in a step before; vLLM gives the blocks to others."""
    worker, ends = Worker(device), [threading.Event() for _ in range(2)]
    worker.growth.add([FIRST])
    worker.comes_to(Progress(0, 16, False), [7, -1, -1])
    device.launch(ends[0])
    worker.growth.add([SECOND])
    worker.growth.add([ANEW])
    assert worker.now() == Progress(1, 0, False)
    device.launch(ends[1])
    worker.growth.add([AGAIN])
    ends[0].set()
    time.sleep(0.02)
    assert (worker.now(), list(worker.held.block_ids)) == (Progress(1, 0, False), [-1] * 3)
    ends[1].set()
    worker.comes_to(Progress(1, 16, False), [9, -1, -1])
    worker.growth.close()


def test_without_a_fence_a_lease_is_granted_and_does_not_grow() -> None:
    device, before = BrokenDevice(), threads()
    worker = Worker(device)
    worker.growth.add([FIRST])
    worker.growth.add([ANEW])
    worker.growth.add([AGAIN])
    assert worker.now() == Progress(1, 0, False)
    worker.table.grant(0, "r0", [7, 8, 9], 30)
    assert worker.now() == Progress(1, 0, True)
    assert threads() == before
    worker.growth.close()
    device.models.close()


def test_a_step_that_fails_grows_no_lease(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    worker, end, before = Worker(device), threading.Event(), threads()
    device.launch(end, lambda: 1 // 0)
    with caplog.at_level(logging.WARNING):
        worker.growth.add([FIRST])
        worker.growth.add([SECOND])
        end.set()
        worker.growth.close()
        gone(before)
    assert worker.now() == Progress(0, 0, False)
    assert [one.message.partition(":")[0] for one in caplog.records] == ["leases do not grow"] * 2
