"""Opens the device of a cache; the only module that knows its kind."""

from __future__ import annotations

from disagg.transport.blocks import BlockCache
from disagg.transport.device.base import Device


def open_device(cache: BlockCache) -> Device:
    """The GPU that holds this cache. Raises `TransferError` (reason "device") without cupy."""
    from disagg.transport.device.cuda import CudaDevice

    return CudaDevice.of(cache)
