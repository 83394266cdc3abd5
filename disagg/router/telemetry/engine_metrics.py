"""Reads the metrics of engines. An engine may be old, broken or hostile, so its text is not
believed: only well-formed samples of known families are used, with names, labels and numbers that
cannot break the router's own exposition.

Engines are asked at most once a second, however many clients ask the router. Only an operator may
ask for the figures of the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

import aiohttp

from disagg.router.topology import EngineEndpoint

T = TypeVar("T")
SCRAPE_S = 2.0
FRESH_S = 1.0
_LONGEST = 16 << 20  # bytes of one engine's metrics
_MOST_SERIES = 4096  # of one engine
OURS, OF_ROUTER = "disagg_", ("disagg_router_", "disagg_build_")
# The families of vLLM that are shown. An engine has thousands of lines.
OF_VLLM = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:inter_token_latency_seconds",
    }
)
_NAME = r"(?:disagg_[a-z0-9_]{1,80}|vllm:[a-z0-9_]{1,80})"
_LABEL = r'[a-z][a-z0-9_]{0,40}="[A-Za-z0-9_./:@+-]{0,128}"'
_NUMBER = r"[+-]?(?:[0-9][0-9.]{0,40}(?:e[+-]?[0-9]{1,3})?|Inf|NaN)"
_SAMPLE = re.compile(
    rf"({_NAME})(?:\{{((?:{_LABEL}(?:,{_LABEL}){{0,15}},?)?)\}})? ({_NUMBER})", re.ASCII
)
_TYPE = re.compile(rf"# TYPE ({_NAME}) (?:counter|gauge|histogram|summary|untyped)", re.ASCII)
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count|created)$")
_BEGINNINGS = (OURS, "vllm:", "# TYPE disagg_", "# TYPE vllm:")


class Cached(Generic[T]):
    """A value that is made at most once a second, and anew if its key changes. Callers that come
    meanwhile wait for the one that makes it."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._value: T | None = None
        self._made_at = float("-inf")
        self._made_for: object = None

    async def get(self, key: object = None, *, fresh: bool = False) -> T:
        """The value. `fresh`: made after this call."""
        async with self._lock:
            is_old = fresh or time.monotonic() - self._made_at > FRESH_S
            if self._value is None or is_old or self._made_for != key:
                self._value = await self._make()
                self._made_at, self._made_for = time.monotonic(), key
            return self._value


async def scrape(client: aiohttp.ClientSession, engine: EngineEndpoint) -> str | None:
    """The usable lines of the engine's metrics; None if it does not answer in time."""
    timeout = aiohttp.ClientTimeout(total=SCRAPE_S)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
        async with client.get(f"{engine.url}/metrics", timeout=timeout) as answer:
            text = await read_text(answer)
            return None if text is None else "\n".join(usable_lines(text)) + "\n"
    return None


async def read_text(answer: aiohttp.ClientResponse) -> str | None:
    """An engine's metrics as text; None if it refuses, or sends more than 16 MiB."""
    if answer.status != 200:
        return None
    pieces, size = list[bytes](), 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > _LONGEST:
            return None
    return b"".join(pieces).decode(errors="replace")


def usable_lines(text: str) -> Iterator[str]:
    """The samples of our families and of `OF_VLLM`, and their types. An engine's help texts are
    left out, like every line that is not well-formed."""
    count = 0
    for line in text.split("\n"):
        if not line.startswith(_BEGINNINGS):
            continue
        match = _SAMPLE.fullmatch(line) or _TYPE.fullmatch(line)
        if match is None or not _is_shown(match[1]):
            continue
        count += 1
        if count > _MOST_SERIES:
            return
        yield line


def samples(
    text: str, prefixes: str | Sequence[str]
) -> Iterator[tuple[str, dict[str, str], float]]:
    """The well-formed samples whose names begin with a prefix. Other lines are not parsed."""
    begin = prefixes if isinstance(prefixes, str) else tuple(prefixes)
    for line in text.split("\n"):
        match = _SAMPLE.fullmatch(line) if line.startswith(begin) else None
        if match is None:
            continue
        with contextlib.suppress(ValueError):
            pairs = (pair.partition("=") for pair in (match[2] or "").split(",") if pair)
            labels = {key: quoted.strip('"') for key, _, quoted in pairs}
            yield match[1], labels, float(match[3])


def _is_shown(name: str) -> bool:
    if name.startswith(OURS):
        return not name.startswith(OF_ROUTER)  # the router's own: an engine must not add to them
    return name in OF_VLLM or _SUFFIX.sub("", name) in OF_VLLM


class EngineTexts:
    """The usable lines of all engines' metrics, at most a second old."""

    def __init__(
        self, client: aiohttp.ClientSession, engines: Callable[[], Sequence[EngineEndpoint]]
    ) -> None:
        self._client, self._engines = client, engines
        self._cached = Cached(self._scrape)

    async def get(self, *, fresh: bool = False) -> Sequence[tuple[EngineEndpoint, str | None]]:
        """One pair for each engine; None for one that does not answer. `fresh`: see `Cached`."""
        return await self._cached.get(self._engines(), fresh=fresh)

    async def _scrape(self) -> Sequence[tuple[EngineEndpoint, str | None]]:
        engines = self._engines()
        texts = await asyncio.gather(*(scrape(self._client, engine) for engine in engines))
        return list(zip(engines, texts, strict=True))
