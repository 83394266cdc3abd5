"""The memory of `bench transfer`: caches of known content, block ids, and the check afterwards.

Legend: L layers, T tokens of a block, H heads, C bytes of one head and token. Every process fills
its source from one seed, page by page. A reader therefore knows each expected byte at any block
size, without the source. The content is computed where the memory is: of 8 GB on a device nothing
goes through the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from disagg.transport.blocks import BlockCache, Bytes, Region
from disagg.transport.host.huge_pages import prefer_huge_pages

LAYERS = 8  # the default
_HEADS, _HEAD_BYTES = 8, 512  # K and V of a head of 128, bfloat16
PIECE = _HEADS * _HEAD_BYTES  # one token of one layer; block sizes are multiples
_RUN = 8  # blocks of a run
_MIX = 0x9E3779B97F4A7C15 - 2**64
_AT_ONCE = 64 << 20  # bytes computed or compared at once
_SOME = _AT_ONCE // PIECE

Ints = npt.NDArray[np.int64]


class BenchMemory:
    """One worker's cache memory: uint8 [L, bytes of a layer], host or device."""

    def __init__(self, num_bytes: int, device: str, layers: int = LAYERS) -> None:
        self.flat = torch.empty((layers, num_bytes // layers), dtype=torch.uint8, device=device)
        if device == "cpu":
            # As an engine's cache, for all ways. Nothing has written to it yet.
            prefer_huge_pages([self.flat.view(-1).numpy()])
        self.flat.zero_()

    def cache(self, block_bytes: int) -> BlockCache:
        """The memory as blocks of `block_bytes` in every layer."""
        return BlockCache(self.regions(block_bytes))

    def regions(self, block_bytes: int) -> list[Region]:
        """The layers of that cache."""
        shape = (self.flat.shape[1] // block_bytes, block_bytes // PIECE, _HEADS, _HEAD_BYTES)
        return [
            Region(f"layer.{i}", _bhnc(layer[: shape[0] * block_bytes].view(shape)), "BF16")
            for i, layer in enumerate(self.flat)
        ]

    def fill(self) -> None:
        """Write the known content."""
        for index, layer in enumerate(self.flat):
            for pages in self._pages(layer.numel()):
                at = int(pages[0]) * PIECE
                layer[at : at + len(pages) * PIECE] = self._content(index, pages).view(-1)
        self._settle()

    def wipe(self) -> None:
        """Zero everything, so that bytes of an earlier way do not pass the check."""
        self.flat.zero_()
        self._settle()

    def wrong_blocks(self, block_bytes: int, here: Sequence[int], there: Sequence[int]) -> int:
        """How many blocks of `here` differ from the source's blocks `there`."""
        per_block, wrong = block_bytes // PIECE, 0
        device, some = self.flat.device, max(1, _AT_ONCE // block_bytes)
        inside = torch.arange(per_block, device=device)
        for index, layer in enumerate(self.flat):
            blocks = layer[: len(layer) // block_bytes * block_bytes].view(-1, block_bytes)
            for at in range(0, len(here), some):
                mine = blocks[torch.tensor(here[at : at + some], device=device)]
                first = torch.tensor(there[at : at + some], device=device) * per_block
                want = self._content(index, (first[:, None] + inside).view(-1))
                wrong += _differ(mine, want.view(-1, block_bytes))
        return wrong

    def wrong_pages(self, num_bytes: int) -> int:
        """How many pages of the first `num_bytes` differ from the source's."""
        wrong = 0
        for index, layer in enumerate(self.flat):
            here = max(0, min(len(layer), num_bytes - index * len(layer)))
            for pages in self._pages(here):
                at = int(pages[0]) * PIECE
                mine = layer[at : at + len(pages) * PIECE].view(-1, PIECE)
                wrong += _differ(mine, self._content(index, pages))
        return wrong

    def _pages(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """The numbers of a layer's first pages, some at a time."""
        pages = torch.arange(num_bytes // PIECE, device=self.flat.device)
        return (pages[at : at + _SOME] for at in range(0, len(pages), _SOME))

    def _content(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """[pages, bytes of a page]: random words, different in every page of every layer."""
        words = np.random.default_rng(7).integers(-(2**63), 2**63, PIECE // 8, dtype=np.int64)
        numbers = (pages * len(self.flat) + layer + 1) * _MIX  # wraps around
        return (torch.from_numpy(words).to(pages.device) + numbers[:, None]).view(torch.uint8)

    def _settle(self) -> None:
        # The transports' own streams do not wait for torch's.
        if self.flat.is_cuda:
            torch.cuda.synchronize(self.flat.device)


def _differ(mine: torch.Tensor, want: torch.Tensor) -> int:
    """How many rows differ."""
    return int((mine.view(torch.int64) != want.view(torch.int64)).any(1).sum())


def _bhnc(memory: torch.Tensor) -> torch.Tensor:
    """[B, T, H, C] as [B, H, T, C], the shape of a region; a block stays contiguous."""
    return memory.transpose(1, 2)


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


def offsets(ids: Sequence[int], block_bytes: int, layer_bytes: int, layers: int = LAYERS) -> Ints:
    """[L * ids]: the offsets of these blocks in the memory, layer by layer."""
    starts = np.arange(layers)[:, None] * layer_bytes
    found: Ints = (starts + np.asarray(ids)[None, :] * block_bytes).reshape(-1)
    return found


def pieces(memory: BenchMemory, at: Ints, block_bytes: int) -> list[Bytes]:
    """Host views of the blocks at these offsets."""
    flat = memory.flat.view(-1).numpy()
    return [flat[i : i + block_bytes] for i in at.tolist()]
