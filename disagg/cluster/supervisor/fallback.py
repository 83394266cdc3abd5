"""Looks after a deployment in the driver itself, until its supervisor has a process again.

A process takes seconds to start, in which engines may die too. To have a spare one wait for that
would cost as much as the supervisor, all the time.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from typing import Any

from disagg.cluster.control import Orders
from disagg.cluster.supervisor.loop import (
    Event,
    Inheritance,
    MakeEngine,
    MakeRouter,
    Said,
    SupervisorLoop,
)

_END_S = 5.0


class Fallback:
    """At work from its making on. It takes no orders: commands do not reach this process."""

    def __init__(self, given: Inheritance) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._supervision = SupervisorLoop(Orders(), self._events.put)
        self._thread = threading.Thread(target=self._run, args=(given,), name="deputy", daemon=True)
        self._thread.start()

    def events(self, wait_s: float) -> list[Event]:
        """What happened, as soon as there is anything, for up to `wait_s`."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=wait_s))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found

    def made(self, number: int, actor: Any) -> None:
        """See `SupervisorLoop`."""
        self._supervision.made(number, actor)

    def stop(self) -> None:
        """Have it end after its step; what it asks for until then is to be answered."""
        self._supervision.stop()

    @property
    def over(self) -> bool:
        """Whether it ended, and all its events were taken."""
        return not self._thread.is_alive() and self._events.empty()

    @property
    def silent_s(self) -> float:
        """See `SupervisorLoop`."""
        return self._supervision.silent_s

    def close(self) -> None:
        """End it soon, and give it nothing any more."""
        self.stop()
        deadline = time.monotonic() + _END_S
        while not self.over and time.monotonic() < deadline:
            for event in self.events(0.05):
                if isinstance(event, MakeEngine | MakeRouter):
                    self.made(event.number, None)

    def _run(self, given: Inheritance) -> None:
        try:
            self._supervision.run(given)
        except Exception as error:  # noqa: BLE001
            what = f"nobody looks after the engines until the supervisor is back: {error!r}"
            self._events.put(Said(what, traceback.format_exc()))
