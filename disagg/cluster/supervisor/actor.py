"""The supervisor's actor: runs a `SupervisorLoop` in a thread; driver and commands call it.

It may die at any time. The driver then starts another one with the state that this one reported.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disagg.cluster.control import Command, CommandProgress, Control
from disagg.cluster.supervisor.loop import DeploymentState, Event, SupervisorLoop


@dataclass(frozen=True)
class SupervisorReport:
    """silent_s: seconds since the supervisor's last step."""

    events: Sequence[Event]
    silent_s: float


class SupervisorActor:
    """Hosts the supervisor of one deployment. It works from `begin` on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._control: Control | None = None
        self._loop: SupervisorLoop | None = None

    # ---- called by the driver ------------------------------------------------------------------

    async def begin(self, state: DeploymentState) -> int:
        """Start the loop on this deployment. Returns the process id."""
        loop, self._control = asyncio.get_running_loop(), Control()

        def post(event: Event) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._loop = SupervisorLoop(self._control, post)
        threading.Thread(
            target=_run, args=(self._loop, state), name="supervisor", daemon=True
        ).start()
        return os.getpid()

    async def report(self, wait_s: float) -> SupervisorReport:
        """The events since the last report. Waits up to `wait_s` for the first one."""
        events = []
        try:
            async with asyncio.timeout(wait_s):
                events.append(await self._events.get())
        except TimeoutError:
            pass
        while not self._events.empty():
            events.append(self._events.get_nowait())
        # Ray may run this call before `begin`, although `begin` was called first.
        return SupervisorReport(events, self._loop.silent_s if self._loop else 0.0)

    async def made(self, number: int, actor: Any) -> None:
        """See `SupervisorLoop`."""
        assert self._loop is not None
        self._loop.made(number, actor)

    # ---- called by commands --------------------------------------------------------------------

    async def name(self) -> str:
        """The deployment's name."""
        self._begun()
        return self._name

    async def submit(self, command: Command) -> tuple[int, int]:
        """See `Control`."""
        return self._begun().submit(command)

    async def follow(self, number: int, after: int, wait_s: float) -> CommandProgress:
        """See `Control`."""
        return await self._begun().follow(number, after, wait_s)

    def _begun(self) -> Control:
        if self._control is None:
            raise RuntimeError("the deployment does not serve yet")
        return self._control


def _run(loop: SupervisorLoop, state: DeploymentState) -> None:
    try:
        loop.run(state)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)  # the driver starts another supervisor
