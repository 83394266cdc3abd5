"""An engine's answer, from its head to its end, as whoever relays it reads it.

The first bytes of a burst are there for the reader at once, twice (a chat's role, and its first
token), and what follows them in rounds. Nothing waits for a round that comes more slowly than
these, and no answer's end does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

ROUND_S = 0.003
"""Shorter than what most models take for a token."""
_FEW = 2
# What may lie here unread before the engine is made to wait.
_HIGH_WATER = 128 << 10


class Source(Protocol):
    """The connection that an answer comes from."""

    def read_on(self) -> None:
        """What lay unread was read."""

    def abort(self) -> None:
        """End it, whatever it is doing."""


class Rounds:
    """Wakes the readers of answers that come in bursts, all at once and not too often.

    What a reader is woken for costs several times what one more chunk does. `length_s`: from one
    round to the next at least; with 0 nobody waits for one.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._waiting: dict[UpstreamResponse, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def join(self, answer: UpstreamResponse) -> bool:
        """Let it be read in the next round. Returns whether many wait for it."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.length_s, self._begin)
        self._waiting[answer] = None
        return len(self._waiting) > _FEW

    def leave(self, answer: UpstreamResponse) -> None:
        """It does not wait any more."""
        self._waiting.pop(answer, None)

    def _begin(self) -> None:
        waiting, self._waiting, self._timer = self._waiting, {}, None
        for answer in waiting:
            answer.gathered()


class UpstreamResponse:
    """An answer whose head has come.

    Whoever has it reads to its end or calls `close`, which ends the connection.
    """

    def __init__(
        self,
        connection: Source,
        status: int,
        raw: list[tuple[bytes, bytes]],
        rounds: Rounds,
    ) -> None:
        self._connection, self._rounds = connection, rounds
        self._time = asyncio.get_running_loop().time
        self.status, self.raw_headers = status, raw
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._is_whole = self._gathers = self._is_burst = False
        self._read_at = 0.0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content(self) -> UpstreamResponse:
        """What is read from, as in aiohttp."""
        return self

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return self._is_whole

    @property
    def is_ready(self) -> bool:
        """Whether a read would not have to wait."""
        return bool((self._pieces and not self._gathers) or self._is_whole or self._error)

    def at_eof(self) -> bool:
        """Whether all of it has come and was read."""
        return self._is_whole and not self._pieces

    async def readany(self) -> bytes:
        """All that has come since; empty at the end. Raises what was set: `EngineLost`."""
        while not self.is_ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._size = self._pieces, 0
        if not pieces:
            if self._error is not None:
                raise self._error
            return b""
        self._read_at = self._time()
        data = pieces.popleft() if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._connection.read_on()
        return data

    async def read(self) -> bytes:
        """The whole body. Raises what `readany` does."""
        pieces = []
        while piece := await self.readany():
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Nobody reads on. Of no effect once it was read to its end."""
        if not self._is_whole:
            self._connection.abort()

    def set_exception(self, error: Exception) -> None:
        """Whoever reads, or will read, gets this after what has come."""
        self._error = self._error or error
        self._wake()

    # ---- from the connection ---------------------------------------------------------------

    def feed(self, data: bytes) -> bool:
        """Returns whether that is enough for now."""
        was_read = not self._pieces
        self._pieces.append(data)
        self._size += len(data)
        is_enough = self._size > _HIGH_WATER
        if is_enough:
            self.gathered()
        elif was_read:
            is_burst = self._time() - self._read_at < self._rounds.length_s
            if is_burst and self._is_burst:
                self._gathers = True
                # One read in the next round costs less than several until then; of few readers,
                # who are soon served, each gets its end at once.
                return self._rounds.join(self)
            self._is_burst = is_burst
            self._wake()
        return is_enough

    def end(self) -> None:
        """The body is whole."""
        self._is_whole = True
        if self._gathers:
            self._rounds.leave(self)
        self._wake()

    def gathered(self) -> None:
        """What has come may be read now."""
        self._gathers = False
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
