"""What the ceilings of `bench transfer --device cuda` do: bytes moved with nothing around them.

Copies on a device, a copy to the host and back, NCCL, and a socket between two processes. No
leases, no checksums, no staging. Waits look without a pause, so that a nap is no part of a time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable, Iterator

from disagg.errors import PeerLost
from disagg.transport.deadline import Deadline
from disagg.transport.device.base import Communicator, DeviceStream, Pinned, Wait

# Far beyond where what a message costs by itself counts.
_MESSAGE = 1 << 30
# Sockets are at their best with what stays in the processor's cache: here it was 3.7 GB/s, with
# buffers of 64 MiB 2.5.
_SOCKET_BUFFER = 1 << 20
_GO = b"g"

# Where to, from where, how many bytes.
Copy = tuple[int, int, int]
# An address and how many bytes.
Piece = tuple[int, int]


def copy(stream: DeviceStream, copies: Iterable[Copy], deadline: Deadline) -> float:
    """Seconds until all copies are done, each asked for on its own."""
    began = time.perf_counter()
    for to, source, size in copies:
        stream.copy(to, source, size)
    _finish(stream, Wait(deadline))
    return time.perf_counter() - began


def copy_by_host(
    stream: DeviceStream, whole: Copy, pinned: Pinned, deadline: Deadline
) -> tuple[float, float]:
    """Seconds out of the device into pinned memory, and seconds from there back onto it."""
    to, source, size = whole
    out = back = 0.0
    for at, part in _pieces(0, size, len(pinned.array)):
        out += copy(stream, [(pinned.address, source + at, part)], deadline)
        back += copy(stream, [(to + at, pinned.address, part)], deadline)
    return out, back


def send(
    communicator: Communicator, stream: DeviceStream, messages: Iterable[Piece], deadline: Deadline
) -> None:
    """Send these, each as one message, and wait until they have left."""
    wait = Wait(deadline, communicator.check)
    for address, size in messages:
        communicator.send(address, size, stream, wait)
    _finish(stream, wait)


def receive(
    communicator: Communicator, stream: DeviceStream, messages: Iterable[Piece], deadline: Deadline
) -> None:
    """Receive into these, each of them one message, and wait until they are here."""
    wait = Wait(deadline, communicator.check)
    for address, size in messages:
        communicator.receive(address, size, stream, wait)
    _finish(stream, wait)


def large_messages(address: int, size: int) -> Iterator[Piece]:
    """One piece of memory as few messages."""
    return _pieces(address, size, _MESSAGE)


class Line:
    """A TCP connection between the two ends: the consumer's word to begin, and bare bytes."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        limit = struct.pack("@ll", int(limit_s), 0)
        # A timeout of Python's would make every call as small as what lies in the kernel's buffer.
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self.buffer = bytearray(_SOCKET_BUFFER)

    def go(self) -> None:
        """Tell the other end to begin."""
        with _told():
            self._sock.sendall(_GO)

    def await_go(self) -> None:
        """Wait for that word."""
        with _told():
            if self._sock.recv(1) != _GO:
                raise PeerLost("the other end has left")

    def send(self, size: int) -> None:
        """Send so many bytes, the buffer's over and over."""
        view = memoryview(self.buffer)
        with _told():
            for _, part in _pieces(0, size, len(view)):
                self._sock.sendall(view[:part])

    def receive(self, size: int) -> None:
        """Receive so many bytes, all into the buffer."""
        view = memoryview(self.buffer)
        with _told():
            for _, part in _pieces(0, size, len(view)):
                if self._sock.recv_into(view, part, socket.MSG_WAITALL) != part:
                    raise PeerLost("the other end has left")

    def close(self) -> None:
        """The other end is told by that."""
        self._sock.close()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PeerLost(f"the line between the two ends: {error}") from error


def _pieces(first: int, size: int, limit: int) -> Iterator[Piece]:
    return ((first + at, min(limit, size - at)) for at in range(0, size, limit))


def _finish(stream: DeviceStream, wait: Wait) -> None:
    """Wait until the stream has done all it was given."""
    event = stream.record()
    while not event.is_done():
        wait.look()
        wait.deadline.left()
        time.sleep(0)  # lets other threads of this process go on
