"""The router's own keys of a prompt's blocks.

The key of a block is the 64-bit XXH3 of its token ids and extra keys, with the key of the block
before it as the seed. So equal keys mean equal prefixes, whatever hash an engine uses and whatever
its PYTHONHASHSEED is. Two block sizes never share a key. A collision costs a worse choice of
engine, never a wrong token: engines match by their own hashes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import xxhash

BYTES_EACH = 4
"""Of one token id."""
_CHUNK = 128  # blocks whose keys are worked out at a time

next_key = xxhash.xxh3_64_intdigest
"""`next_key(token ids as `packed` and then `extra_bytes`, key of the block before it or `root`)`"""
_encode = msgspec.msgpack.Encoder().encode


def root(block_size: int) -> int:
    """What stands for the parent of the first block. `block_size`: in tokens."""
    return xxhash.xxh3_64_intdigest(b"blocks of %d" % block_size)


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit numbers. Raises ValueError if they are none."""
    try:
        return array("I", ids).tobytes()
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
        count, width = upto - first, size * BYTES_EACH
        data = self._data[first * width : upto * width]
        # One call for all of them; slices would take as long as the hashing.
        blocks: Sequence[bytes] = struct.unpack(f"{width}s" * count, data)
        if adapter is not None or (self._salt and not first):
            extra = extra_bytes(adapter)
            blocks = [block + extra for block in blocks]
            if self._salt and not first:
                blocks[0] = data[:width] + extra_bytes(adapter, [self._salt])
        known += [parent := next_key(block, parent) for block in blocks]
