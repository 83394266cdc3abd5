"""How much a client may ask for in a minute: requests, tokens of prompts, tokens of answers.

Each limit is a token bucket that holds one minute's worth. Prompts are paid before they are served,
by the router's estimate; answers afterwards, so that a client may owe some. Each router process
counts on its own, and grants its part of the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from disagg.config import ShareSection
from disagg.router.api.errors import ApiError, Style

_MINUTE = 60.0
Clock = Callable[[], float]
Fields: TypeAlias = list[tuple[bytes, bytes]]
"""Header fields of an answer."""
# The names in the headers: OpenAI's, Anthropic's.
_NAMES = {
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
        self._a_second = self._most / _MINUTE
        self._at = now
        self._asks_for_tokens = kind == "prompt_tokens"
        self._is_paid_before = kind != "output_tokens"
        openai, anthropic = _NAMES[kind]
        of_openai = [f"x-ratelimit-{part}-{openai}".encode() for part in _PARTS]
        of_anthropic = [f"anthropic-ratelimit-{anthropic}-{part}".encode() for part in _PARTS]
        self._names: dict[Style, list[bytes]] = {"openai": of_openai, "anthropic": of_anthropic}
        self._limit_told = b"%d" % limit

    def wait_s(self, tokens: int, now: float) -> float:
        """Seconds until a request with a prompt of so many tokens may come; 0 or less if it may
        now. What is more than a minute's worth may be taken from a full bucket."""
        self._refill(now)
        amount = tokens if self._asks_for_tokens else 1
        return (min(amount, self._most) - self._level) / self._a_second

    def pay(self, tokens: int) -> None:
        """That request came, just after `wait_s`. Answers are paid when they have ended."""
        if self._is_paid_before:
            self._level -= tokens if self._asks_for_tokens else 1

    def owe(self, tokens: int, now: float) -> None:
        """Take so many, whatever is left."""
        self._refill(now)
        self._level -= tokens

    def tell(self, fields: Fields, style: Style) -> None:
        """Add the limit, what is left of it, and when all of it is there again."""
        full_s, left = (self._most - self._level) / self._a_second, self._level * self._processes
        if style == "anthropic":
            full = datetime.now(UTC) + timedelta(seconds=full_s)
            reset = full.strftime("%Y-%m-%dT%H:%M:%SZ").encode()
        else:
            reset = b"%ds" % _whole(full_s)
        of_limit, of_left, of_reset = self._names[style]
        fields += (
            (of_limit, self._limit_told),
            (of_left, b"%d" % left if left > 0 else b"0"),
            (of_reset, reset),
        )

    def _refill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._at) * self._a_second)
        self._at = now


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

    def admit(self, client: str | None, tokens: int, style: Style) -> Fields:
        """Count a request with a prompt of so many tokens. Returns the header fields that say what
        is left. Raises `ApiError` 429 if it is too much."""
        buckets, now, fields = self._of(client), self._clock(), Fields()
        late, longest_s = None, 0.0
        for bucket in buckets:
            wait_s = bucket.wait_s(tokens, now)
            if wait_s > longest_s:
                late, longest_s = bucket, wait_s
        for bucket in buckets:
            if late is None:
                bucket.pay(tokens)
            bucket.tell(fields, style)
        if late is not None:
            raise _refusal(late, _whole(longest_s), fields)
        return fields

    def answered(self, client: str | None, tokens: int) -> None:
        """An answer had so many tokens."""
        for bucket in self._of(client):
            if bucket.kind == "output_tokens":
                bucket.owe(tokens, self._clock())

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


def _refusal(late: _Bucket, after_s: int, fields: Fields) -> ApiError:
    words = late.kind.replace("_", " ")
    return ApiError(
        429,
        f"this key may use {late.limit} {words} a minute; try again in {after_s} s "
        f"({late.kind}_per_minute in router.shares)",
        {**{name.decode(): value.decode() for name, value in fields}, "Retry-After": str(after_s)},
    )


def _whole(seconds: float) -> int:
    return max(1, math.ceil(seconds))
