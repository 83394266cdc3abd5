"""Makes a transport's two ends, by its name.

A transport's module is imported only when an end is made, so that each one's dependencies are
needed only where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.transport.base import Receiver, Sender
from disagg.transport.blocks import BlockCache
from disagg.transport.device.staging import Staging
from disagg.transport.names import TransportName
from disagg.transport.nixl.settings import NixlSettings
from disagg.transport.one_sided.lease_board import LeaseBoard
from disagg.transport.shared_storage import Storage


@dataclass(frozen=True)
class Means:
    """What transports need in addition to the cache. host: the address to listen on. storage: the
    folder of shared storage. staging: for a cache on a device. board: of a producer's leases."""

    host: str
    secret: bytes = field(repr=False)
    storage: Storage
    staging: Staging | None = None
    board: LeaseBoard | None = None
    nixl: NixlSettings = field(default_factory=NixlSettings)


def make_sender(name: TransportName, cache: BlockCache, means: Means) -> Sender:
    """The producer's end."""
    match name:
        case "cuda_ipc":
            from disagg.transport.one_sided.cuda_ipc import CudaIpcSender

            return CudaIpcSender(cache, means.staging, means.board)
        case "nccl":
            from disagg.transport.nccl.nccl import NcclSender

            return NcclSender(cache, means.staging, means.host, means.secret)
        case "nixl":
            from disagg.transport.nixl.nixl import NixlSender

            return NixlSender(cache, means.nixl, means.host, means.board)
        case "process_memory":
            from disagg.transport.one_sided.process_memory import ProcessMemorySender

            return ProcessMemorySender(cache, means.board)
        case "tcp":
            from disagg.transport.tcp.tcp import TcpSender

            return TcpSender(cache, means.host, means.secret, staging=means.staging)
        case "shared_storage":
            from disagg.transport.shared_storage import SharedStorageSender

            return SharedStorageSender(cache, means.storage, means.staging)


def make_receiver(name: TransportName, cache: BlockCache, means: Means) -> Receiver:
    """The consumer's end."""
    match name:
        case "cuda_ipc":
            from disagg.transport.one_sided.cuda_ipc import CudaIpcReceiver

            return CudaIpcReceiver(cache, means.staging)
        case "nccl":
            from disagg.transport.nccl.nccl import NcclReceiver

            return NcclReceiver(cache, means.staging, means.secret)
        case "nixl":
            from disagg.transport.nixl.nixl import NixlReceiver

            return NixlReceiver(cache, means.nixl, means.host)
        case "process_memory":
            from disagg.transport.one_sided.process_memory import ProcessMemoryReceiver

            return ProcessMemoryReceiver(cache)
        case "tcp":
            from disagg.transport.tcp.tcp import TcpReceiver

            return TcpReceiver(cache, means.secret, staging=means.staging)
        case "shared_storage":
            from disagg.transport.shared_storage import SharedStorageReceiver

            return SharedStorageReceiver(cache, means.storage, means.staging)


def make_senders(names: Sequence[TransportName], cache: BlockCache, means: Means) -> list[Sender]:
    """The producer's ends, in this order."""
    return [make_sender(name, cache, means) for name in names]


def make_receivers(
    names: Sequence[TransportName], cache: BlockCache, means: Means
) -> list[Receiver]:
    """The consumer's ends, in this order."""
    return [make_receiver(name, cache, means) for name in names]
