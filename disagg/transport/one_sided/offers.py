"""Shared by one-sided transports: the offer's origin, the cache's geometry, answers naming blocks.

The consumer learns from the offer how the producer's cache is laid out, and computes all addresses
itself. It must never accept an answer that names anything outside of that cache, as it reads the
named blocks without asking again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from disagg.errors import DataCorrupt, TransferError
from disagg.identity.process import boot_id, pid_namespace, start_time
from disagg.transport.blocks import BlockCache, Ints, Region, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.protocol import MAX_FRAME

logger = logging.getLogger(__name__)

_ANSWER_MARGIN = 1024

T = TypeVar("T")


class NamingSender:
    """The part of a `Sender` that moves nothing: its answer names the blocks."""

    _token: bytes

    def send(self, blocks: Selection, detail: bytes, deadline: Deadline) -> bytes:
        return encode(self._token, blocks)

    def finish(self, answer: bytes) -> None:
        """Nothing was staged."""


class Origin(msgspec.Struct, frozen=True):
    """The process that makes an offer. Its token is unique, even if its pid is reused."""

    boot: str
    pid_namespace: int
    pid: int
    started: int
    token: bytes

    @classmethod
    def here(cls, **fields: Any) -> Self:
        """An offer of this process, with the subclass's other fields."""
        pid = os.getpid()
        return cls(
            boot=boot_id(),
            pid_namespace=pid_namespace(),
            pid=pid,
            started=start_time(pid) or 0,
            **fields,
        )

    def is_alive(self) -> bool:
        """Whether the process still exists."""
        return start_time(self.pid) == self.started

    def is_on_this_host(self) -> bool:
        """Whether the process can be seen from here, if it exists."""
        return self.boot == boot_id() and self.pid_namespace == pid_namespace()

    def check_reachable(self) -> None:
        """Raise `TransferError` unless this process runs and can be seen from here."""
        if not self.is_on_this_host():
            raise TransferError("the producer is on another host or in another pid namespace")
        if not self.is_alive():
            raise TransferError("the producer's process is gone")


class Refusals:
    """Why offers cannot be opened here. Each reason is logged once."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._logged: set[str] = set()

    def opened(self, open_: Callable[[bytes], T], offer: bytes) -> T | None:
        """The opened offer; None where `open_` raises an error that an offer can cause."""
        try:
            return open_(offer)
        except (msgspec.DecodeError, TransferError) as error:
            reason = str(error)
        except (OSError, ValueError, LookupError, RuntimeError, OverflowError) as error:
            reason = f"the offer makes no sense here: {error}"
        if reason not in self._logged:
            self._logged.add(reason)
            logger.info("%s is not usable: %s", self._transport, reason)
        return None


# ---- how a cache is laid out -----------------------------------------------------------------


def geometry(cache: BlockCache) -> Ints:
    """int64 [regions, 7]: each region's shape [B, H, N, C] and strides of B, H and N."""
    rows = [(*region.memory.shape, *region.memory.stride()[:3]) for region in cache.regions]
    return np.array(rows, np.int64)


def unbacked(rows: Ints) -> BlockCache:
    """A cache of this geometry on meta tensors, which have shape and strides but no memory. So the
    same code locates blocks in our cache and in theirs. Raises `ValueError`."""
    import torch

    def region(shape: list[int], strides: list[int]) -> Region:
        if min(shape) < 1:
            raise ValueError(f"a region of shape {shape}")
        memory = torch.empty_strided(shape, (*strides, 1), dtype=torch.uint8, device="meta")
        return Region("", memory, "U8")

    return BlockCache([region(row[:4], row[4:]) for row in rows.tolist()])


def extent(region: Region) -> int:
    """Bytes from a region's first to its last, in integers that cannot overflow."""
    shape, strides = region.memory.shape, region.memory.stride()
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


# ---- answers ---------------------------------------------------------------------------------


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """A selection in the cache of the producer with this token. block_ids: int32 [blocks]."""

    token: bytes
    block_ids: bytes
    unit: int
    first: int
    count: int
    heads: tuple[int, int] | None
    regions: tuple[int, int] | None


_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


def encode(token: bytes, blocks: Selection) -> bytes:
    """An answer that names these blocks. Raises `TransferError` if they are too many."""
    ids = np.asarray(blocks.block_ids, np.int32).tobytes()
    if len(ids) > MAX_FRAME - _ANSWER_MARGIN:
        raise TransferError(f"{len(ids) // 4} blocks do not fit one answer", reason="too_large")
    return msgspec.msgpack.encode(
        _Answer(token, ids, blocks.unit, blocks.first, blocks.count, blocks.heads, blocks.regions)
    )


def decode(
    answer: bytes, token: bytes, theirs: BlockCache, ours: BlockCache, mine: Selection
) -> Selection:
    """The producer's blocks that an answer names. All of them lie in its cache `theirs`, and have
    the same bytes per head and token as our own selection.

    token: of the producer's offer. Raises `DataCorrupt`.
    """
    try:
        named = _decode_answer(answer)
        if named.token != token:
            raise ValueError("it is another producer's")
        ids = np.frombuffer(named.block_ids, np.int32).tolist()
        blocks = Selection(ids, named.unit, named.first, named.count, named.heads, named.regions)
        theirs.check(blocks)
    except (msgspec.DecodeError, ValueError) as error:
        raise DataCorrupt(f"answer does not name blocks on offer: {error}") from error
    compare(ours, mine, theirs, blocks)
    return blocks


def compare(ours: BlockCache, mine: Selection, cache: BlockCache, theirs: Selection) -> None:
    """Raise `DataCorrupt` unless both selections have the same bytes per head and token."""
    if ours.contents(mine) != cache.contents(theirs):
        raise DataCorrupt("the two sides do not mean the same selection", reason="range")
