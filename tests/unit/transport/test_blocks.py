"""Which bytes belong to which part of which block, against loops that nobody could get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from disagg.transport.blocks import BlockCache, Region, Selection, copy_alone, parts

# vLLM's six: which axis is outermost. L layers, B blocks, H heads, N tokens, C content.
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
SIZES = {"L": 3, "B": 7, "H": 4, "N": 8, "C": 12}
SELECTIONS = {
    "all": Selection(range(7), 8, 0, 7),
    "none": Selection([], 8, 0, 0),
    "one": Selection([3], 8, 0, 1),
    "any-order": Selection([5, 1, 2, 6], 8, 0, 4),
    "twice": Selection([4, 4, 5], 8, 0, 3),
    "from-on": Selection([5, 1, 2, 6], 8, 1, 2),
    "half-blocks": Selection([5, 1, 2, 6], 4, 1, 5),
    "tokens": Selection([2, 3, 0], 1, 5, 13),
    "a-head": Selection([5, 6, 2], 8, 0, 3, (1, 2)),
    "heads": Selection([5, 6, 2], 8, 0, 3, (1, 3)),
    "all-heads-named": Selection([5, 6, 2], 8, 0, 3, (0, 4)),
    "heads-of-units": Selection([5, 6, 2], 2, 3, 7, (2, 4)),
}


def make(layout: str, sizes: dict[str, int] = SIZES) -> BlockCache:
    """A cache of random bytes in a layout, each region a strided view [B, H, N, C]."""
    whole = torch.randint(0, 256, [sizes[axis] for axis in layout], dtype=torch.uint8)
    by_layer = whole.permute([layout.index(axis) for axis in "LBHNC"])
    return BlockCache([Region(f"layer.{i}", by_layer[i], "BF16") for i in range(sizes["L"])])


def naive(cache: BlockCache, index: int, selection: Selection) -> bytes:
    """The selection in wire order, one element of one token of one head at a time."""
    region = cache.regions[index]
    memory = region.memory.numpy()
    first, last = selection.heads or (0, memory.shape[1])
    per_block = cache.block_size // selection.unit
    pieces = []
    for unit in range(selection.first, selection.first + selection.count):
        block, begin = selection.block_ids[unit // per_block], unit % per_block * selection.unit
        tokens = range(begin, begin + selection.unit)
        if region.is_token_major:
            pieces += [memory[block, h, n].tobytes() for n in tokens for h in range(first, last)]
        else:
            pieces += [memory[block, h, n].tobytes() for h in range(first, last) for n in tokens]
    return b"".join(pieces)


def gathered(cache: BlockCache, index: int, selection: Selection) -> np.ndarray:
    """The selection of one region, as its views have it."""
    return np.concatenate([np.empty(0, np.uint8), *list(cache.views(selection))[index]])


def scatter(cache: BlockCache, index: int, selection: Selection, data: np.ndarray) -> None:
    """Write the selection of one region through its views."""
    views = list(cache.views(selection))[index]
    for view, part in zip(views, parts(data, views), strict=True):
        view[:] = part


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_views_are_the_wire_order(layout: str, selection: Selection) -> None:
    source, target = make(layout), make(layout)
    source.check(selection)
    moved = 0
    for index in range(len(source.regions)):
        expected = naive(source, index, selection)
        assert gathered(source, index, selection).tobytes() == expected
        shape = source.shape(index, selection)
        assert np.prod(shape, dtype=int) * 2 == len(expected)
        assert source.row_bytes(index, selection) * selection.count == len(expected)
        before = target.regions[index].memory.clone()
        scatter(target, index, selection, np.frombuffer(expected, np.uint8))
        assert naive(target, index, selection) == expected
        changed = (target.regions[index].memory != before).any(-1).numpy()
        assert not (changed & ~_selected(target, selection)).any(), "it wrote outside"
        moved += len(expected)
    assert moved == source.num_bytes(selection)


def _selected(cache: BlockCache, selection: Selection) -> np.ndarray:
    """bool [B, H, N]"""
    selected = np.zeros(cache.regions[0].memory.shape[:3], bool)
    per_block = cache.block_size // selection.unit
    for unit in range(selection.first, selection.first + selection.count):
        begin = unit % per_block * selection.unit
        heads = slice(*(selection.heads or (None,)))
        selected[selection.block_ids[unit // per_block], heads, begin : begin + selection.unit] = 1
    return selected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_slices_meet_the_cache_that_holds_just_these_heads(layout: str) -> None:
    """What a rank of one head gets from a rank of four, and the other way around."""
    wide, narrow = make(layout), make(layout, {**SIZES, "H": 1})
    part, whole = Selection([5, 2, 6], 4, 1, 5, (2, 3)), Selection([1, 0, 3], 4, 1, 5, (0, 1))
    for index in range(len(wide.regions)):
        scatter(narrow, index, whole, gathered(wide, index, part))
        assert naive(narrow, index, whole) == naive(wide, index, part)
        scatter(wide, index, part, gathered(narrow, index, whole))
        assert naive(wide, index, part) == naive(narrow, index, whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_sizes_meet_in_units(layout: str) -> None:
    """Tokens 4..20 of a prompt, between blocks of 8 and blocks of 4 tokens."""
    coarse, fine = make(layout), make(layout, {**SIZES, "N": 4, "B": 14})
    of_coarse, of_fine = Selection([6, 0, 3], 4, 1, 4), Selection([9, 1, 13, 2], 4, 0, 4)
    for index in range(len(coarse.regions)):
        scatter(fine, index, of_fine, gathered(coarse, index, of_coarse))
        there, here = coarse.regions[index].memory, fine.regions[index].memory
        sent = torch.cat([there[block] for block in (6, 0, 3)], dim=1)[:, 4:20]
        assert torch.equal(torch.cat([here[block] for block in (9, 1, 13, 2)], dim=1), sent)


@pytest.mark.parametrize(
    ("layout", "selection", "merged"),
    [
        ("LBHNC", Selection([], 8, 0, 0), []),
        ("LBHNC", Selection([0], 8, 0, 1), [(0, 384)]),
        ("LBHNC", Selection([4, 5, 6, 2], 8, 0, 4), [(1536, 1152), (768, 384)]),
        ("LBHNC", Selection([3, 2, 1], 8, 0, 3), [(1152, 384), (768, 384), (384, 384)]),
        ("LBHNC", Selection([1, 1, 2], 8, 0, 3), [(384, 384), (384, 768)]),
        ("LBHNC", Selection([1, 2], 8, 0, 2, (1, 3)), [(480, 192), (864, 192)]),
        ("LBHNC", Selection([1], 4, 1, 1, (0, 2)), [(432, 48), (528, 48)]),
        ("LBNHC", Selection([1, 2], 4, 1, 3), [(576, 576)]),
        ("LBNHC", Selection([0], 2, 0, 1, (1, 3)), [(12, 24), (60, 24)]),
        ("LHBNC", Selection([1, 2], 8, 0, 2, (3, 4)), [(2112, 192)]),
        ("BLHNC", Selection([1, 2], 8, 0, 2), [(1152, 384), (2304, 384)]),
        ("BHLNC", Selection([1], 8, 0, 1, (1, 3)), [(1440, 96), (1728, 96)]),
    ],
)
def test_neighbours_are_merged(
    layout: str, selection: Selection, merged: list[tuple[int, int]]
) -> None:
    runs = make(layout).runs(0, selection)
    assert list(zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True)) == merged


def test_views_are_the_cache_itself() -> None:
    memory = torch.zeros(8, 1, 4, 4, dtype=torch.uint8)
    cache = BlockCache([Region("a", memory, "U8")])
    (views,) = cache.views(cache.whole([2, 3, 7]))
    assert [len(view) for view in views] == [32, 16]
    views[0][:] = 9
    assert memory[2:4].eq(9).all()
    assert memory[4:].eq(0).all()


def test_a_region_that_starts_inside_its_storage() -> None:
    whole = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 1, 1, 4)
    cache = BlockCache([Region("k", whole[0], "U8"), Region("v", whole[1], "U8")])
    assert gathered(cache, 1, cache.whole([1])).tolist() == [16, 17, 18, 19]


def test_regions_must_agree() -> None:
    regions = [Region("a", torch.zeros(n, 1, 4, 2, dtype=torch.uint8), "U8") for n in (3, 4)]
    with pytest.raises(ValueError, match="disagree"):
        BlockCache(regions)
    with pytest.raises(ValueError, match="at least one"):
        BlockCache([])


@pytest.mark.parametrize(
    ("selection", "complaint"),
    [
        (Selection([0, 7], 8, 0, 2), "outside"),
        (Selection([-1], 8, 0, 1), "outside"),
        (Selection([0], 3, 0, 1), "divide"),
        (Selection([0], 0, 0, 1), "divide"),
        (Selection([0], 16, 0, 1), "divide"),
        (Selection([0], 8, 0, 2), "units"),
        (Selection([0], 8, -1, 1), "units"),
        (Selection([0], 8, 1, -1), "units"),
        (Selection([0], 8, 0, 1, (0, 5)), "heads"),
        (Selection([0], 8, 0, 1, (2, 2)), "heads"),
        (Selection([0], 8, 0, 1, (-1, 2)), "heads"),
    ],
)
def test_what_lies_outside_is_refused(selection: Selection, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make("LBHNC").check(selection)


def test_heads_of_regions_that_differ_in_them_cannot_be_sliced() -> None:
    shapes: Sequence[tuple[int, ...]] = [(3, 2, 4, 2), (3, 1, 4, 8)]
    cache = BlockCache([Region("x", torch.zeros(s, dtype=torch.uint8), "U8") for s in shapes])
    cache.check(cache.whole([0, 2]))
    assert cache.num_bytes(cache.whole([0, 2])) == 2 * (16 + 32)
    with pytest.raises(ValueError, match="heads"):
        cache.check(Selection([0], 4, 0, 1, (0, 1)))


def test_who_copies_alone_leaves_the_others_their_helpers() -> None:
    def in_a_thread(*calls: Callable[[], object]) -> object:
        with ThreadPoolExecutor(1) as pool:
            return [pool.submit(call).result() for call in calls][-1]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(8, initializer=copy_alone) as pool:
            alone = [*pool.map(lambda _: torch.get_num_threads(), range(8))]
        assert alone == [1] * 8
        assert torch.get_num_threads() == in_a_thread(torch.get_num_threads) == 3
        assert in_a_thread(copy_alone, torch.get_num_threads) == 1
    finally:
        torch.set_num_threads(before)


def test_the_shape_of_a_selection_is_its_wire_order() -> None:
    """Peers compare it in files. One head or one token has one shape in both orders."""
    by_head = Region("a", torch.zeros(2, 3, 4, 8, dtype=torch.uint8), "F32")
    by_token = Region("b", torch.zeros(2, 4, 3, 8, dtype=torch.uint8).transpose(1, 2), "F32")
    cache = BlockCache([by_head, by_token])
    for selection, shapes in (
        (Selection([0, 1], 4, 0, 2), ([2, 3, 4, 2], [2, 4, 3, 2])),
        (Selection([0, 1], 2, 0, 4), ([4, 3, 2, 2], [4, 2, 3, 2])),
        (Selection([0, 1], 1, 0, 8), ([8, 3, 1, 2], [8, 3, 1, 2])),
        (Selection([0], 4, 0, 1, (1, 2)), ([1, 1, 4, 2], [1, 1, 4, 2])),
    ):
        assert [cache.shape(index, selection) for index in (0, 1)] == [*shapes]
