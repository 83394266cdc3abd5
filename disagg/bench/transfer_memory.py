"""What `bench transfer` moves: caches of known content, block ids, and the check afterwards.

Legend: L layers, T tokens of a block, H heads, C bytes of one head and token. Every process
fills its source from one seed, page by page, so that a reader knows each byte it must find at
any block size without having the source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from disagg.transport.blocks import BlockCache, Bytes, Region
from disagg.transport.host_memory import prefer_huge_pages

LAYERS = 8
_HEADS, _HEAD_BYTES = 8, 512  # K and V of a head of 128, bfloat16
PIECE = _HEADS * _HEAD_BYTES  # one token of one layer; block sizes are multiples
_RUN = 8  # blocks of a run
_MIX = np.uint64(0x9E3779B97F4A7C15)

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


class Memory:
    """One worker's cache memory: uint8 [L, bytes of a layer], host or device."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.flat = torch.zeros((LAYERS, num_bytes // LAYERS), dtype=torch.uint8, device=device)
        if device == "cpu":
            prefer_huge_pages([self.flat.view(-1).numpy()])  # as an engine's cache, for all ways

    def cache(self, block_bytes: int) -> BlockCache:
        """The memory as blocks of `block_bytes` in every layer."""
        shape = (self.flat.shape[1] // block_bytes, block_bytes // PIECE, _HEADS, _HEAD_BYTES)
        return BlockCache(
            [
                Region(f"layer.{i}", _bhnc(layer[: shape[0] * block_bytes].view(shape)), "BF16")
                for i, layer in enumerate(self.flat)
            ]
        )

    def fill(self) -> None:
        """Write the known content."""
        pages = np.arange(self.flat.shape[1] // PIECE)
        for index, layer in enumerate(self.flat):
            layer.copy_(torch.from_numpy(_content(index, pages).view(np.uint8).reshape(-1)))

    def wipe(self) -> None:
        """Zero everything, so that what an earlier way left cannot pass for moved."""
        self.flat.zero_()

    def wrong_blocks(self, block_bytes: int, here: Sequence[int], there: Sequence[int]) -> int:
        """How many blocks of `here` do not hold what the source has in `there`."""
        per_block, wrong = block_bytes // PIECE, 0
        for index, layer in enumerate(self.flat):
            blocks = layer[: len(layer) // block_bytes * block_bytes].view(-1, block_bytes)
            for mine, theirs in zip(here, there, strict=True):
                pages = theirs * per_block + np.arange(per_block)
                want = _content(index, pages).view(np.uint8).reshape(-1)
                wrong += not np.array_equal(blocks[mine].cpu().numpy(), want)
        return wrong


def _bhnc(memory: torch.Tensor) -> torch.Tensor:
    """[B, T, H, C] as the [B, H, T, C] that a region has; a block stays one piece."""
    return memory.transpose(1, 2)


def _content(layer: int, pages: Ints) -> Words:
    """[pages, words of a page]: random words, other ones in every page of every layer."""
    base = np.random.default_rng(7).integers(0, 2**64, PIECE // 8, dtype=np.uint64)
    numbers = (pages.astype(np.uint64) * np.uint64(LAYERS) + np.uint64(layer + 1)) * _MIX
    words: Words = base + numbers[:, None]
    return words


def scattered(total: int, count: int, generator: np.random.Generator) -> list[int]:
    """`count` of `total` block ids in random order, about half of them in runs of 8."""
    groups = np.arange(total // _RUN * _RUN).reshape(-1, _RUN)
    order = generator.permutation(len(groups))
    half = len(groups) // 2
    pieces = [groups[g] for g in order[:half]]
    pieces += [np.array([i]) for g in order[half:] for i in groups[g]]
    pieces += [np.array([i]) for i in range(total // _RUN * _RUN, total)]
    ids = np.concatenate([pieces[i] for i in generator.permutation(len(pieces))])
    return [int(i) for i in ids[:count]]


def offsets(ids: Sequence[int], block_bytes: int, layer_bytes: int) -> Ints:
    """[L * ids] where these blocks begin in the memory, layer by layer."""
    layers = np.arange(LAYERS)[:, None] * layer_bytes
    found: Ints = (layers + np.asarray(ids)[None, :] * block_bytes).reshape(-1)
    return found


def pieces(memory: Memory, at: Ints, block_bytes: int) -> list[Bytes]:
    """Host views of the blocks at these offsets."""
    flat = memory.flat.view(-1).numpy()
    return [flat[i : i + block_bytes] for i in at.tolist()]
