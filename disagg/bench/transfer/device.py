"""The two ends of `bench transfer` on a device, with the ceilings between the same processes.

The consumer has the clock. It sends the producer a start signal over a connection of theirs. After
a failure a connection or communicator is not used again, because bytes may be left in it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import torch

from disagg.bench.transfer import ceilings
from disagg.bench.transfer.memory import BenchMemory
from disagg.bench.transfer.ours import Consumer, End, IdLists, Producer
from disagg.errors import DisaggError
from disagg.transport.deadline import Deadline
from disagg.transport.device.base import (
    Communicator,
    Communicators,
    Device,
    DeviceMemory,
    DeviceStream,
    Exported,
    Pinned,
    Wait,
)

LIMIT_S = 30.0
_HOST = "127.0.0.1"
_PINNED = 256 << 20


class DeviceEnd(End):
    """Common to both ends: a device, a stream, a connection (line) and a communicator."""

    _device: Device | None = None
    _opened_stream: DeviceStream | None = None
    _line: ceilings.Line | None = None
    _communicators: Communicators | None = None
    _communicator: Communicator | None = None

    def describe(self) -> str:
        """The GPU's name."""
        name: str = torch.cuda.get_device_name(self.setup.device)
        return name

    def join(self, identity: bytes, rank: int) -> str:
        """Join NCCL as one of two ranks, with its default settings; returns NCCL's version."""
        if self._communicators is None:
            self._communicators = self.device.communicators()
        wait = Wait(_deadline())
        self._communicator = self._communicators.join(identity, rank, wait, bounded=False)
        return self._communicators.version

    def close(self) -> None:
        """The line and the communicator stay open for the next block size."""
        if self.staging is not None:
            self._device = self.staging.device
        super().close()

    def leave(self) -> None:
        """Close everything; no call follows."""
        self.close()
        if self._communicator is not None:
            self._communicator.abort()
        if self._line is not None:
            self._line.close()
        if self._opened_stream is not None:
            self._opened_stream.close()
        self._line = self._communicator = self._opened_stream = None

    @property
    def device(self) -> Device:
        """The device as the transports use it; made current."""
        if self.staging is not None:
            self._device = self.staging.device
        if self._device is None:
            raise DisaggError("this end has no device: call serve or connect first")
        self._device.use()
        return self._device

    @property
    def address(self) -> int:
        """Address of the memory's first byte."""
        return int(self.memory.flat.data_ptr())

    def messages(self, ids: IdLists) -> list[ceilings.Piece]:
        """One piece for each of these blocks and each layer."""
        return [(self.address + at, self.block_bytes) for at in self.offsets(ids).tolist()]

    def large_messages(self, ids: IdLists) -> list[ceilings.Piece]:
        """As many bytes, from the beginning of the memory."""
        return list(ceilings.large_messages(self.address, self.num_bytes(ids)))

    def _stream(self) -> DeviceStream:
        if self._opened_stream is None:
            self._opened_stream = self.device.stream(launches=False)
        self.device.use()
        return self._opened_stream

    @contextlib.contextmanager
    def _on_line(self) -> Iterator[ceilings.Line]:
        if self._line is None:
            raise DisaggError("there is no line between the two ends")
        try:
            yield self._line
        except DisaggError:
            self._line.close()
            self._line = None
            raise

    @contextlib.contextmanager
    def _joined(self) -> Iterator[Communicator]:
        if self._communicator is None:
            raise DisaggError("NCCL is not joined")
        try:
            yield self._communicator
        except DisaggError:
            self._communicator.abort()
            self._communicator = None
            raise


class DeviceProducer(DeviceEnd, Producer):
    """Sends when the consumer signals."""

    def listen(self) -> int:
        """A port for `accept`."""
        self._listening = socket.create_server((_HOST, 0))
        return int(self._listening.getsockname()[1])

    def accept(self) -> None:
        """Accept the consumer's connection."""
        with self._listening:
            self._listening.settimeout(LIMIT_S)
            self._line = ceilings.Line(self._listening.accept()[0], LIMIT_S)

    def exported(self) -> Exported:
        """A handle of this memory for a process on another device."""
        return self.device.export(self.address)

    def nccl_id(self) -> bytes:
        """The id of a new communicator; this end is its rank 0."""
        self._communicators = self.device.communicators()
        return self._communicators.new_id()

    def send_bare(self, there: IdLists) -> None:
        """Send as many bytes through the line."""
        with self._on_line() as line:
            line.await_go()
            line.send(self.num_bytes(there))

    def send_nccl(self, kind: str, there: IdLists) -> None:
        """Send these blocks by NCCL one by one, or as many bytes "flat"."""
        stream = self._stream()
        messages = self.large_messages(there) if kind == "flat" else self.messages(there)
        with self._joined() as communicator:
            with self._on_line() as line:
                line.await_go()
            ceilings.send(communicator, stream, messages, _deadline())


class DeviceConsumer(DeviceEnd, Consumer):
    """Has the clock."""

    _pinned: Pinned | None = None
    _mapped: DeviceMemory | None = None
    _from = 0

    def make_source(self) -> BenchMemory | None:
        """Made later, by `use_source`."""
        return None

    def use_source(self, theirs: Exported | None) -> None:
        """Set the source of copies: the producer's memory, or on the same device a copy of it."""
        if theirs is not None:
            self._mapped = self.device.open(theirs.handle)
            self._from = self._mapped.address + theirs.offset
        else:
            self._source = super().make_source()
            assert self._source is not None
            self._from = int(self._source.flat.data_ptr())

    def dial(self, port: int) -> None:
        """Open the line to the producer."""
        self._line = ceilings.Line(socket.create_connection((_HOST, port), LIMIT_S), LIMIT_S)

    def copy(self, kind: str, here: IdLists, there: IdLists) -> float:
        """Seconds to copy these blocks one by one, or as many bytes "flat"."""
        if not self._from:
            raise DisaggError("there is no source to copy from")
        if kind == "flat":
            copies = [(self.address, self._from, self.num_bytes(here))]
        else:
            to, source = self.offsets(here) + self.address, self.offsets(there) + self._from
            size = self.block_bytes
            copies = [(*pair, size) for pair in zip(to.tolist(), source.tolist(), strict=True)]
        return ceilings.copy(self._stream(), copies, _deadline())

    def copy_by_host(self, here: IdLists) -> float:
        """Seconds for as many bytes between device and pinned memory, in the slower direction."""
        if self._pinned is None:
            self._pinned = self.device.pinned(min(_PINNED, self.setup.num_bytes))
        whole = self.address, self.address, self.num_bytes(here)
        return max(ceilings.copy_by_host(self._stream(), whole, self._pinned, _deadline()))

    def receive_bare(self, here: IdLists) -> float:
        """Seconds for as many bytes through the line."""
        with self._on_line() as line:
            began = time.perf_counter()
            line.go()
            line.receive(self.num_bytes(here))
            return time.perf_counter() - began

    def receive_nccl(self, kind: str, here: IdLists) -> float:
        """Seconds for these blocks by NCCL, one by one, or as many bytes "flat"."""
        stream = self._stream()
        messages = self.large_messages(here) if kind == "flat" else self.messages(here)
        with self._joined() as communicator:
            began = time.perf_counter()
            with self._on_line() as line:
                line.go()
            ceilings.receive(communicator, stream, messages, _deadline())
            return time.perf_counter() - began

    def leave(self) -> None:
        """Close everything, the producer's memory too."""
        super().leave()
        for memory in (self._pinned, self._mapped):
            if memory is not None:
                memory.free()
        self._pinned = self._mapped = None


def _deadline() -> Deadline:
    return Deadline.after(LIMIT_S)
