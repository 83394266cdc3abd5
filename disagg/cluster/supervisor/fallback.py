"""Runs a `SupervisorLoop` in the driver until a new supervisor's process is ready.

A process takes seconds to start, and engines may die in that time. A spare supervisor process would
cost as much as the supervisor, all the time.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from typing import Any

from disagg.cluster.control import Commands
from disagg.cluster.supervisor.loop import (
    CreateEngine,
    DeploymentState,
    Event,
    LogEvent,
    SendEngines,
    SupervisorLoop,
)

_END_S = 5.0


class Fallback:
    """Works from its creation on. It takes no commands: they cannot reach this process."""

    def __init__(self, state: DeploymentState) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._loop = SupervisorLoop(Commands(), self._events.put)
        self._thread = threading.Thread(
            target=self._run, args=(state,), name="fallback", daemon=True
        )
        self._thread.start()

    def events(self, wait_s: float) -> list[Event]:
        """The events since the last call. Waits up to `wait_s` for the first one."""
        found: list[Event] = []
        try:
            found.append(self._events.get(timeout=wait_s))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found

    def made(self, number: int, actor: Any) -> None:
        """See `SupervisorLoop`."""
        self._loop.made(number, actor)

    def stop(self) -> None:
        """End it after its current step. Its requests until then must be answered."""
        self._loop.stop()

    @property
    def over(self) -> bool:
        """Whether it has ended and all its events were taken."""
        return not self._thread.is_alive() and self._events.empty()

    @property
    def silent_s(self) -> float:
        """See `SupervisorLoop`."""
        return self._loop.silent_s

    def close(self) -> None:
        """End it, and refuse its requests. Waits up to `_END_S`."""
        self.stop()
        deadline = time.monotonic() + _END_S
        while not self.over and time.monotonic() < deadline:
            for event in self.events(0.05):
                if isinstance(event, CreateEngine | SendEngines):
                    self.made(event.number, None)

    def _run(self, state: DeploymentState) -> None:
        try:
            self._loop.run(state)
        except Exception as error:  # noqa: BLE001
            what = f"no engine restarts until the supervisor is back: {error!r}"
            self._events.put(LogEvent(what, traceback.format_exc()))
