"""When blocks are final on a device: the model's stream is a thread here that can be held back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from transport.host_device import OnDevice
from unit.connector.model_device import ModelDevice

from disagg.connector.handoff.lease_growth import LeaseGrowth
from disagg.connector.handoff.messages import Grown
from disagg.errors import TransferError
from disagg.transport.blocks import Region
from disagg.transport.control.lease import Lease, LeaseTable, Progress
from disagg.transport.deadline import Event
from disagg.transport.device.staging import Staging

STREAM, PROMPT = b"stream", b"prompt"
LEASE, BLOCKS = 3, 4
SHORT_S, LONG_S = 0.2, 20.0


class Scene:
    """One growing lease, and a follower of it."""

    def __init__(self, device: ModelDevice) -> None:
        self.device, self.table = device, LeaseTable(math.inf)
        memory = torch.zeros((8, 1, 4, 8), dtype=torch.uint8)
        cache = OnDevice([Region("layer", memory, "U8")])
        self.staging = Staging(device, cache, 1 << 20)
        self.growth = LeaseGrowth(self.table, self.staging)
        self.table.grow(LEASE, "a request", STREAM, PROMPT, BLOCKS)
        self.lease: Lease = self.table.follow(STREAM, PROMPT)

    def news(self, epoch: int, tokens: int, seconds: float) -> Progress:
        return self.table.progress(self.lease, epoch, tokens, seconds)

    def close(self) -> None:
        self.device.gate.set()
        self.growth.close()
        self.staging.close()


@pytest.fixture
def scene_of() -> Iterator[Callable[[ModelDevice], Scene]]:
    scenes: list[Scene] = []

    def make(device: ModelDevice) -> Scene:
        scenes.append(Scene(device))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.close()


def grown(epoch: int, first: int, ids: list[int]) -> list[Grown]:
    return [Grown(LEASE, epoch, 4 * (first + len(ids)), [(first, ids)])]


def test_blocks_are_final_when_the_stream_has_passed_their_step(
    scene_of: Callable[[ModelDevice], Scene],
) -> None:
    scene = scene_of(ModelDevice())
    scene.growth.add(grown(0, 0, [5]))
    assert scene.news(0, 0, LONG_S) == (0, 4, False)
    scene.device.hold()  # the next step
    scene.growth.add(grown(0, 1, [6, 7]))
    assert scene.news(0, 4, SHORT_S) == (0, 4, False)
    assert scene.lease.block_ids == [5, -1, -1, -1]
    scene.device.gate.set()
    assert scene.news(0, 4, LONG_S) == (0, 12, False)
    assert scene.lease.block_ids == [5, 6, 7, -1]


def test_blocks_that_were_lost_before_they_were_final_never_are(
    scene_of: Callable[[ModelDevice], Scene],
) -> None:
    scene = scene_of(ModelDevice())
    scene.device.hold()
    scene.growth.add(grown(0, 0, [5, 6]))
    scene.growth.add([Grown(LEASE, 1, 0, [])])
    assert scene.news(0, 0, 0) == (1, 0, False), "known at once, whatever the stream does"
    scene.growth.add(grown(1, 0, [2]))
    scene.device.gate.set()
    assert scene.news(1, 0, LONG_S) == (1, 4, False)
    assert scene.lease.block_ids == [2, -1, -1, -1]


class Refuses(ModelDevice):
    def model_fence(self) -> Event:  # type: ignore[override]
        raise TransferError("an event on the model's stream: lost", reason="device")


def test_without_a_fence_a_lease_does_not_grow_and_is_granted(
    scene_of: Callable[[ModelDevice], Scene],
) -> None:
    scene = scene_of(Refuses())
    scene.growth.add(grown(0, 0, [5]))
    assert scene.news(0, 0, SHORT_S) == (0, 0, False)
    scene.table.grant(LEASE, "a request", [5, 6, 7, 8], 60)
    assert scene.news(0, 0, 0).is_whole


def test_a_step_that_fails_on_the_device_lets_nothing_grow(
    scene_of: Callable[[ModelDevice], Scene],
) -> None:
    scene = scene_of(ModelDevice())

    def fail() -> None:
        raise RuntimeError("illegal address")

    scene.device.model.add(fail)
    fence = scene.device.model_fence()
    scene.growth.add(grown(0, 0, [5]))
    with pytest.raises(TransferError, match="illegal address"):
        eventually_done(fence)
    assert scene.news(0, 0, SHORT_S) == (0, 0, False)
    scene.table.grant(LEASE, "a request", [5, 6, 7, 8], 60)
    assert scene.news(0, 0, 0).is_whole


def eventually_done(event: Event) -> None:
    deadline = time.monotonic() + LONG_S
    while not event.is_done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
