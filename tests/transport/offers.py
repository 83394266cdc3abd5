"""Offers of one-sided transports that are not what a producer made, and whom they may name."""

from __future__ import annotations

import os
from typing import Any

import msgspec


def changed(offer: bytes, **fields: Any) -> bytes:
    """The same offer with other values in these of its fields."""
    content = msgspec.msgpack.decode(offer)
    assert set(fields) <= set(content)
    return msgspec.msgpack.encode({**content, **fields})


def gone() -> int:
    """The pid of a process that has ended."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    return pid
