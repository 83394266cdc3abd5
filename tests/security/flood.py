"""A stranger that floods a port, in a process of its own: `flood.py HOST PORT KIND`, until killed.

It has no secret. It keeps as many connections open as it can, and replaces those that end. As it
stands for another host, it runs at the lowest priority: it must not take this host's cores.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
import time

KINDS = ("silent", "garbage", "half-frame", "slow-bytes", "large-frame")
_OPEN = 200


def flood(host: str, port: int, kind: str) -> None:
    """Does not return."""
    os.nice(19)
    selector = selectors.DefaultSelector()
    held: set[socket.socket] = set()
    said = time.monotonic()
    while True:
        for _ in range(20):
            if len(held) < _OPEN:
                held.add(_connect(selector, host, port))
        for key, _ in selector.select(0.002):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if not _greeted(sock, kind):
                selector.unregister(sock)
                held.discard(sock)
                sock.close()
        if kind == "slow-bytes" and time.monotonic() > said + 0.05:
            said = time.monotonic()
            for sock in held:
                with contextlib.suppress(OSError):
                    sock.send(b"x")


def _connect(selector: selectors.BaseSelector, host: str, port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.connect((host, port))
    selector.register(sock, selectors.EVENT_READ)
    return sock


def _greeted(sock: socket.socket, kind: str) -> bool:
    """Answer what the server sends; whether the connection is still open."""
    try:
        if not sock.recv(100):
            return False
        if kind == "garbage":
            sock.send(os.urandom(4096))
        elif kind == "half-frame":
            sock.send(os.urandom(16) + struct.pack("<I", 2000) + os.urandom(1000))
        elif kind == "large-frame":
            sock.send(os.urandom(16) + struct.pack("<I", 1 << 20) + os.urandom(60_000))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    flood(sys.argv[1], int(sys.argv[2]), sys.argv[3])
