"""The last ten minutes of a router: one sample each 2 s, and what happened to its engines.

A sample is kept as JSON text, a few hundred bytes, so that showing all of them costs a join of
strings. The history of several processes is in their parent, so that no child's end loses it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import msgspec

from disagg.router.server.background import background
from disagg.router.server.sampler import EVERY_S, LEAVES, UP, Taken

logger = logging.getLogger(__name__)

LENGTH_S = 600.0
_MOST_EVENTS = 100
Take: TypeAlias = Callable[[], Awaitable[Taken | None]]


class History:
    """Samples and events, the oldest first. An event has `at`, `engine`, `kind` and `why`."""

    def __init__(self) -> None:
        self.began = time.time()
        self._samples: deque[tuple[float, str]] = deque(maxlen=int(LENGTH_S / EVERY_S))
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._states: dict[str, tuple[str, float]] = {}
        """Of each engine: its state, and since when."""

    @asynccontextmanager
    async def running(self, take: Take, every_s: float = EVERY_S) -> AsyncIterator[None]:
        """Keep it current with the samples that `take` returns. A sample that fails is left out."""
        async with background(self._run(take, every_s)):
            yield

    async def _run(self, take: Take, every_s: float) -> None:
        has_failed = False
        while True:
            began = time.monotonic()
            try:
                taken = await take()
                if taken is not None:
                    self.add(taken)
                has_failed = False
            except Exception:
                if not has_failed:  # once, not each time
                    logger.warning("the history of /ui has a gap", exc_info=True)
                has_failed = True
            # Not at once after a slow one: rates over a short time say little.
            await asyncio.sleep(max(every_s / 2, every_s - (time.monotonic() - began)))

    def add(self, taken: Taken) -> None:
        """Add a sample, and the events that it shows."""
        sample = taken["sample"]
        at: float = sample["at"]
        self._samples.append((at, msgspec.json.encode(sample).decode()))
        states = taken["states"]
        is_first = not self._states
        for name, state in states.items():
            before = self._states.get(name)
            if before is None:
                self._states[name] = state, at
                if not is_first:
                    self.note(name, "added", state, at)
            elif before[0] != state:
                self._states[name] = state, at
                self.note(name, *_change(before[0], state), at)
            elif state == UP and name in taken["restarted"]:
                self._states[name] = state, at
                self.note(name, "restarted", "", at)
        for name in self._states.keys() - states.keys():
            del self._states[name]
            self.note(name, "gone", "", at)

    def note(self, engine: str, kind: str, why: str, at: float | None = None) -> None:
        """Something happened to this engine. `at`: seconds since 1970; now without it."""
        event = {"at": time.time() if at is None else at, "engine": engine, "kind": kind}
        self._events.append(event | {"why": why})

    def since(self, at: float) -> str:
        """What came after this time (seconds since 1970), as JSON: `every_s`, `began`, `engines`
        (since when each is in its state), `samples` and `events`."""
        frame = {
            "every_s": EVERY_S,
            "began": self.began,
            "engines": {name: since for name, (_, since) in self._states.items()},
            "events": [event for event in self._events if event["at"] > at],
            "samples": [msgspec.Raw(text.encode()) for when, text in self._samples if when > at],
        }
        return msgspec.json.encode(frame).decode()


def _change(before: str, now: str) -> tuple[str, str]:
    """The kind and the reason of an engine's change of state."""
    if now == UP:
        return "up", before
    return ("leaves" if now in LEAVES else "down"), now
