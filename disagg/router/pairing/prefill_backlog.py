"""Estimates when each engine will have computed the prompts that this router sent to it.

The estimate uses the measured speed of the last prefills, and assumes that an engine computes one
prompt after another. The router sees a prefill engine finish a prompt. It does not see that of a
decode engine before its answer begins: until then only the estimate counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# The weight of each measurement, relative to the next one.
_DECAY = 0.9
Clock = Callable[[], float]


class Speed:
    """Seconds per prompt token, measured on finished prompts; 0 before the first one."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Add a measurement: so many tokens took so many seconds."""
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds

    def takes(self, tokens: int) -> float:
        """Seconds to compute so many tokens."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


class PrefillBacklog:
    """The prompts that one engine has not computed yet."""

    def __init__(self, speed: Speed, clock: Clock = time.monotonic) -> None:
        self._speed, self._clock = speed, clock
        self._tokens = 0
        # When the engine began with its current prompt, and when it will have finished all.
        self._began = self._end = 0.0

    def begin(self, tokens: int) -> None:
        """The engine was sent a prompt."""
        now = self._clock()
        if self._tokens == 0:
            self._began = now
        self._tokens += tokens
        self._end = max(self._end, now) + self._speed.takes(tokens)

    def finish(self, tokens: int) -> None:
        """The engine has just finished a prompt: measure its speed, and correct the estimate."""
        now = self._clock()
        self._speed.learn(tokens, now - self._began)
        self._end = now + self._drop(tokens, now)

    def forget(self, tokens: int) -> None:
        """A prompt is no longer pending. It is unknown when, or whether, the engine finished it."""
        now = self._clock()
        self._end = min(self._end, now + self._drop(tokens, now))

    def left_s(self) -> float:
        """Seconds until the engine could begin with another prompt."""
        return max(0.0, self._end - self._clock())

    def _drop(self, tokens: int, now: float) -> float:
        """Returns the seconds that the remaining prompts take."""
        self._began = now
        self._tokens -= tokens
        return self._speed.takes(self._tokens)
