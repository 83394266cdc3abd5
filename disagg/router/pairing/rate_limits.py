"""How much a client may ask for in a minute: requests, tokens of prompts, tokens of answers.

Each limit is a token bucket that holds one minute's worth. Prompts are paid before they are served,
by the router's estimate; answers afterwards, so that a client may owe some. Each router process
counts on its own, and grants its part of the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
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


class Bucket:
    """One limit of one client. `limit`: a minute."""

    def __init__(self, limit: float, clock: Clock) -> None:
        self.limit, self._clock = limit, clock
        self._level, self._at = limit, clock()

    def level(self) -> float:
        """What is left now; negative if the client owes."""
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / _MINUTE)
        self._at = now
        return self._level

    def wait_s(self, amount: float) -> float:
        """Seconds until so much may be taken; 0 if it may be now. What is more than a minute's
        worth may be taken from a full bucket."""
        missing = min(amount, self.limit) - self.level()
        return max(0.0, missing * _MINUTE / self.limit)

    def take(self, amount: float) -> None:
        """Take it, whatever is left."""
        self._level = self.level() - amount

    def full_s(self) -> float:
        """Seconds until nothing of it is used."""
        return (self.limit - self.level()) * _MINUTE / self.limit


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
        self._buckets: dict[str | None, dict[str, Bucket]] = {}

    def admit(self, client: str | None, tokens: int, style: Style) -> Mapping[str, str]:
        """Count a request with a prompt of so many tokens. Returns the headers that say what is
        left. Raises `ApiError` 429 if it is too much."""
        buckets = self._of(client)
        if not buckets:
            return {}
        amounts = {"requests": 1, "prompt_tokens": tokens, "output_tokens": 1}
        waits = {kind: bucket.wait_s(amounts[kind]) for kind, bucket in buckets.items()}
        kind = max(waits, key=waits.__getitem__)
        if waits[kind] > 0:
            words, after = kind.replace("_", " "), _seconds(waits[kind])
            limit = round(buckets[kind].limit * self._processes)
            raise ApiError(
                429,
                f"this key may use {limit} {words} a minute; try again in {after} s "
                f"({kind}_per_minute in router.shares)",
                {**self._headers(buckets, style), "Retry-After": after},
            )
        for kind, bucket in buckets.items():
            if kind != "output_tokens":
                bucket.take(amounts[kind])
        return self._headers(buckets, style)

    def answered(self, client: str | None, tokens: int) -> None:
        """An answer had so many tokens."""
        bucket = self._of(client).get("output_tokens")
        if bucket is not None:
            bucket.take(tokens)

    def _of(self, client: str | None) -> Mapping[str, Bucket]:
        buckets = self._buckets.get(client)
        if buckets is None:
            share = self._share(client)
            buckets = self._buckets[client] = {
                kind: Bucket(limit / self._processes, self._clock)
                for kind in _NAMES
                if (limit := getattr(share, f"{kind}_per_minute")) is not None
            }
        return buckets

    def _headers(self, buckets: Mapping[str, Bucket], style: Style) -> dict[str, str]:
        headers: dict[str, str] = {}
        for kind, bucket in buckets.items():
            limit = str(round(bucket.limit * self._processes))
            left = str(max(0, math.floor(bucket.level() * self._processes)))
            openai, anthropic = _NAMES[kind]
            if style == "anthropic":
                name = f"anthropic-ratelimit-{anthropic}"
                full = datetime.now(UTC) + timedelta(seconds=bucket.full_s())
                headers[f"{name}-limit"], headers[f"{name}-remaining"] = limit, left
                headers[f"{name}-reset"] = full.strftime("%Y-%m-%dT%H:%M:%SZ")
            else:
                headers[f"x-ratelimit-limit-{openai}"] = limit
                headers[f"x-ratelimit-remaining-{openai}"] = left
                headers[f"x-ratelimit-reset-{openai}"] = f"{_seconds(bucket.full_s())}s"
        return headers


def _seconds(seconds: float) -> str:
    return str(max(1, math.ceil(seconds)))
