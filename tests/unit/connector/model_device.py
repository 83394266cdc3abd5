"""Tiers' workers on a device in host memory, in the place of a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from transport.host_device import HostDevice, HostStream, OnDevice

from disagg.connector import kv_cache_layout
from disagg.connector.offload import worker
from disagg.transport.blocks import BlockCache
from disagg.transport.deadline import Event
from disagg.transport.device import staging


class ModelDevice(HostDevice):
    """A device whose model has a stream that a test can hold back."""

    def __init__(self) -> None:
        super().__init__()
        self.model = HostStream()
        self.gate = threading.Event()

    def hold(self) -> None:
        """Nothing that the model was given from here on is done before `gate` is set."""
        self.model.add(self.gate.wait)

    def model_fence(self) -> Event:  # type: ignore[override]
        return self.model.record()


def use(patch: pytest.MonkeyPatch) -> list[ModelDevice]:
    """From here on `OffloadWorker` takes every cache for one on a device; the devices are added
    to what this returns."""
    devices: list[ModelDevice] = []
    block_cache = kv_cache_layout.block_cache

    def open_device(cache: BlockCache) -> ModelDevice:
        devices.append(ModelDevice())
        return devices[-1]

    def on_device(*args: Any) -> BlockCache:
        return OnDevice(list(block_cache(*args).regions))

    patch.setattr(kv_cache_layout, "block_cache", on_device)
    patch.setattr(staging, "open_device", open_device)
    patch.setattr(worker, "_pin", lambda address, size: lambda: None)
    return devices
