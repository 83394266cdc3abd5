"""Authenticated frames over a TCP socket.

On accept the server sends a greeting and a nonce. The client sends a nonce and its first frame.
Keys for each direction are derived from the deployment's secret and both nonces. A frame is its
length, a keyed hash over its number and body, and the body. A body is parsed only after its hash
was verified, so recorded frames cannot be replayed, neither on another connection nor on the same.
Never pickle.

A server that has no place for a client resets the connection before it has answered the first
frame; the client may then connect again. A server that refuses a client closes the connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from disagg import keepalive
from disagg.errors import PeerLost, PeerRefused
from disagg.transport.deadline import Deadline
from disagg.transport.protocol import MAX_FRAME

GREETING = b"disagg/1"
_NONCE = 16
_MAC = 16
_HEADER = struct.Struct(f"<I{_MAC}s")
_AHEAD = 1 << 16
# The first frame, before the client has shown the secret.
FIRST_FRAME = 4 << 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2
# Where the server's backlog is full, the kernel tries again after 1, 3 and 7 s: too seldom.
_FIRST_PATIENCE_S = 1.0

T = TypeVar("T")


class ConnectionReset(PeerLost):
    """The other side reset the connection."""


class Channel:
    """One end of a connection. Used by one thread at a time; raises `PeerLost`, `PeerRefused`.

    ahead: it may read past the requested frame; only for connections that carry nothing but frames.
    most: the longest body that it receives. read: bytes that were received before.
    """

    def __init__(
        self,
        sock: socket.socket,
        send_key: bytes,
        receive_key: bytes,
        *,
        ahead: bool = False,
        most: int = MAX_FRAME,
        read: bytes = b"",
    ) -> None:
        self._sock = sock
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._least, self._most = _AHEAD if ahead else 0, most
        self._read = bytearray(read)
        self._resting_since: float | None = None
        self._poll: select.poll | None = None

    @property
    def sock(self) -> socket.socket:
        """The socket, for bytes that are sent between frames."""
        if self._least:
            raise ValueError("bytes between frames may have been read already")
        return self._sock

    @property
    def holds_more(self) -> bool:
        """Whether another whole frame has arrived, for `receive` to return."""
        if len(self._read) < _HEADER.size:
            return False
        length: int = _HEADER.unpack_from(self._read)[0]
        return len(self._read) >= _HEADER.size + length

    @property
    def resting_since(self) -> float | None:
        """When it began to wait in `receive_at_rest`; None while it does not. From any thread."""
        return self._resting_since

    @classmethod
    def connect(
        cls, host: str, port: int, secret: bytes, deadline: Deadline, *, ahead: bool = False
    ) -> Channel:
        """The client's side of the opening."""
        try:
            sock = socket.create_connection((host, port), timeout=deadline.left())
        except ConnectionResetError as error:
            raise ConnectionReset(f"cannot connect to {host}:{port}: {error}") from error
        except TimeoutError as error:
            raise PeerLost(f"cannot connect to {host}:{port}: {error}", "deadline") from error
        except OSError as error:
            raise PeerLost(f"cannot connect to {host}:{port}: {error}") from error
        try:
            tune(sock)
            opening = _receive(sock, len(GREETING) + _NONCE, deadline)
            if not opening.startswith(GREETING):
                raise PeerRefused(f"{host}:{port} does not speak {GREETING.decode()}")
            theirs, ours = opening[len(GREETING) :], os.urandom(_NONCE)
            _send(sock, ours, deadline)
        except BaseException:
            sock.close()
            raise
        answers, asks = _key(secret, theirs, ours, b"answer"), _key(secret, theirs, ours, b"ask")
        return cls(sock, asks, answers, ahead=ahead)

    def send(self, body: bytes, deadline: Deadline) -> None:
        """Send one frame."""
        self.send_all([body], deadline)

    def send_all(self, bodies: Sequence[bytes], deadline: Deadline) -> None:
        """Send one frame per body, in one call."""
        frames = bytearray()
        for body in bodies:
            frames += _HEADER.pack(len(body), _mac(self._send_key, self._sent, body)) + body
            self._sent += 1
        _send(self._sock, frames, deadline)

    def receive(self, deadline: Deadline | None) -> bytes:
        """One frame's body; without a deadline, waits until the peer sends one or disconnects."""
        header = self._take(_HEADER.size, deadline)
        self._resting_since = None
        length, mac = _HEADER.unpack(header)
        if length > self._most:
            raise PeerRefused(f"frame of {length} bytes is over the limit of {self._most}")
        # The header has arrived, so the rest is on its way: it always has a deadline.
        body = self._take(length, deadline or Deadline.after(10))
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, body)):
            raise PeerRefused("frame not signed with this deployment's secret", reason="secret")
        self._received += 1
        return body

    def receive_at_rest(self, deadline: Deadline | None) -> bytes:
        """As `receive`. Until the frame arrives nothing depends on this connection: the listener
        may cut it for another one."""
        self._resting_since = time.monotonic()
        return self.receive(deadline)

    def _take(self, length: int, deadline: Deadline | None) -> bytes:
        while (missing := length - len(self._read)) > 0:
            self._read += _some(self._sock, max(missing, self._least), deadline)
        taken = bytes(self._read[:length])
        del self._read[:length]
        return taken

    def is_quiet(self) -> bool:
        """Whether an idle connection is open and has nothing to read. One thread at a time may ask;
        RuntimeError otherwise."""
        # One system call and no exception: pools ask before each use.
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._sock, select.POLLIN)
        return not self._read and not self._poll.poll(0)

    def has_ended(self) -> bool:
        """Whether the peer closed the connection; unread bytes do not count as closed."""
        return has_ended(self._sock)

    def cut(self) -> None:
        """Shut it down from another thread; a thread that waits in `receive` raises `PeerLost`."""
        shut(self._sock)

    def close(self) -> None:
        """Close the socket; a thread that waits in `receive` raises `PeerLost`."""
        shut(self._sock)
        self._sock.close()


class Opening:
    """The server's side of the opening, until the client has shown the secret. It never blocks.

    It holds at most the nonce and one frame of `FIRST_FRAME` bytes. Raises `PeerLost`,
    `PeerRefused`; the caller then closes the socket.
    """

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock, self._secret = sock, secret
        self._ours = os.urandom(_NONCE)
        self._read = bytearray()
        self._wanted = _NONCE + _HEADER.size
        sock.setblocking(False)
        try:
            sock.send(GREETING + self._ours)  # an empty socket buffer takes it whole
        except OSError as error:
            raise PeerLost(f"connection lost while sending: {error}") from error

    def advance(self) -> bool:
        """Read what has arrived. Whether the first frame is there, and signed with the secret."""
        try:
            while (missing := self._wanted - len(self._read)) > 0:
                chunk = self.sock.recv(missing)
                if not chunk:
                    raise PeerLost("connection closed by the peer")
                self._read += chunk
                if len(self._read) == _NONCE + _HEADER.size:
                    length: int = _HEADER.unpack_from(self._read, _NONCE)[0]
                    if length > FIRST_FRAME:
                        raise PeerRefused(
                            f"first frame of {length} bytes is over the limit of {FIRST_FRAME}"
                        )
                    self._wanted += length
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLost(f"connection lost while receiving: {error}") from error
        mac = bytes(self._read[_NONCE + 4 : _NONCE + _HEADER.size])
        body = bytes(self._read[_NONCE + _HEADER.size :])
        if not hmac.compare_digest(mac, _mac(self._key(b"ask"), 0, body)):
            raise PeerRefused("first frame not signed with this deployment's secret", "secret")
        return True

    def channel(self, *, ahead: bool = False, most: int = MAX_FRAME) -> Channel:
        """After `advance` was true: the connection, whose first `receive` returns that frame."""
        tune(self.sock)
        read, keys = bytes(self._read[_NONCE:]), (self._key(b"answer"), self._key(b"ask"))
        return Channel(self.sock, *keys, ahead=ahead, most=most, read=read)

    def drop(self) -> None:
        """Reset the connection: nothing of it remains, and a client knows that it may try again."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def _key(self, direction: bytes) -> bytes:
        return _key(self._secret, self._ours, bytes(self._read[:_NONCE]), direction)


def open_channel(
    host: str,
    port: int,
    secret: bytes,
    deadline: Deadline,
    first: Callable[[Channel], T],
    *,
    ahead: bool = False,
) -> tuple[Channel, T]:
    """Connect, and do `first`: send one frame and receive its answer.

    A connection that is reset before the answer, or not greeted for some seconds, is opened again,
    until the deadline: a server that strangers flood may drop it, and nothing was requested yet.
    Errors close the connection.
    """
    pause, patience = _FIRST_PAUSE_S, _FIRST_PATIENCE_S
    while True:
        channel: Channel | None = None
        try:
            greeted = Deadline(min(deadline.at, time.monotonic() + patience))
            channel = Channel.connect(host, port, secret, greeted, ahead=ahead)
            return channel, first(channel)
        except BaseException as error:
            if channel is not None:
                channel.close()
            was_reset = isinstance(error, ConnectionReset)
            not_greeted = (
                channel is None and isinstance(error, PeerLost) and error.reason == "deadline"
            )
            if not (was_reset or not_greeted) or time.monotonic() + pause >= deadline.at:
                raise
        # Random, so that clients that were dropped together do not come back together.
        time.sleep(random.uniform(0, pause))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if not_greeted:
            patience *= 2


def tune(sock: socket.socket) -> None:
    """Send small frames without delay; detect a vanished host by keepalives."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keepalive.watch(sock)


def shut(sock: socket.socket) -> None:
    """Shut down a connection that another thread waits on; that thread then closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer has closed it


def is_quiet(sock: socket.socket) -> bool:
    """Whether an idle connection is open and has nothing to read."""
    try:
        sock.settimeout(0)
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False  # closed, or unexpected bytes


def has_ended(sock: socket.socket) -> bool:
    """Whether the peer closed this connection; unread bytes do not count as closed."""
    try:
        sock.settimeout(0)
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _key(secret: bytes, server: bytes, client: bytes, direction: bytes) -> bytes:
    # blake2b takes keys of at most 64 bytes; secrets may be of any length.
    key = hashlib.sha256(secret).digest()
    return hashlib.blake2b(direction + server + client, key=key, digest_size=32).digest()


def _mac(key: bytes, number: int, body: bytes) -> bytes:
    mac = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=_MAC)
    mac.update(body)
    return mac.digest()


def _send(sock: socket.socket, data: bytes | bytearray, deadline: Deadline) -> None:
    try:
        sock.settimeout(deadline.left())
        sock.sendall(data)
    except (ConnectionResetError, BrokenPipeError) as error:
        raise ConnectionReset(f"connection lost while sending: {error}") from error
    except OSError as error:
        raise PeerLost(f"connection lost while sending: {error}") from error


def _receive(sock: socket.socket, length: int, deadline: Deadline) -> bytes:
    data = bytearray()
    while len(data) < length:
        data += _some(sock, length - len(data), deadline)
    return bytes(data)


def _some(sock: socket.socket, most: int, deadline: Deadline | None) -> bytes:
    try:
        sock.settimeout(deadline.left() if deadline else None)
        chunk = sock.recv(most)
    except TimeoutError as error:
        raise PeerLost("no answer before the deadline", reason="deadline") from error
    except ConnectionResetError as error:
        raise ConnectionReset(f"connection lost while receiving: {error}") from error
    except OSError as error:
        raise PeerLost(f"connection lost while receiving: {error}") from error
    if not chunk:
        raise PeerLost("connection closed by the peer")
    return chunk
