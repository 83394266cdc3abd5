"""The two ends of `bench transfer --device cuda`, with host memory in the place of a GPU."""

from __future__ import annotations

import torch
from transport.host_device import HostDevice, OnDevice, Shared

from disagg.bench.transfer.device import DeviceConsumer, DeviceEnd, DeviceProducer
from disagg.bench.transfer.memory import BenchMemory
from disagg.bench.transfer.ours import Setup
from disagg.transport.blocks import BlockCache
from disagg.transport.device.staging import Staging


class SharedMemory(BenchMemory):
    """A cache that no transport may touch but through its device."""

    def __init__(self, setup: Setup) -> None:
        self.shared = Shared(setup.num_bytes)
        self.flat = torch.from_numpy(self.shared.array).view(setup.layers, -1)

    def cache(self, block_bytes: int) -> BlockCache:
        return OnDevice(self.regions(block_bytes))


class FakeEnd(DeviceEnd):
    memory: SharedMemory

    def make_memory(self) -> BenchMemory:
        return SharedMemory(self.setup)

    def make_staging(self, cache: BlockCache) -> Staging:
        device = HostDevice([self.memory.shared])
        size = self.setup.staging_bytes
        return Staging(device, cache, size, sends=self.sends, receives=self.receives)

    def describe(self) -> str:
        return "stand-in"


class FakeProducer(FakeEnd, DeviceProducer):
    pass


class FakeConsumer(FakeEnd, DeviceConsumer):
    pass
