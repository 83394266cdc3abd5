"""Ports for servers that are told where to listen, and do so seconds later.

They are below those that the kernel gives to connections: one of those may be in use when the
server comes. Each process that takes ports has a block of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from collections.abc import Iterator
from functools import cache

from disagg.errors import StartupError

_FIRST, _END, _BLOCK = 20_000, 32_768, 512
# Some servers also take the ports that follow theirs.
_STEP = 4
_lock = threading.Lock()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at. Neither it nor the three after it are given to
    another process; this one gets it again after a hundred others. Raises `StartupError` if there
    is none."""
    with _lock:
        _, ports = _block()
        for port in itertools.islice(ports, _BLOCK // _STEP):
            with socket.socket() as sock:
                try:
                    sock.bind(("127.0.0.1", port))
                except OSError:
                    continue
            return port
    raise StartupError("this process has no free port left")


@cache
def _block() -> tuple[socket.socket, Iterator[int]]:
    """What keeps the block, as long as this process lives, and its ports, endlessly."""
    for first in range(_FIRST, _END - _BLOCK + 1, _BLOCK):
        # A name, not a file: it goes with the process, however that ends.
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0disagg-ports-{first}")
        except OSError:
            held.close()
            continue
        ports = list(range(first, first + _BLOCK, _STEP))
        random.shuffle(ports)
        return held, itertools.cycle(ports)
    raise StartupError(f"other processes hold all ports from {_FIRST} to {_END}")


os.register_at_fork(after_in_child=_block.cache_clear)
