"""Whether the tier that engines share is faster than computing, by what both were measured to take.

A store that answers, but slowly, never counts as out. So a request waits for it no longer than the
computation would take, and `SLACK_S`: once for the lookup, once for the load. What takes longer is
computed. After a late load, or three late lookups in a row, requests do not ask the tier any more.
After a pause one request tries, and its lookup or its load decides.

Where reads take long and many run at once, a short prefix may be slow and a long one fast. So a
load is also left if as many chunks took longer before than computing and `SLACK_S`. Such a load is
tried as often.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

SLACK_S = 0.25
"""What a slow tier may cost beside the time of computing, at the lookup and at the load."""
_GUESS = 0.001  # seconds to compute a token at most, before there are enough measurements
_ENOUGH, _REMEMBERED = 3, 8
_LEAST_TOKENS = 32  # fewer tell more of the step than of their computation
_DECAY = 0.5  # the weight of each measurement, relative to the next one: a store may be mended
_LATE_LOOKUPS = 3
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0


class _Mean:
    """Seconds per item, by the last measurements."""

    def __init__(self) -> None:
        self._items = self._seconds = 0.0

    def learn(self, items: int, seconds: float) -> None:
        self._items = self._items * _DECAY + items
        self._seconds = self._seconds * _DECAY + seconds

    def takes(self, items: int) -> float | None:
        return items * self._seconds / self._items if self._items else None


class _Computing:
    """Seconds to compute so many tokens: the least per token of the last few prompts about as long.

    The least, since an estimate that is too low corrects itself: what is then computed is measured.
    After one that is too high, all is loaded, and nothing more is learnt. By length, since a short
    prompt takes more of a step's own time for each token, and must not stand for a long one.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, deque[float]] = {}

    def learn(self, tokens: int, seconds: float) -> None:
        last = self._by_size.setdefault(tokens.bit_length(), deque(maxlen=_REMEMBERED))
        last.append(seconds / tokens)

    def takes(self, tokens: int) -> float:
        """By the nearest length that was measured, of two the longer one."""
        size = tokens.bit_length()
        nearest = min(self._by_size, key=lambda one: (abs(one - size), -one), default=size)
        last = self._by_size.get(nearest, ())
        return tokens * min(last if len(last) >= _ENOUGH else (*last, _GUESS))


class Pace:
    """Of one tier, in the scheduler's thread. clock: for tests."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._computing, self._chunk, self._read = _Computing(), _Mean(), _Mean()
        self._late_lookups = self._paused = 0
        self._slow = ""
        self._try_at = 0.0
        self._trying: str | None = None

    # ---- questions ---------------------------------------------------------------------------

    def asks(self, request_id: str) -> bool:
        """Whether this request shall ask the tier."""
        return not self._slow or self._tries(request_id)

    def pays(self, request_id: str, chunks: int, tokens: int) -> bool:
        """Whether to load so many chunks of the tier, which spare so many tokens."""
        each, read = self._chunk.takes(chunks), self._read.takes(1)
        computed = self._computing.takes(tokens)
        if each is None or read is None:
            return True
        return max(each, read) <= computed + SLACK_S or self._tries(request_id)

    def limit_s(self, tokens: int) -> float:
        """How long a request may wait for what spares so many tokens, at the lookup and again at
        the load."""
        return SLACK_S + self._computing.takes(tokens)

    def _tries(self, request_id: str) -> bool:
        if request_id == self._trying:
            return True
        if self._clock() < self._try_at:
            return False
        self._trying = request_id
        self._pause()
        return True

    def _pause(self) -> None:
        pause = min(_PAUSE_S * 2.0**self._paused, _LONGEST_PAUSE_S)
        self._try_at = self._clock() + pause

    # ---- measurements ------------------------------------------------------------------------

    def computed(self, tokens: int, seconds: float) -> None:
        """A prompt's tokens took so long, from the first step to the first new token."""
        if tokens >= _LEAST_TOKENS:
            self._computing.learn(tokens, seconds)

    def read(self, seconds: float) -> None:
        """One chunk took so long."""
        self._read.learn(1, seconds)

    def loaded(self, chunks: int, seconds: float) -> None:
        """So many chunks of the tier took so long, and were not late."""
        self._chunk.learn(chunks, seconds)
        self._is_fast()

    def late_load(self, chunks: int, seconds: float) -> None:
        """A load was left, since it took longer than its limit."""
        self._chunk.learn(chunks, seconds)
        self._is_slow(f"a load of {chunks} chunks took more than {seconds:.2f} s")

    def lookup_ended(self, *, late: bool) -> None:
        """A lookup that a request waited for ended, in time or not."""
        if not late:
            self._late_lookups = 0
            if self._slow == _LOOKUPS:
                self._is_fast()
            return
        self._late_lookups += 1
        if self._late_lookups >= _LATE_LOOKUPS:
            self._is_slow(_LOOKUPS)

    def _is_slow(self, why: str) -> None:
        if not self._slow:
            logger.warning(
                "the tier %s is slower than computing (%s): blocks are computed until it is faster",
                self._name,
                why,
            )
        else:
            self._paused += 1
        self._slow, self._trying = self._slow or why, None
        self._pause()

    def _is_fast(self) -> None:
        if self._slow:
            logger.warning("the tier %s is fast enough again", self._name)
        self._slow, self._paused, self._late_lookups = "", 0, 0


_LOOKUPS = f"{_LATE_LOOKUPS} lookups in a row were late"
