"""What transports need of a GPU: memory, streams, events, and one kernel.

Every call that touches the device may raise `TransferError` with reason "device". All work is on
streams of the transport's own; nothing here uses the default stream or waits for the whole device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from disagg.transport.blocks import Bytes
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device.copy_plan import Chunk, Move

# What a wait sleeps at most between two looks.
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
        """Give it back. Nothing on any stream may use it any more."""


class Pinned(Protocol):
    """Host memory that the device copies from and to without help."""

    array: Bytes

    @property
    def address(self) -> int:
        """Of its first byte."""

    def free(self) -> None:
        """Give it back."""


class DeviceStream(Protocol):
    """An ordered row of work on the device. Used by one thread at a time."""

    @property
    def handle(self) -> int:
        """The cudaStream_t, for NCCL."""

    def load(self, move: Move) -> None:
        """Use the tables of this move from here on."""

    def launch(self, chunk: Chunk, from_shift: int = 0, to_shift: int = 0) -> None:
        """Copy the chunk's rows of the loaded move.

        Shifts are added to the addresses of a side: of a chunk in a buffer, `buffer - chunk.at`.
        """

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy bytes between any two addresses of device and pinned memory."""

    def record(self) -> Event:
        """An event behind all work so far."""

    def wait(self, event: Event) -> None:
        """Later work on this stream begins after the event."""

    def close(self) -> None:
        """Give it and its tables back. All its work must be done."""


@dataclass(frozen=True)
class Exported:
    """A device allocation that another process can open, and where in it an address lies."""

    handle: bytes
    offset: int
    size: int


def look_at_nothing() -> None:
    """No one else can end this wait."""


@dataclass(frozen=True)
class Wait:
    """How long the host may wait for something. `look` is called meanwhile, again and again, to
    raise what ends it early."""

    deadline: Deadline
    look: Callable[[], None] = look_at_nothing

    def until(self, done: Callable[[], bool]) -> None:
        """Look until it is done, with short naps. Raises `PeerLost` at the deadline."""
        nap = 0.0
        while not done():
            self.look()
            self.deadline.left()
            time.sleep(nap)
            nap = min(_LONGEST_NAP_S, nap + 0.00001)


class Communicator(Protocol):
    """This process and one other, joined: NCCL's contract, with every call bounded by a deadline.

    Sends of one side meet receives of the other in the order in which they were asked for. Used by
    one thread at a time, `abort` by any.
    """

    def send(self, address: int, size: int, stream: DeviceStream, wait: Wait) -> None:
        """Put a send on the stream."""

    def receive(self, address: int, size: int, stream: DeviceStream, wait: Wait) -> None:
        """Put a receive on the stream."""

    def check(self) -> None:
        """Raise `TransferError` (reason "nccl") for what went wrong meanwhile."""

    def abort(self) -> None:
        """End it, and what it still has on streams, whatever the peer does. Never raises."""


class Communicators(Protocol):
    """Makes communicators of two."""

    @property
    def version(self) -> str:
        """Both sides must have the same."""

    def new_id(self) -> bytes:
        """Names a communicator to be; the process that asks for it becomes rank 0."""

    def join(self, identity: bytes, rank: int, wait: Wait, *, bounded: bool = True) -> Communicator:
        """Join the one so named; `bounded`: it takes no more of the GPU than a transport may.

        Raises `TransferError` (reason "nccl"), `PeerLost`.
        """


class Device(Protocol):
    """One GPU, as this process sees it."""

    def use(self) -> None:
        """Make it the current one of the calling thread, which must do so before all else."""

    def memory(self, size: int) -> DeviceMemory:
        """Allocate outside of every pool."""

    def pinned(self, size: int) -> Pinned:
        """Allocate page-locked memory."""

    def stream(self, launches: bool = True) -> DeviceStream:
        """A stream of our own; `launches`: whether it ever loads and launches moves."""

    def export(self, address: int) -> Exported:
        """Name the allocation that holds this address.

        Raises `TransferError` (reason "device") for what cannot be shared: expandable segments,
        memory of a pool.
        """

    def open(self, handle: bytes) -> DeviceMemory:
        """Map another process's allocation; `free` unmaps it."""

    def communicators(self) -> Communicators:
        """How this device is joined with those of other processes."""

    def model_fence(self) -> Event:
        """An event behind all that the model's stream of this thread was given so far."""
