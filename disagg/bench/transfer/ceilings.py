"""The upper bounds (ceilings) of `bench transfer --device cuda`: bare moves of bytes.

Copies on a device, copies to the host and back, NCCL, and a socket between two processes. No
leases, no checksums, no staging. Waits poll without sleeping, so that no sleep is part of a time.
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

# So large that the fixed cost of a message does not count.
_MESSAGE = 1 << 30
# Sockets are fastest with buffers that fit the processor's cache: 3.7 GB/s, against 2.5 GB/s with
# buffers of 64 MiB.
_SOCKET_BUFFER = 1 << 20
_GO = b"g"

# Target address, source address, bytes.
Copy = tuple[int, int, int]
# Address, bytes.
Piece = tuple[int, int]


def copy(stream: DeviceStream, copies: Iterable[Copy], deadline: Deadline) -> float:
    """Seconds until all copies are done; each is a call of its own."""
    began = time.perf_counter()
    for to, source, size in copies:
        stream.copy(to, source, size)
    _finish(stream, Wait(deadline))
    return time.perf_counter() - began


def copy_by_host(
    stream: DeviceStream, whole: Copy, pinned: Pinned, deadline: Deadline
) -> tuple[float, float]:
    """Seconds from the device into pinned memory, and seconds from there back to the device."""
    to, source, size = whole
    out = back = 0.0
    for at, part in _pieces(0, size, len(pinned.array)):
        out += copy(stream, [(pinned.address, source + at, part)], deadline)
        back += copy(stream, [(to + at, pinned.address, part)], deadline)
    return out, back


def send(
    communicator: Communicator, stream: DeviceStream, messages: Iterable[Piece], deadline: Deadline
) -> None:
    """Send each piece as one message, and wait until all are sent."""
    wait = Wait(deadline, communicator.check)
    for address, size in messages:
        communicator.send(address, size, stream, wait)
    _finish(stream, wait)


def receive(
    communicator: Communicator, stream: DeviceStream, messages: Iterable[Piece], deadline: Deadline
) -> None:
    """Receive one message into each piece, and wait until all have arrived."""
    wait = Wait(deadline, communicator.check)
    for address, size in messages:
        communicator.receive(address, size, stream, wait)
    _finish(stream, wait)


def large_messages(address: int, size: int) -> Iterator[Piece]:
    """One piece of memory, as few messages."""
    return _pieces(address, size, _MESSAGE)


class Line:
    """A TCP connection between the two ends, for the consumer's start signal and for bare bytes."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        limit = struct.pack("@ll", int(limit_s), 0)
        # With a timeout of Python's socket, each call would move no more than the kernel's buffer.
        sock.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self.buffer = bytearray(_SOCKET_BUFFER)

    def go(self) -> None:
        """Send the start signal."""
        with _peer_lost():
            self._sock.sendall(_GO)

    def await_go(self) -> None:
        """Wait for the start signal."""
        with _peer_lost():
            if self._sock.recv(1) != _GO:
                raise PeerLost("the other end closed the connection")

    def send(self, size: int) -> None:
        """Send `size` bytes: the buffer, again and again."""
        view = memoryview(self.buffer)
        with _peer_lost():
            for _, part in _pieces(0, size, len(view)):
                self._sock.sendall(view[:part])

    def receive(self, size: int) -> None:
        """Receive `size` bytes, all into the buffer."""
        view = memoryview(self.buffer)
        with _peer_lost():
            for _, part in _pieces(0, size, len(view)):
                if self._sock.recv_into(view, part, socket.MSG_WAITALL) != part:
                    raise PeerLost("the other end closed the connection")

    def close(self) -> None:
        """Close the connection; the other end notices."""
        self._sock.close()


@contextlib.contextmanager
def _peer_lost() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PeerLost(f"the connection between the two ends: {error}") from error


def _pieces(first: int, size: int, limit: int) -> Iterator[Piece]:
    return ((first + at, min(limit, size - at)) for at in range(0, size, limit))


def _finish(stream: DeviceStream, wait: Wait) -> None:
    """Wait until the stream has done all its work."""
    event = stream.record()
    while not event.is_done():
        wait.look()
        wait.deadline.left()
        time.sleep(0)  # lets other threads of this process run
