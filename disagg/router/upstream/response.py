"""An engine's answer as a reader sees it: a status, headers, and a body that arrives in chunks.

When chunks arrive in a burst, the reader gets the first two at once: a chat's role and its first
token. It gets the later ones in rounds, several chunks at a time. A chunk that arrives more slowly
than rounds follow one another never waits for a round, nor does the end of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

ROUND_S = 0.003
"""Shorter than most models take for a token."""
_FEW = 2
# Bytes that may be buffered before reading from the engine is paused.
_HIGH_WATER = 128 << 10


class Source(Protocol):
    """The connection that an answer arrives on."""

    def read_on(self) -> None:
        """Resume reading: the answer's buffer is empty again."""

    def abort(self) -> None:
        """Close the connection at once."""


class Rounds:
    """Wakes the readers of answers that arrive in bursts: all together, at a limited rate.

    Waking a reader costs several times as much as one more chunk does. `length_s`: the least time
    from one round to the next; with 0 no reader waits for a round.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._waiting: dict[UpstreamResponse, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def join(self, answer: UpstreamResponse) -> bool:
        """Wake this answer's reader in the next round. Returns whether many wait for that round."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.length_s, self._begin)
        self._waiting[answer] = None
        return len(self._waiting) > _FEW

    def leave(self, answer: UpstreamResponse) -> None:
        """This answer does not wait for the round any more."""
        self._waiting.pop(answer, None)

    def _begin(self) -> None:
        waiting, self._waiting, self._timer = self._waiting, {}, None
        for answer in waiting:
            answer.make_readable()


class UpstreamResponse:
    """An answer whose head has arrived.

    Its owner must read it to its end, or call `close`, which closes the connection. `raw`: the
    headers, names in lower case. `time`: the event loop's.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_is_burst",
        "_is_whole",
        "_pieces",
        "_read_at",
        "_rounds",
        "_size",
        "_time",
        "_waiter",
        "_waits_for_round",
        "raw_headers",
        "status",
    )

    def __init__(
        self,
        connection: Source,
        status: int,
        raw: list[tuple[bytes, bytes]],
        rounds: Rounds,
        time: Callable[[], float],
    ) -> None:
        self._connection, self._rounds, self._time = connection, rounds, time
        self.status, self.raw_headers = status, raw
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_whole = self._waits_for_round = self._is_burst = False
        self._read_at = 0.0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content(self) -> UpstreamResponse:
        """The object with `readany`, as in aiohttp."""
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the whole answer has arrived."""
        return self._is_whole

    @property
    def is_ready(self) -> bool:
        """Whether a read would not have to wait."""
        if self._is_whole or self._error is not None:
            return True
        return bool(self._pieces) and not self._waits_for_round

    def at_eof(self) -> bool:
        """Whether the whole answer has arrived and was read."""
        return self._is_whole and not self._pieces

    async def readany(self) -> bytes:
        """All bytes that arrived since the last read; empty at the end. Raises the error of
        `set_exception`, such as `EngineLost`."""
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
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._connection.read_on()
        return data

    async def read(self) -> bytes:
        """The whole body. Raises the errors of `readany`."""
        pieces = []
        while not self.at_eof():
            pieces.append(await self.readany())
        return b"".join(pieces)

    def close(self) -> None:
        """Stop reading: closes the connection, unless the whole answer has arrived."""
        if not self._is_whole:
            self._connection.abort()

    def set_exception(self, error: Exception) -> None:
        """Raise this error to the reader, after the bytes that have arrived."""
        self._error = self._error or error
        self._wake()

    # ---- called by the connection ----------------------------------------------------------

    def feed(self, data: bytes) -> bool:
        """A chunk arrived. Returns whether reading from the engine should pause."""
        was_read = not self._pieces
        self._pieces.append(data)
        self._size += len(data)
        is_enough = self._size > _HIGH_WATER
        if is_enough:
            self.make_readable()
        elif was_read:
            is_burst = self._time() - self._read_at < self._rounds.length_s
            if is_burst and self._is_burst:
                self._waits_for_round = True
                # One read in the next round costs less than several before it. With many waiting,
                # reading pauses until then; with few, it goes on, so that an answer's end is seen.
                return self._rounds.join(self)
            self._is_burst = is_burst
            self._wake()
        return is_enough

    def end(self) -> None:
        """The whole body has arrived."""
        self._is_whole = True
        if self._waits_for_round:
            self._rounds.leave(self)
        self._wake()

    def make_readable(self) -> None:
        """The bytes that have arrived may be read now."""
        self._waits_for_round = False
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
