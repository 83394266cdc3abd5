"""When engines will have read the prompts that this router sent them.

Goes by how fast prefill engines read lately. Each engine reads one prompt after another; where
the router does not see it finish (decode, before its answer begins), the estimate alone counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# What a prompt that was read weighs, against the next one.
_KEPT = 0.9
Clock = Callable[[], float]


class Speed:
    """Seconds for a prompt's token, learnt from prompts that were read. Unknown at first: none."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """So long a prompt was read in so many seconds."""
        self._tokens = self._tokens * _KEPT + tokens
        self._seconds = self._seconds * _KEPT + seconds

    def takes(self, tokens: int) -> float:
        """Seconds to read so many tokens."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class PrefillBacklog:
    """What one engine has before it."""

    def __init__(self, speed: Speed, clock: Clock = time.monotonic) -> None:
        self._speed, self._clock = speed, clock
        self._tokens = 0
        # When the prompt came to its turn that is read now, and when all will have been read.
        self._turn = self._end = 0.0

    def begin(self, tokens: int) -> None:
        """It has got one more."""
        now = self._clock()
        if self._tokens == 0:
            self._turn = now
        self._tokens += tokens
        self._end = max(self._end, now) + self._speed.takes(tokens)

    def finish(self, tokens: int) -> None:
        """It has just read one, which says how fast it is and what is left."""
        now = self._clock()
        self._speed.learn(tokens, now - self._turn)
        self._end = now + self._drop(tokens, now)

    def forget(self, tokens: int) -> None:
        """It has one less; whether it was read, and when, nobody knows."""
        now = self._clock()
        self._end = min(self._end, now + self._drop(tokens, now))

    def left_s(self) -> float:
        """Seconds until it could begin with another prompt."""
        return max(0.0, self._end - self._clock())

    def _drop(self, tokens: int, now: float) -> float:
        """Returns what the others take."""
        self._turn = now
        self._tokens -= tokens
        return self._speed.takes(self._tokens)
