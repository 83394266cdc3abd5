"""Reads the metrics of engines. An engine may be old, broken or hostile, so its text is not
believed: only well-formed samples of known families are used, with names, labels and numbers that
cannot break the router's own exposition. What is left out is counted and logged; it never touches
the figures of other engines.

Engines are asked at most once a second, however many clients ask the router. Only an operator may
ask for the figures of the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

import aiohttp

from disagg.router.topology import EngineEndpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")
Problem: TypeAlias = Literal["status", "content_type", "size", "encoding", "line", "contradiction"]
"""Why an engine's metrics are left out, or a part of them: it refuses; it sends no text of metrics,
more than 16 MiB or 4,096 series, or no UTF-8; a line is malformed; lines contradict each other."""
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
_BEGUN = re.compile(rf"(?:# TYPE )?({_NAME})", re.ASCII)
_LABEL_NAME = re.compile(r'(?:^|,)([a-z0-9_]+)="')
_CONTENT_TYPES = frozenset(
    ["text/plain", "application/openmetrics-text", "application/octet-stream"]
)
# Of the lines that are looked at. Most of an engine's lines are of other families.
_BEGINNINGS = tuple(f"{before}{name}" for before in ("", "# TYPE ") for name in (OURS, *OF_VLLM))


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


class OddMetrics(Exception):
    """None of an engine's metrics can be used."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem)


async def scrape(
    client: aiohttp.ClientSession, engine: EngineEndpoint, problems: set[Problem]
) -> str | None:
    """The usable lines of the engine's metrics; None if there are none, or if it does not answer in
    time. Adds to `problems`."""
    timeout, text = aiohttp.ClientTimeout(total=SCRAPE_S), None
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
        async with client.get(
            f"{engine.url}/metrics", timeout=timeout, headers=engine.headers
        ) as answer:
            try:
                text = await read_text(answer)
            except OddMetrics as error:
                problems.add(error.problem)
    return None if text is None else "\n".join(usable_lines(text, problems)) + "\n"


async def read_text(answer: aiohttp.ClientResponse) -> str:
    """An engine's metrics as text. Raises `OddMetrics` if they cannot be."""
    if answer.status != 200:
        raise OddMetrics("status")
    if answer.content_type not in _CONTENT_TYPES:
        raise OddMetrics("content_type")
    pieces, size = list[bytes](), 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > _LONGEST:
            raise OddMetrics("size")
    try:
        text = b"".join(pieces).decode()
    except UnicodeDecodeError as error:
        raise OddMetrics("encoding") from error
    if text.lstrip().startswith(("<", "{", "[")):
        raise OddMetrics("content_type")
    return text


def usable_lines(text: str, problems: set[Problem] | None = None) -> Iterator[str]:
    """The samples of our families and of `OF_VLLM`, and their types. An engine's help texts are
    left out, like every line that is not well-formed, a sample that was there before, and a second
    type. Adds to `problems`."""
    seen: dict[str, str] = {}  # the samples and types so far
    problems = set() if problems is None else problems
    for line in text.split("\n"):
        if not line.startswith(_BEGINNINGS):
            continue
        sample = _SAMPLE.fullmatch(line)
        match = sample or _TYPE.fullmatch(line)
        if match is None:
            begun = _BEGUN.match(line)
            if begun is not None and _is_shown(begun[1]):
                problems.add("line")
            continue
        if not _is_shown(match[1]):
            continue
        if sample is not None and not _has_value(sample):
            problems.add("line")
            continue
        key = line.rpartition(" ")[0].replace("{}", "").replace(",}", "}")
        if key in seen:
            if sample is not None or seen[key] != line:
                problems.add("contradiction")
            continue
        if len(seen) == _MOST_SERIES:
            problems.add("size")
            return
        seen[key] = line
        yield line


def _has_value(sample: re.Match[str]) -> bool:
    """Whether its number is one, and no label is there twice."""
    names = _LABEL_NAME.findall(sample[2] or "")
    try:
        float(sample[3])
    except ValueError:
        return False
    return len(set(names)) == len(names)


def samples(
    text: str, prefixes: str | Sequence[str]
) -> Iterator[tuple[str, dict[str, str], float]]:
    """The well-formed samples with a finite number whose names begin with a prefix. Other lines
    are not parsed."""
    begin = prefixes if isinstance(prefixes, str) else tuple(prefixes)
    for line in text.split("\n"):
        match = _SAMPLE.fullmatch(line) if line.startswith(begin) else None
        if match is None:
            continue
        with contextlib.suppress(ValueError):
            pairs = (pair.partition("=") for pair in (match[2] or "").split(",") if pair)
            labels = {key: quoted.strip('"') for key, _, quoted in pairs}
            if math.isfinite(value := float(match[3])):
                yield match[1], labels, value


def _is_shown(name: str) -> bool:
    if name.startswith(OURS):
        return not name.startswith(OF_ROUTER)  # the router's own: an engine must not add to them
    return name in OF_VLLM or _SUFFIX.sub("", name) in OF_VLLM


class EngineTexts:
    """The usable lines of all engines' metrics, at most a second old. `count`: called with an
    engine's name and a `Problem`, once for each reading that has it."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        engines: Callable[[], Sequence[EngineEndpoint]],
        count: Callable[[str, Problem], None],
    ) -> None:
        self._client, self._engines, self._count = client, engines, count
        self._problems: dict[str, set[Problem]] = {}
        self._cached = Cached(self._scrape)
        self.read_at: dict[str, float] = {}
        """When each engine's metrics were read, by its name: monotonic seconds."""

    async def get(self, *, fresh: bool = False) -> Sequence[tuple[EngineEndpoint, str | None]]:
        """One pair for each engine; None for one that does not answer. `fresh`: see `Cached`."""
        return await self._cached.get(self._engines(), fresh=fresh)

    async def _scrape(self) -> Sequence[tuple[EngineEndpoint, str | None]]:
        engines = self._engines()
        problems: list[set[Problem]] = [set() for _ in engines]
        read_at: dict[str, float] = {}

        async def read(engine: EngineEndpoint, found: set[Problem]) -> str | None:
            text = await scrape(self._client, engine, found)
            read_at[engine.name] = time.monotonic()
            return text

        texts = await asyncio.gather(*map(read, engines, problems))
        self.read_at = read_at
        for engine, found in zip(engines, problems, strict=True):
            self._note(engine, found)
        return list(zip(engines, texts, strict=True))

    def _note(self, engine: EngineEndpoint, problems: set[Problem]) -> None:
        for problem in sorted(problems):
            self._count(engine.name, problem)
        if problems != self._problems.get(engine.name, set()):
            words = ", ".join(sorted(problems)) or "none"
            logger.warning("problems with the metrics of %s: %s", engine.name, words)
        self._problems[engine.name] = problems
