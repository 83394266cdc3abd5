"""Caches of known content, in any of vLLM's layouts, and what a fetch between two must do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from disagg.transport.blocks import BlockCache, Region

POISON, SCRIBBLE = 0xA5, 0x3C


@dataclass(frozen=True)
class Shape:
    """One rank's cache. `layout`: the order of layers L, blocks B, heads H, tokens N, content C.

    `first`: the number of its first layer, if it is not the first pipeline stage.
    """

    blocks: int = 24
    heads: int = 2
    tokens: int = 8
    content: int = 64
    layers: int = 3
    layout: str = "LBHNC"
    first: int = 0


PLAIN = Shape()


def make(shape: Shape, seed: int | None, device: str = "cpu") -> BlockCache:
    """A cache that holds the random bytes of this seed, or poison."""
    flat = torch.from_numpy(content(num_bytes(shape), seed)).to(device)
    return BlockCache(regions(shape, flat))


def regions(shape: Shape, flat: torch.Tensor) -> list[Region]:
    """These bytes as the layers of such a cache."""
    sizes = dict(zip("LBHNC", _sizes(shape), strict=True))
    whole = flat.view([sizes[axis] for axis in shape.layout])
    by_layer = whole.permute([shape.layout.index(axis) for axis in "LBHNC"])
    return [Region(f"layer.{shape.first + i}", by_layer[i], "U8") for i in range(shape.layers)]


def tokens(cache: BlockCache, index: int, block_ids: Sequence[int]) -> torch.Tensor:
    """The prompt that lies in these blocks of one layer: [tokens, heads, content], in host memory.

    Plain indexing: shares no code with what is tested.
    """
    memory = cache.regions[index].memory[list(block_ids)].cpu()
    return memory.transpose(1, 2).reshape(-1, memory.shape[1], memory.shape[3])


def prompts(cache: BlockCache, block_ids: Sequence[int]) -> list[np.ndarray]:
    """The same of all layers, as numpy arrays."""
    return [tokens(cache, index, block_ids).numpy() for index in range(len(cache.regions))]


def same(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> bool:
    """Whether two prompts agree in every byte of every layer."""
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def agree(ours: BlockCache, mine: Sequence[int], theirs: BlockCache, its: Sequence[int]) -> bool:
    """The same of blocks in two caches; one layer at a time, because there can be gigabytes."""
    return len(ours.regions) == len(theirs.regions) and all(
        tokens(ours, index, mine).equal(tokens(theirs, index, its))
        for index in range(len(ours.regions))
    )


def untouched(cache: BlockCache, but: Sequence[int]) -> bool:
    """Whether every block but these is still poison."""
    rest = sorted(set(range(cache.num_blocks)) - set(but))
    return all(bool((region.memory[rest] == POISON).all()) for region in cache.regions)


def fill(cache: BlockCache, block_ids: Sequence[int], value: int) -> None:
    """What an engine does to blocks it got back: writes other things into them. They are there
    when it returns."""
    for region in cache.regions:
        region.memory[list(block_ids)] = value
    if cache.regions[0].memory.is_cuda:
        torch.cuda.synchronize()


def num_bytes(shape: Shape) -> int:
    """Of the whole cache."""
    return math.prod(_sizes(shape))


def _sizes(shape: Shape) -> tuple[int, ...]:
    return shape.layers, shape.blocks, shape.heads, shape.tokens, shape.content


def content(size: int, seed: int | None) -> np.ndarray:
    """The random bytes of this seed, or poison."""
    if seed is None:
        return np.full(size, POISON, np.uint8)
    words: np.ndarray = np.random.SFC64(seed).random_raw(size // 8 + 1)
    return words.view(np.uint8)[:size]
