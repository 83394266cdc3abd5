"""The load of `disagg bench reuse`: a Mooncake trace, and how much of it an ideal cache would know.

One JSON object per line, as in FAST25-release/traces of github.com/kvcache-ai/Mooncake:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp`: milliseconds from the start. `hash_ids`: one for each 512 tokens of the prompt; the
last one may stand for fewer. An id stands for a block and all before it. The trace has no text, so
the token ids are made here, from the ids of the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from disagg.errors import ConfigError

BLOCK = 512
"""Tokens of a block."""
_EXAMPLE = '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}'
_MOST_TOKENS = 1 << 20  # of a prompt; a whole prompt may be one KV event


class TracedRequest(msgspec.Struct, frozen=True):
    """One line. `timestamp`: ms; the lengths: tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]

    @property
    def reusable(self) -> Sequence[int]:
        """The ids of the blocks that an engine may find in a cache. As in vLLM these are whole
        blocks only, and the last token of a prompt is always computed."""
        return self.hash_ids[: (self.input_length - 1) // BLOCK]

    @property
    def cacheable(self) -> Sequence[int]:
        """The ids of the blocks that an engine keeps: the whole ones."""
        return self.hash_ids[: self.input_length // BLOCK]

    def token_ids(self, first: int = 0, end: int | None = None) -> list[int]:
        """Made up: all tokens of a block are its id. `first`, `end`: of these blocks only."""
        ids: list[int] = []
        for number, block in enumerate(self.hash_ids[first:end], first):
            ids += [block] * min(BLOCK, self.input_length - number * BLOCK)
        return ids


_decode = msgspec.json.Decoder(TracedRequest).decode


def read(path: Path) -> list[TracedRequest]:
    """The requests of a file. Raises `ConfigError`, which names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
    found: list[TracedRequest] = []
    parents: dict[int, int | None] = {}
    for number, line in enumerate(lines, 1):
        try:
            request = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{number}: {error}; example of a line: {_EXAMPLE}") from error
        if problem := _problem(request, found, parents):
            raise ConfigError(f"{path}:{number}: {problem}")
        found.append(request)
    if not found:
        raise ConfigError(f"{path} is empty; example of a line: {_EXAMPLE}")
    return found


def _problem(
    request: TracedRequest, earlier: Sequence[TracedRequest], parents: dict[int, int | None]
) -> str | None:
    if earlier and request.timestamp < earlier[-1].timestamp:
        return "timestamp: earlier than the line before; sort the lines by it"
    count = -(-request.input_length // BLOCK)
    if len(request.hash_ids) != count:
        return f"hash_ids: {len(request.hash_ids)}, but the prompt has {count} blocks of {BLOCK}"
    parent: int | None = None
    for block in request.hash_ids:
        if parents.setdefault(block, parent) != parent:
            return f"hash_ids: {block} stood behind another block before: it must name a prefix"
        parent = block
    return None


@dataclass(frozen=True)
class Ideal:
    """What one endless cache does with a load, if it computes the requests one after another.

    `tokens`: of all prompts. `unavoidable`: tokens that are computed even so: each whole block once
    over the entire load, and the rest of each prompt behind its last whole block. `blocks`:
    different ones.
    """

    requests: int
    tokens: int
    unavoidable: int
    blocks: int

    @property
    def reuse(self) -> float:
        """Share of the prompts' tokens that need not be computed."""
        return 1 - self.unavoidable / self.tokens


class Cache(Protocol):
    """A prefix cache by the ids of blocks."""

    def depth(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first on, it holds."""

    def keep(self, blocks: Sequence[int]) -> object:
        """A prompt's blocks were read or stored just now."""


class EndlessCache:
    """A cache that loses nothing."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def depth(self, blocks: Sequence[int]) -> int:
        """See `Cache`."""
        return leading(blocks, self.known)

    def keep(self, blocks: Sequence[int]) -> None:
        """See `Cache`."""
        self.known.update(blocks)


def computed(load: Iterable[TracedRequest], cache: Cache) -> int:
    """Tokens that one engine with this cache would compute, one request after another."""
    total = 0
    for request in load:
        total += request.input_length - cache.depth(request.reusable) * BLOCK
        cache.keep(request.cacheable)
    return total


def ideal(load: Sequence[TracedRequest]) -> Ideal:
    """See `Ideal`. What answers leave in a cache does not count: the trace does not name it. The
    next prompt of a conversation has the answer in it, and it is computed there."""
    cache = EndlessCache()
    unavoidable = computed(load, cache)
    tokens = sum(request.input_length for request in load)
    return Ideal(len(load), tokens, unavoidable, len(cache.known))


def results_name(command: str, trace: Path) -> str:
    """Of what a command measured: each trace has results of its own."""
    words = re.sub(r"[^a-z0-9]+", "-", trace.stem.lower().removesuffix("_trace")).strip("-")
    return f"{command}-{words or 'trace'}"


def leading(blocks: Sequence[int], known: Container[int]) -> int:
    """How many of these, from the first on, are known."""
    for number, block in enumerate(blocks):
        if block not in known:
            return number
    return len(blocks)
