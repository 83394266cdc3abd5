"""How much a client may ask for in a minute: requests, tokens of prompts, tokens of answers.

Each limit is a token bucket that holds one minute's worth. Prompts are paid before they are served,
by the router's estimate; answers afterwards, so that a client may owe some. Each router process
counts on its own, and grants its part of the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from disagg.config import ShareSection
from disagg.router.api.errors import ApiError, Style

_MINUTE = 60.0
Clock = Callable[[], float]
# The names in the headers: OpenAI's, Anthropic's.
_NAMES: Mapping[str, tuple[str, str]] = {
    "requests": ("requests", "requests"),
    "prompt_tokens": ("tokens", "input-tokens"),
    "output_tokens": ("output-tokens", "output-tokens"),
}
_PARTS = ("limit", "remaining", "reset")


class _Bucket:
    """One limit of one client, of which this process grants its part. `limit`: a minute. Times are
    those of one clock, in seconds."""

    def __init__(self, kind: str, limit: int, processes: int, now: float) -> None:
        self.kind, self.limit, self._processes = kind, limit, processes
        self._most = self._level = limit / processes
        self._at = now
        openai, anthropic = _NAMES[kind]
        self._names = {
            "openai": [f"x-ratelimit-{part}-{openai}" for part in _PARTS],
            "anthropic": [f"anthropic-ratelimit-{anthropic}-{part}" for part in _PARTS],
        }

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much may be taken; 0 or less if it may be now. What is more than a
        minute's worth may be taken from a full bucket."""
        return self._until(min(amount, self._most), now)

    def take(self, amount: float, now: float) -> None:
        """Take it, whatever is left."""
        self._level = self._left(now) - amount

    def tell(self, headers: dict[str, str], style: Style, now: float) -> None:
        """Add the limit, what is left of it, and when all of it is there again."""
        full_s = self._until(self._most, now)
        if style == "anthropic":
            full = datetime.now(UTC) + timedelta(seconds=full_s)
            names, reset = self._names[style], full.strftime("%Y-%m-%dT%H:%M:%SZ")
        else:
            names, reset = self._names["openai"], f"{_seconds(full_s)}s"
        of_limit, of_left, of_reset = names
        headers[of_limit] = str(self.limit)
        headers[of_left] = str(max(0, math.floor(self._level * self._processes)))
        headers[of_reset] = reset

    def _left(self, now: float) -> float:
        """Negative if the client owes."""
        if now != self._at:  # a request asks several times
            self._level = min(self._most, self._level + (now - self._at) * self._most / _MINUTE)
            self._at = now
        return self._level

    def _until(self, level: float, now: float) -> float:
        return (level - self._left(now)) * _MINUTE / self._most


class RateLimits:
    """The limits of all clients of one router process. `share`: of a client, by the name of its
    key. `processes`: that share the limits."""

    def __init__(
        self,
        share: Callable[[str | None], ShareSection],
        processes: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self._share, self._processes, self._clock = share, processes, clock
        self._buckets: dict[str | None, Sequence[_Bucket]] = {}

    def admit(self, client: str | None, tokens: int, style: Style) -> Mapping[str, str]:
        """Count a request with a prompt of so many tokens. Returns the headers that say what is
        left. Raises `ApiError` 429 if it is too much."""
        buckets, now = self._of(client), self._clock()
        amounts = {"requests": 1, "prompt_tokens": tokens, "output_tokens": 1}
        waits = [bucket.wait_s(amounts[bucket.kind], now) for bucket in buckets]
        longest = max(waits, default=0)
        if longest > 0:
            bucket = buckets[waits.index(longest)]
            words, after = bucket.kind.replace("_", " "), _seconds(longest)
            raise ApiError(
                429,
                f"this key may use {bucket.limit} {words} a minute; try again in {after} s "
                f"({bucket.kind}_per_minute in router.shares)",
                {**_headers(buckets, style, now), "Retry-After": after},
            )
        for bucket in buckets:
            if bucket.kind != "output_tokens":
                bucket.take(amounts[bucket.kind], now)
        return _headers(buckets, style, now)

    def answered(self, client: str | None, tokens: int) -> None:
        """An answer had so many tokens."""
        for bucket in self._of(client):
            if bucket.kind == "output_tokens":
                bucket.take(tokens, self._clock())

    def _of(self, client: str | None) -> Sequence[_Bucket]:
        buckets = self._buckets.get(client)
        if buckets is None:
            share, now = self._share(client), self._clock()
            buckets = self._buckets[client] = [
                _Bucket(kind, limit, self._processes, now)
                for kind in _NAMES
                if (limit := getattr(share, f"{kind}_per_minute")) is not None
            ]
        return buckets


def _headers(buckets: Sequence[_Bucket], style: Style, now: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    for bucket in buckets:
        bucket.tell(headers, style, now)
    return headers


def _seconds(seconds: float) -> str:
    return str(max(1, math.ceil(seconds)))
