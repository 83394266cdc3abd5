"""Deadlines of waits, and events on a device's stream."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from disagg.errors import PeerLost


@dataclass(frozen=True)
class Deadline:
    """A moment on this process's monotonic clock that a wait must not pass."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds left; raises `PeerLost` when there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise PeerLost("deadline passed", reason="deadline")
        return left


class Event(Protocol):
    """A position in a device's stream."""

    def is_done(self) -> bool:
        """Whether the stream has passed it. Raises `TransferError` if work before it failed."""
