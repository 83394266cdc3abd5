"""A worker's paged KV cache as plain memory: which bytes belong to which part of which block.

Legend: B blocks, H KV heads, N tokens of a block, C bytes of one head and token (K and V).

A cache is a list of regions, one per layer, each a strided [B, H, N, C]; vLLM's six layouts
differ in strides alone. Both ends of a handoff have the same regions in the same order and the
same layout (the fingerprint ensures it); they may differ in H (tensor parallel size) and in N
(block size). It never interprets the bytes, and never allocates for host caches.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

# Merging neighbouring pieces pays only below this many bytes.
_LONG = 16 << 10
_ALONE = threading.Lock()
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class Region:
    """`memory`: uint8 [B, H, N, C], any strides, C contiguous. `dtype` in safetensors' terms.

    `whole`: a block's bytes have neither heads nor tokens, so it cannot be divided. `form`: says
    what they are, where the layout alone does not.
    """

    name: str
    memory: torch.Tensor
    dtype: str
    whole: bool = False
    form: str = ""

    @property
    def is_token_major(self) -> bool:
        """Whether a block holds its tokens one after the other, each with all its heads."""
        return self.memory.stride(2) > self.memory.stride(1) and self.memory.shape[1] > 1


@dataclass(frozen=True)
class Selection:
    """The part of a cache that one fetch covers, seen from one side.

    `count` units of `unit` tokens each, starting at unit `first` of `block_ids[0]`; heads
    [heads[0], heads[1]) and regions [regions[0], regions[1]), all if None. Wire order: region by
    region, unit by unit, and within a unit in the layout's order of heads and tokens.
    """

    block_ids: Sequence[int]
    unit: int
    first: int
    count: int
    heads: tuple[int, int] | None = None
    regions: tuple[int, int] | None = None


class Runs(NamedTuple):
    """Contiguous pieces in wire order: int64 [n] offsets from the region's start, and lengths."""

    offsets: Ints
    lengths: Ints


class Alike(NamedTuple):
    """Pieces of one length in each of some regions: int64 [n] offsets from a region's start."""

    begins: Ints
    length: int


class BlocksGoneError(ValueError):
    """The lease's request had freed some of the blocks while it ran."""


class BlockCache:
    """All regions of one worker rank."""

    def __init__(self, regions: Sequence[Region]) -> None:
        if not regions:
            raise ValueError("a block cache needs at least one region")
        shapes = {(len(r.memory), r.memory.shape[2]) for r in regions}
        if len(shapes) != 1:
            raise ValueError(f"regions disagree on blocks and block size: {sorted(shapes)}")
        self.regions = tuple(regions)
        self.num_blocks, self.block_size = shapes.pop()
        self._region_bytes = [r.memory[0].numel() for r in regions]
        self.block_bytes = sum(self._region_bytes)
        self._contents = tuple(r.memory.shape[3] for r in regions)
        heads = {r.memory.shape[1] for r in regions}
        self._whole = any(region.whole for region in regions)
        self.heads = heads.pop() if len(heads) == 1 and not self._whole else None
        self._host = [_host_view(region) for region in regions]
        # For each region the first one of equal geometry; usually all layers are equal.
        geometries = [(*r.memory.shape, *r.memory.stride()) for r in regions]
        self._like = [geometries.index(geometry) for geometry in geometries]
        self._unbroken = len(set(geometries)) == 1 and _is_unbroken(regions[0])

    @property
    def on_host(self) -> bool:
        """Whether the blocks are host memory."""
        return self._host[0] is not None

    def host_memory(self) -> list[Bytes]:
        """The memory of each region, from its first byte to its last; empty on a device."""
        return [memory for memory in self._host if memory is not None]

    # ---- selecting -------------------------------------------------------------------------

    def whole(self, block_ids: Sequence[int]) -> Selection:
        """A selection of these whole blocks."""
        return Selection(block_ids, self.block_size, 0, len(block_ids))

    def within(
        self,
        block_ids: Sequence[int],
        unit: int,
        spans: Sequence[tuple[int, int]],
        heads: tuple[int, int] | None = None,
        regions: tuple[int, int] | None = None,
    ) -> Selection:
        """Units [start, stop) of each span, by position in `block_ids`, ascending.

        Raises `BlocksGoneError` for negative block ids, `ValueError` for units outside.
        """
        per_block = self._per_block(unit)
        units = len(block_ids) * per_block
        chosen: list[int] = []
        for number, (start, stop) in enumerate(spans):
            begin = spans[number - 1][1] if number else 0
            if not begin <= start <= stop <= units:
                raise ValueError(f"units {start}..{stop} of {begin}..{units}")
            if (number and start % per_block) or (number < len(spans) - 1 and stop % per_block):
                raise ValueError(f"spans meet inside of a block, at {start}..{stop}")
            chosen += block_ids[start // per_block : -(-stop // per_block)]
        first = spans[0][0] % per_block if spans else 0
        count = sum(stop - start for start, stop in spans)
        if min(chosen, default=0) < 0:
            raise BlocksGoneError("a block was freed before the lease began")
        selection = Selection(chosen, unit, first, count, heads, regions)
        self.check(selection)
        return selection

    def check(self, selection: Selection) -> None:
        """Raise `ValueError` unless all of the selection lies inside this cache."""
        ids, unit = selection.block_ids, selection.unit
        if ids and not (min(ids) >= 0 and max(ids) < self.num_blocks):
            raise ValueError(f"block ids outside 0..{self.num_blocks - 1}")
        units = len(ids) * self._per_block(unit)
        if selection.first < 0 or selection.count < 0 or selection.first + selection.count > units:
            raise ValueError(f"{selection.count} units from {selection.first} on, of {units}")
        if selection.heads is not None:
            first, last = selection.heads
            if self.heads is None or not 0 <= first < last <= self.heads:
                raise ValueError(f"heads {first}..{last} of {self.heads}")
        if selection.regions is not None:
            first, last = selection.regions
            if not 0 <= first < last <= len(self.regions):
                raise ValueError(f"regions {first}..{last} of {len(self.regions)}")

    def _per_block(self, unit: int) -> int:
        if unit < 1 or self.block_size % unit:
            raise ValueError(f"units of {unit} tokens do not divide blocks of {self.block_size}")
        if self._whole and unit != self.block_size:
            raise ValueError(f"units of {unit} tokens of blocks that move whole")
        return self.block_size // unit

    def covered(self, selection: Selection) -> range:
        """The indices of the regions that a selection covers."""
        return range(*(selection.regions or (0, len(self.regions))))

    def contents(self, selection: Selection) -> tuple[int, ...]:
        """Bytes of one head and token in each covered region."""
        return self._contents[slice(*(selection.regions or (None,)))]

    def num_bytes(self, selection: Selection) -> int:
        """Bytes of a selection over all its regions."""
        bytes_ = sum(self._region_bytes[i] for i in self.covered(selection))
        share = selection.count * bytes_ * selection.unit // self.block_size
        if selection.heads is None:
            return share
        assert self.heads is not None
        return share * (selection.heads[1] - selection.heads[0]) // self.heads

    def shape(self, index: int, selection: Selection) -> list[int]:
        """The selection of region `index` as an array in wire order: units, then a unit's axes."""
        region = self.regions[index]
        content = region.memory.shape[3] // ITEM_BYTES[region.dtype]
        first, last = self._heads(index, selection)
        inner = [last - first, selection.unit]
        # With one head or one token both orders are the same bytes. They get one shape, whatever
        # the layout: a rank with a single head cannot know its peer's order.
        if region.is_token_major and min(inner) > 1:
            inner.reverse()
        return [selection.count, *inner, content]

    def runs(self, index: int, selection: Selection) -> Runs:
        """The contiguous pieces of region `index`, neighbours merged."""
        region = self.regions[index]
        block, head, token, _ = region.memory.stride()
        per_block = self.block_size // selection.unit
        units = np.arange(selection.first, selection.first + selection.count)
        ids = np.asarray(selection.block_ids, dtype=np.int64)
        starts = ids[units // per_block] * block + units % per_block * (selection.unit * token)
        first, last = self._heads(index, selection)
        axes = [(last - first, head), (selection.unit, token)]
        if region.is_token_major:
            axes.reverse()
        length = region.memory.shape[3]
        while axes and (axes[-1][1] == length or axes[-1][0] == 1):
            length *= axes.pop()[0]
        offsets = starts + first * head
        for size, stride in axes:
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        return _merged(offsets, length)

    def all_runs(self, selection: Selection) -> list[Runs]:
        """`runs` of every covered region; the same object for regions of one geometry."""
        like = [self._like[index] for index in self.covered(selection)]
        found = {index: self.runs(index, selection) for index in set(like)}
        return [found[index] for index in like]

    def alike(self, selection: Selection) -> Alike | None:
        """`all_runs` where each whole block is one long piece, neighbours not merged; else None."""
        length = self._region_bytes[0]
        whole = selection.unit == self.block_size and selection.heads is None
        if not whole or not self._unbroken or length < _LONG:
            return None
        ids = np.asarray(selection.block_ids, np.int64)
        ids = ids[selection.first : selection.first + selection.count]
        return Alike(ids * self.regions[0].memory.stride(0), length)

    def head_count(self, index: int, selection: Selection) -> int:
        """Heads of region `index` that a selection covers."""
        first, last = self._heads(index, selection)
        return last - first

    def row_bytes(self, index: int, selection: Selection) -> int:
        """Bytes of one unit of region `index`."""
        content = self.regions[index].memory.shape[3]
        return self.head_count(index, selection) * selection.unit * content

    def _heads(self, index: int, selection: Selection) -> tuple[int, int]:
        return selection.heads or (0, self.regions[index].memory.shape[1])

    # ---- bytes -----------------------------------------------------------------------------

    def views(self, selection: Selection) -> Generator[list[Bytes], None, None]:
        """A selection's memory in wire order, region by region. Host caches only."""
        covered, every = self.covered(selection), self.all_runs(selection)
        for index, runs in zip(covered, every, strict=True):
            yield self.cut(index, runs)

    def cut(self, index: int, runs: Runs) -> list[Bytes]:
        """These runs of region `index`. Host caches only."""
        host = self._host[index]
        assert host is not None
        ends = runs.offsets + runs.lengths
        return [host[at:end] for at, end in zip(runs.offsets.tolist(), ends.tolist(), strict=True)]


def parts(data: Bytes, like: Sequence[Bytes]) -> Iterator[Bytes]:
    """`data` in pieces of these lengths."""
    at = 0
    for piece in like:
        yield data[at : at + len(piece)]
        at += len(piece)


def copy_all(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    """Copy the second of each pair to the first, in one call that releases the GIL.

    With one call per copy, this thread waits for the GIL after each one if another thread runs
    Python code: 500 copies took 200 ms instead of 40 ms.
    """
    import torch

    if pairs:
        to, data = zip(*pairs, strict=True)
        torch._foreach_copy_(
            [torch.from_numpy(one) for one in to], [torch.from_numpy(one) for one in data]
        )


def copy_alone() -> None:
    """Let this thread's copies run without torch's helper threads from now on.

    Torch gives each copying thread as many helpers as the model has cores. They take the cores from
    the model, and wait for each other.
    """
    import torch

    with _ALONE:
        # It also sets the default of new threads, but does not change existing ones; restore it.
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(usual,))
        restore.start()
        restore.join()


def _is_unbroken(region: Region) -> bool:
    """Whether each block is one contiguous piece."""
    length = 1
    axes = zip(region.memory.shape[1:], region.memory.stride()[1:], strict=True)
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if stride != length and size > 1:
            return False
        length *= size
    return True


def _merged(offsets: Ints, length: int) -> Runs:
    """Pieces of one length -> runs: consecutive pieces that are adjacent in memory are merged."""
    if not len(offsets):
        return Runs(offsets, offsets)
    begins = np.flatnonzero(np.diff(offsets, prepend=offsets[0] - 2 * length) != length)
    pieces = np.diff(begins, append=len(offsets))
    return Runs(offsets[begins], pieces * length)


def _host_view(region: Region) -> Bytes | None:
    """The bytes from the region's first to its last, flat."""
    memory = region.memory
    if memory.device.type != "cpu":
        return None
    extent = 1 + sum((n - 1) * s for n, s in zip(memory.shape, memory.stride(), strict=True))
    view: Bytes = memory.as_strided((extent,), (1,)).numpy()
    return view
