"""The supervisor's actor: a supervision in a thread, reached by the driver and by commands.

It may die at any time: the driver starts the next one with all that this one had told it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disagg.cluster.control import Control, News, Order
from disagg.cluster.supervisor.loop import Event, Inheritance, SupervisorLoop


@dataclass(frozen=True)
class Report:
    """silent_s: since the supervisor's last step."""

    events: Sequence[Event]
    silent_s: float


class SupervisorActor:
    """Works from `begin` on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._control: Control | None = None
        self._supervision: SupervisorLoop | None = None

    # ---- the driver ----------------------------------------------------------------------------

    async def begin(self, given: Inheritance) -> int:
        """Look after this from now on. Returns the process id."""
        loop, self._control = asyncio.get_running_loop(), Control()

        def post(event: Event) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._supervision = SupervisorLoop(self._control, post)
        threading.Thread(
            target=_run, args=(self._supervision, given), name="supervisor", daemon=True
        ).start()
        return os.getpid()

    async def report(self, wait_s: float) -> Report:
        """What happened since the last one, as soon as there is anything, for up to `wait_s`."""
        events = []
        try:
            events.append(await asyncio.wait_for(self._events.get(), wait_s))
        except TimeoutError:
            pass
        while not self._events.empty():
            events.append(self._events.get_nowait())
        # Ray may run it before `begin`, which was called first.
        return Report(events, self._supervision.silent_s if self._supervision else 0.0)

    async def made(self, number: int, actor: Any) -> None:
        """See `SupervisorLoop`."""
        assert self._supervision is not None
        self._supervision.made(number, actor)

    # ---- commands ------------------------------------------------------------------------------

    async def name(self) -> str:
        """The deployment's name."""
        self._begun()
        return self._name

    async def give(self, order: Order) -> tuple[int, int]:
        """See `Control`."""
        return self._begun().give(order)

    async def follow(self, number: int, after: int, wait_s: float) -> News:
        """See `Control`."""
        return await self._begun().follow(number, after, wait_s)

    def _begun(self) -> Control:
        if self._control is None:
            raise RuntimeError("the deployment does not serve yet")
        return self._control


def _run(supervision: SupervisorLoop, given: Inheritance) -> None:
    try:
        supervision.run(given)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)  # the next one may do better
