"""The contract of a device: memory, streams, events, and one kernel.

Every call that touches the device may raise `TransferError` with reason "device". All work is on
the transport's own streams; nothing here uses the default stream or waits for the whole device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from disagg.transport.blocks import Bytes
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device.copy_plan import Chunk, Move

# The longest sleep of a wait between two checks.
_LONGEST_NAP_S = 0.0005


class DeviceMemory(Protocol):
    """Bytes on the device, aligned to 256; freed once."""

    @property
    def address(self) -> int:
        """Of its first byte."""

    @property
    def size(self) -> int:
        """In bytes."""

    def free(self) -> None:
        """Free it. No work on any stream may use it after this."""


class Pinned(Protocol):
    """Page-locked host memory, which the device copies from and to directly."""

    array: Bytes

    @property
    def address(self) -> int:
        """The address of its first byte."""

    def free(self) -> None:
        """Free it."""


class DeviceStream(Protocol):
    """An ordered queue of work on the device. Used by one thread at a time."""

    @property
    def handle(self) -> int:
        """The cudaStream_t, for NCCL."""

    def load(self, move: Move) -> None:
        """Use this move's tables for the next launches."""

    def launch(self, chunk: Chunk, from_shift: int = 0, to_shift: int = 0) -> None:
        """Copy the chunk's rows of the loaded move.

        Shifts are added to one side's addresses; for a chunk in a buffer, `buffer - chunk.at`.
        """

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes between any two addresses of device and pinned memory."""

    def record(self) -> Event:
        """An event after all work so far."""

    def wait(self, event: Event) -> None:
        """Let later work on this stream begin after the event."""

    def close(self) -> None:
        """Free it and its tables. All its work must be done."""


@dataclass(frozen=True)
class Exported:
    """A device allocation that another process can open, and an address's offset in it."""

    handle: bytes
    offset: int
    size: int


def look_at_nothing() -> None:
    """The default: nothing ends the wait early."""


@dataclass(frozen=True)
class Wait:
    """A bounded wait of the host. look: called again and again meanwhile; it ends the wait early by
    raising."""

    deadline: Deadline
    look: Callable[[], None] = look_at_nothing

    def until(self, done: Callable[[], bool]) -> None:
        """Poll until it is done, with short sleeps. Raises `PeerLost` at the deadline."""
        nap = 0.0
        while not done():
            self.look()
            self.deadline.left()
            time.sleep(nap)
            nap = min(_LONGEST_NAP_S, nap + 0.00001)


class Communicator(Protocol):
    """Joins this process and one other: NCCL's contract, with a deadline for every call.

    Sends of one side match receives of the other in order. Used by one thread at a time, except
    `abort`.
    """

    def send(self, address: int, size: int, stream: DeviceStream, wait: Wait) -> None:
        """Put a send on the stream."""

    def receive(self, address: int, size: int, stream: DeviceStream, wait: Wait) -> None:
        """Put a receive on the stream."""

    def check(self) -> None:
        """Raise `TransferError` (reason "nccl") if an operation has failed meanwhile."""

    def abort(self) -> None:
        """End it and its work on streams, whatever the peer does. Never raises."""


class Communicators(Protocol):
    """Makes communicators between two processes."""

    @property
    def version(self) -> str:
        """NCCL's version; both sides must have the same."""

    def new_id(self) -> bytes:
        """The id of a new communicator; the calling process becomes rank 0."""

    def join(self, identity: bytes, rank: int, wait: Wait, *, bounded: bool = True) -> Communicator:
        """Join the communicator with this id. bounded: limit its share of the GPU.

        Raises `TransferError` (reason "nccl"), `PeerLost`.
        """


class Device(Protocol):
    """One GPU, as this process sees it."""

    def use(self) -> None:
        """Make it the calling thread's current device; required before other calls."""

    def memory(self, size: int) -> DeviceMemory:
        """Allocate outside of memory pools."""

    def pinned(self, size: int) -> Pinned:
        """Allocate page-locked memory."""

    def stream(self, launches: bool = True) -> DeviceStream:
        """A new stream. launches: whether it will load and launch moves."""

    def export(self, address: int) -> Exported:
        """Name the allocation that holds this address.

        Raises `TransferError` (reason "device") for memory that cannot be shared: expandable
        segments, memory of a pool.
        """

    def open(self, handle: bytes) -> DeviceMemory:
        """Map another process's allocation; `free` unmaps it."""

    def communicators(self) -> Communicators:
        """Joins this device with those of other processes."""

    def model_fence(self) -> Event:
        """An event after all work so far on the model's stream of this thread."""
