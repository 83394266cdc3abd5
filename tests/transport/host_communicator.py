"""Sockets in the place of NCCL, where there is no GPU: the same contract, and the same weaknesses.

A send waits for its receive on the stream, for ever if the peer does not come, until `abort` ends
it. `FAIL` makes the next communicators break on purpose.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
from dataclasses import dataclass

from transport.host_device import HostStream

from disagg.errors import TransferError
from disagg.transport.control.channel import shut
from disagg.transport.device.base import DeviceStream, Wait

_PIECE = 1 << 20


@dataclass
class Failures:
    """What the communicators of this process do on purpose. `sends`: so many are done before one
    of them breaks its stream; `silent`: joins that never come to an end."""

    sends: int | None = None
    joins: int = 0
    silent: int = 0


FAIL = Failures()


class HostCommunicators:
    """An id is the port of a listening socket of rank 0."""

    version = "host"
    open = 0

    def __init__(self) -> None:
        self._listening: dict[bytes, socket.socket] = {}

    def __del__(self) -> None:
        for sock in self._listening.values():  # of joins that nobody came to
            sock.close()

    def new_id(self) -> bytes:
        sock = socket.create_server(("127.0.0.1", 0))
        identity: bytes = sock.getsockname()[1].to_bytes(2, "little") + os.urandom(14)
        self._listening[identity] = sock
        return identity

    def join(
        self, identity: bytes, rank: int, wait: Wait, *, bounded: bool = True
    ) -> HostCommunicator:
        if FAIL.joins:
            FAIL.joins -= 1
            raise TransferError("this join fails on purpose", reason="nccl")
        if FAIL.silent:
            FAIL.silent -= 1
            wait.until(lambda: False)
        joined = self._accept(identity, wait) if rank == 0 else _connect(identity, wait)
        joined.settimeout(None)
        return HostCommunicator(joined)

    def _accept(self, identity: bytes, wait: Wait) -> socket.socket:
        with self._listening.pop(identity) as listening:
            listening.settimeout(0)
            found: list[socket.socket] = []

            def accept() -> bool:
                with contextlib.suppress(BlockingIOError):
                    found.append(listening.accept()[0])
                return bool(found)

            wait.until(accept)
        return found[0]


def _connect(identity: bytes, wait: Wait) -> socket.socket:
    port = int.from_bytes(identity[:2], "little")
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=wait.deadline.left())
    except OSError as error:
        raise TransferError(f"cannot join: {error}", reason="nccl") from error


class HostCommunicator:
    """Two ends of one socket; what breaks it is told by `check`, as NCCL does."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._error: str | None = None
        self._aborted = threading.Event()
        self._using = threading.Lock()
        HostCommunicators.open += 1

    def send(self, address: int, size: int, stream: DeviceStream, wait: Wait) -> None:
        self._put(stream, lambda: self._send(_bytes(address, size)))

    def receive(self, address: int, size: int, stream: DeviceStream, wait: Wait) -> None:
        self._put(stream, lambda: self._receive(_bytes(address, size)))

    def check(self) -> None:
        if self._aborted.is_set():
            raise TransferError("the communicator was ended", reason="nccl")
        if self._error is not None:
            raise TransferError(f"NCCL: {self._error}", reason="nccl")

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            HostCommunicators.open -= 1
            shut(self._sock)  # ends what the stream does with it
            with self._using:
                self._sock.close()

    def _put(self, stream: DeviceStream, work: object) -> None:
        self.check()
        assert isinstance(stream, HostStream)
        assert callable(work)

        # Like NCCL's kernels it is silent about errors: the stream goes on, `check` tells.
        def guarded() -> None:
            with self._using:
                if self._error is None and not self._aborted.is_set():
                    try:
                        work()
                    except OSError as error:
                        self._error = str(error) or "broken"

        stream.add(guarded)

    def _send(self, data: memoryview) -> None:
        if FAIL.sends is not None:
            FAIL.sends -= 1
            if FAIL.sends < 0:
                FAIL.sends = None
                raise OSError("this send fails on purpose")
        for at in range(0, len(data), _PIECE):
            self._sock.sendall(data[at : at + _PIECE])

    def _receive(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            count = self._sock.recv_into(data[at:])
            if count == 0:
                raise OSError("remote process exited or there was a network error")
            at += count


def _bytes(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
