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
# Against what each prompt takes: as much as half a measurement that says 0.
_RIDGE = 0.5
Clock = Callable[[], float]


class Speed:
    """Seconds that prompts take, by their tokens, measured on finished ones; 0 before the first.

    A straight line: what each prompt takes, and what each of its tokens takes. Prompts of about one
    length can't tell these apart. So what each prompt takes is held small (`_RIDGE`), and counts as
    soon as lengths differ by a fifth or more.
    """

    def __init__(self) -> None:
        # Of the measurements: how many, and the sums of x, y, x * x and x * y.
        self._count = self._tokens = self._seconds = self._squares = self._products = 0.0
        self.prompt_s = self.token_s = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Add a measurement: so many tokens took so many seconds."""
        self._count = self._count * _DECAY + 1
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds
        self._squares = self._squares * _DECAY + tokens * tokens
        self._products = self._products * _DECAY + tokens * seconds
        self._fit()

    def takes(self, tokens: int, prompts: int = 1) -> float:
        """Seconds to compute so many tokens, of so many prompts."""
        return prompts * self.prompt_s + tokens * self.token_s

    def _fit(self) -> None:
        count = self._count + _RIDGE
        spread = count * self._squares - self._tokens * self._tokens
        self.prompt_s = self.token_s = 0.0
        if spread > 0:
            slope = (count * self._products - self._tokens * self._seconds) / spread
            rest = (self._seconds - slope * self._tokens) / count
            if slope > 0 and rest > 0:
                self.prompt_s, self.token_s = rest, slope
                return
        if self._tokens:
            self.token_s = self._seconds / self._tokens


class PrefillBacklog:
    """The prompts that one engine has not computed yet."""

    def __init__(self, speed: Speed, clock: Clock = time.monotonic) -> None:
        self._speed, self._clock = speed, clock
        self._tokens = self._prompts = 0
        # When the engine began with its current prompt, and when it will have finished all.
        self._began = self._end = 0.0

    def begin(self, tokens: int) -> None:
        """The engine was sent a prompt."""
        now = self._clock()
        if self._tokens == 0:
            self._began = now
        self._tokens += tokens
        self._prompts += 1
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
        self._prompts -= 1
        return self._speed.takes(self._tokens, self._prompts)
