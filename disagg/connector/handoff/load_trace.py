"""What a worker notes of a load whose request is traced: the news of its lease, and each chunk."""

from __future__ import annotations

import time
from collections.abc import Sequence

from disagg.connector.handoff.growing_load import Leases
from disagg.connector.handoff.messages import LoadEvent
from disagg.transport.fetch import Moved


class LoadTrace:
    """Of one load on one rank; it notes nothing unless `is_on`."""

    def __init__(self, rank: int, *, is_on: bool) -> None:
        self._rank, self._is_on = rank, is_on
        self.events: list[LoadEvent] = []

    def heard(self, leases: Leases) -> None:
        """There is news of the leases that it follows."""
        if self._is_on:
            name = "whole" if leases.is_whole else "grown"
            self.events.append(self._event(name, leases))

    def fetched(self, moved: Sequence[Moved], leases: Leases | None = None) -> None:
        """These bytes came together, the last of them now. leases: those that it follows."""
        if self._is_on and moved:
            size, seconds = sum(one.num_bytes for one in moved), sum(one.seconds for one in moved)
            event = self._event("chunk", leases)
            self.events.append(event._replace(num_bytes=size, seconds=seconds))

    def _event(self, name: str, leases: Leases | None) -> LoadEvent:
        tokens, epoch = (leases.tokens, leases.epoch) if leases is not None else (0, 0)
        return LoadEvent(name, time.time_ns(), self._rank, tokens, epoch)
