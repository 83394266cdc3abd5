"""The way to one producer: its agent, who uses it, and its end after an error.

No transfer outlives `using`: a fetch that fails leaves only when the agent has ended, and an agent
ends only when nobody is within a call of it. The next fetch makes a new one, after a pause.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from disagg.errors import TransferError
from disagg.transport.deadline import Deadline
from disagg.transport.host.helper_threads import HelperThreads
from disagg.transport.nixl.agent import Agent
from disagg.transport.nixl.reads import Pieces

logger = logging.getLogger(__name__)

# Reads that are posted at once.
_AHEAD = 4
_STALLED_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# A look that took less has moved nothing; then the thread sleeps, ever longer.
_IDLE_S, _FIRST_NAP_S, _LONGEST_NAP_S = 20e-6, 20e-6, 1e-3


class Link:
    """connect: makes an agent that has met the producer. device: the GPU of the producer's memory,
    0 for host memory. helpers: share the reads, where NIXL copies in the thread that asks."""

    def __init__(
        self, connect: Callable[[], Agent], device: int, helpers: HelperThreads | None = None
    ) -> None:
        self._connect, self._device, self._helpers = connect, device, helpers
        self.threads = helpers.together if helpers is not None else 1
        self._agent: Agent | None = None
        self._changed = threading.Condition()
        self._users, self._ending, self._closed = 0, False, False
        self._failures, self._not_before = 0, 0.0

    def read(self, requests: Iterable[Pieces], deadline: Deadline) -> None:
        """Read all of these. When it returns or raises, nothing writes here any more."""
        with self.using(deadline) as agent:
            if self._helpers is None:
                self._read_ahead(agent, requests, deadline)
            else:
                every = list(requests)
                threads = min(self.threads, len(every))
                self._helpers.share(
                    every, lambda pieces: self._read_ahead(agent, [pieces], deadline), threads
                )
        self._failures = 0

    def _read_ahead(self, agent: Agent, requests: Iterable[Pieces], deadline: Deadline) -> None:
        # All is computed before the first byte moves: a copy empties the processor's caches.
        handles = [agent.read(*pieces, self._device) for pieces in requests]
        for number, handle in enumerate(handles):
            deadline.left()
            if number >= _AHEAD:
                self.wait(agent, handles[number - _AHEAD], deadline)
            agent.begin(handle)
        for handle in handles[-_AHEAD:]:
            self.wait(agent, handle, deadline)

    @contextlib.contextmanager
    def using(self, deadline: Deadline) -> Iterator[Agent]:
        """The agent; after an error within, it has ended when the context has."""
        agent = self._enter(deadline)
        try:
            yield agent
        except BaseException:
            self._ending = True
            raise
        finally:
            self._leave(agent)

    def wait(self, agent: Agent, handle: int, deadline: Deadline) -> None:
        """Wait for the end of one read."""
        began, nap = time.monotonic(), _FIRST_NAP_S
        while True:
            looked = time.perf_counter()
            if agent.is_done(handle):
                return
            if self._ending:
                raise TransferError("another fetch of this producer failed", reason="nixl_closed")
            deadline.left()
            if time.monotonic() - began > _STALLED_S:
                raise TransferError(f"nothing came for {_STALLED_S:g} s", reason="nixl_stalled")
            if time.perf_counter() - looked > _IDLE_S:
                nap = _FIRST_NAP_S
            else:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP_S)

    def close(self) -> None:
        """End the agent, as soon as nobody uses it. No call follows."""
        with self._changed:
            self._closed = self._ending = True
            if not self._users:
                self._end()

    def _enter(self, deadline: Deadline) -> Agent:
        with self._changed:
            while self._ending and not self._closed:
                self._changed.wait(deadline.left())
            if self._closed:
                raise TransferError("this way to the producer was closed", reason="nixl_closed")
            left = self._not_before - time.monotonic()
            if left > 0:
                text = f"NIXL failed {self._failures} times, not tried for {left:.0f} s more"
                raise TransferError(text, reason="nixl_paused")
            if self._agent is None:
                try:
                    self._agent = self._connect()
                except TransferError:
                    self._pause()
                    raise
            self._users += 1
            return self._agent

    def _leave(self, agent: Agent) -> None:
        with self._changed:
            self._users -= 1
            if not self._ending:
                return
            if not self._users:
                self._end()
            # Others notice within milliseconds.
            while self._agent is agent:
                self._changed.wait()

    def _end(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
        if not self._closed:
            self._pause()
            self._ending = False
        self._changed.notify_all()

    def _pause(self) -> None:
        seconds = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._failures)
        self._failures += 1
        self._not_before = time.monotonic() + seconds
        logger.info("NIXL failed with a producer, not tried with it for %g s", seconds)
