"""The router's own keys of a prompt's blocks.

The key of a block is a 64-bit hash of its token ids and extra keys, seeded with the key of the
block before it. So equal keys mean equal prefixes, whatever hash an engine uses and whatever its
PYTHONHASHSEED is. Two block sizes never share a key. A collision costs a worse choice of engine,
never a wrong token: engines match by their own hashes.

A compiled module works the keys out: native_keys.c, which says why. Without it Python does, slower
and by another hash; the router says so in its log. Keys never leave their process.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import xxhash

BYTES_EACH = 4
"""Of one token id."""
_CHUNK = 512  # blocks whose keys are worked out at a time

_encode = msgspec.msgpack.Encoder().encode


def _packed(ids: Sequence[int], /) -> bytes:
    return array("I", ids).tobytes()


def _chain(data: bytes, width: int, parent: int, extra: list[bytes] | None = None, /) -> list[int]:
    """The keys of blocks of `width` bytes each. `parent`: the key of the block before them, or
    `root`. `extra`: `extra_bytes` of each block."""
    # One call for all of them; slices would take as long as the hashing.
    blocks: Sequence[bytes] = struct.unpack(f"{width}s" * (len(data) // width), data)
    if extra is not None:
        blocks = [block + more for block, more in zip(blocks, extra, strict=True)]
    next_key = xxhash.xxh3_64_intdigest
    return [parent := next_key(block, parent) for block in blocks]


try:
    from disagg.router.caches import native_keys
except ImportError:
    is_compiled = False
    _pack, chain = _packed, _chain
else:
    is_compiled = True
    _pack, chain = native_keys.packed, native_keys.chain


@lru_cache
def root(block_size: int) -> int:
    """What stands for the parent of the first block. `block_size`: in tokens."""
    return xxhash.xxh3_64_intdigest(b"blocks of %d" % block_size)


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit numbers. Raises ValueError if they are none."""
    try:
        return _pack(ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(str(error)) from None


def extra_bytes(adapter: str | None, others: Sequence[Any] = ()) -> bytes:
    """What of a block counts besides its tokens: the LoRA adapter's name, and what else vLLM
    publishes: the identity of media with their offset, the cache salt. Raises TypeError for what
    msgpack does not know."""
    return _encode((adapter, *others)) if adapter is not None or others else b""


class PromptBlocks:
    """The blocks of one prompt. `tokens`: how many it has."""

    def __init__(self, ids: Sequence[int], salt: str | None = None) -> None:
        """`salt`: the request's `cache_salt`. Raises ValueError if these are no token ids."""
        self.tokens = len(ids)
        self._data, self._salt = packed(ids), salt
        self._keys: dict[tuple[int, str | None], list[int]] = {}

    def ids(self, count: int) -> list[int]:
        """The first `count` token ids."""
        return array("I", self._data[: count * BYTES_EACH]).tolist()

    def count(self, size: int) -> int:
        """How many blocks of so many tokens an engine may find in its cache. It always computes
        the last token."""
        return max(0, self.tokens - 1) // size

    def keys(self, size: int, adapter: str | None = None) -> Iterator[Sequence[int]]:
        """The keys of these blocks, some at a time, as far as they are asked for.

        `adapter`: the name of the LoRA adapter that reads the prompt.
        """
        known = self._keys.setdefault((size, adapter), [])
        count = self.count(size)
        if known:
            yield known[:]
        while len(known) < count:
            first = len(known)
            self._add(known, min(count, first + _CHUNK), size, adapter)
            yield known[first:]

    def _add(self, known: list[int], upto: int, size: int, adapter: str | None) -> None:
        first, parent = len(known), known[-1] if known else root(size)
        width, extra = size * BYTES_EACH, None
        if adapter is not None or (self._salt and not first):
            extra = [extra_bytes(adapter)] * (upto - first)
            if self._salt and not first:
                extra[0] = extra_bytes(adapter, [self._salt])
        known += chain(self._data[first * width : upto * width], width, parent, extra)
