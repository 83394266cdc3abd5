"""Authenticated frames over a TCP socket.

On accept the server sends a greeting and a nonce, the client a nonce. Keys for each direction
are derived from the deployment's secret and both nonces. A frame is its length, a keyed hash
over its number and body, and the body. A body is parsed only after its hash was verified, so
recorded frames cannot be replayed, neither on another connection nor on the same. Never pickle.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Sequence

from disagg import keepalive
from disagg.errors import PeerLost, PeerRefused
from disagg.transport.deadline import Deadline
from disagg.transport.protocol import MAX_FRAME

GREETING = b"disagg/1"
_NONCE = 16
_MAC = 16
_HEADER = struct.Struct(f"<I{_MAC}s")
_AHEAD = 1 << 16


class Channel:
    """One end of a connection. Used by one thread at a time; raises `PeerLost`, `PeerRefused`.

    ahead: it may read past the requested frame; only for connections that carry nothing but frames.
    """

    def __init__(
        self, sock: socket.socket, send_key: bytes, receive_key: bytes, *, ahead: bool = False
    ) -> None:
        self._sock = sock
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._least = _AHEAD if ahead else 0
        self._read = bytearray()

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

    @classmethod
    def accept(
        cls, sock: socket.socket, secret: bytes, deadline: Deadline, *, ahead: bool = False
    ) -> Channel:
        """The server's side of the opening."""
        ours = os.urandom(_NONCE)
        _send(sock, GREETING + ours, deadline)
        theirs = _receive(sock, _NONCE, deadline)
        answers, asks = _key(secret, ours, theirs, b"answer"), _key(secret, ours, theirs, b"ask")
        return cls(sock, answers, asks, ahead=ahead)

    @classmethod
    def connect(
        cls, host: str, port: int, secret: bytes, deadline: Deadline, *, ahead: bool = False
    ) -> Channel:
        """The client's side of the opening."""
        try:
            sock = socket.create_connection((host, port), timeout=deadline.left())
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
        length, mac = _HEADER.unpack(self._take(_HEADER.size, deadline))
        if length > MAX_FRAME:
            raise PeerRefused(f"frame of {length} bytes is over the limit of {MAX_FRAME}")
        # The header has arrived, so the rest is on its way: it always has a deadline.
        body = self._take(length, deadline or Deadline.after(10))
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, body)):
            raise PeerRefused("frame not signed with this deployment's secret", reason="secret")
        self._received += 1
        return body

    def _take(self, length: int, deadline: Deadline | None) -> bytes:
        while (missing := length - len(self._read)) > 0:
            self._read += _some(self._sock, max(missing, self._least), deadline)
        taken = bytes(self._read[:length])
        del self._read[:length]
        return taken

    def close(self) -> None:
        """Close the socket; a thread that waits in `receive` raises `PeerLost`."""
        shut(self._sock)
        self._sock.close()


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
    except OSError as error:
        raise PeerLost(f"connection lost while receiving: {error}") from error
    if not chunk:
        raise PeerLost("connection closed by the peer")
    return chunk
