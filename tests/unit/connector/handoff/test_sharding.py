"""Which heads and layers come from whom: each exactly once, and both sides count the same
readers."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.connector.handoff.sharding import (
    Source,
    Stage,
    fits,
    held,
    readers,
    readers_of_stage,
    sources,
    stages,
)

GRID = [
    (producers, consumers, heads)
    for producers, consumers, heads in itertools.product((1, 2, 3, 4, 6, 8, 16), repeat=3)
    if fits(producers, consumers, heads)
]


def test_the_grid_covers_slices_merges_and_replicas() -> None:
    assert {(1, 2, 4), (4, 2, 8), (2, 4, 2), (4, 2, 1), (3, 2, 6)} <= set(GRID)
    assert not fits(3, 1, 4)
    assert not fits(1, 3, 4)
    assert not fits(0, 1, 4)
    assert not fits(8, 1, 3)


@pytest.mark.parametrize(("size", "heads"), sorted({(p, k) for p, _, k in GRID}))
def test_ranks_hold_every_head_equally_often(size: int, heads: int) -> None:
    counts = [0] * heads
    for rank in range(size):
        first, last = held(size, rank, heads)
        assert 0 <= first < last <= heads
        assert last - first == max(1, heads // size)
        for head in range(first, last):
            counts[head] += 1
    assert set(counts) == {max(1, size // heads)}


@pytest.mark.parametrize(("producers", "consumers", "heads"), GRID)
def test_each_head_of_a_consumer_comes_once_and_from_its_holder(
    producers: int, consumers: int, heads: int
) -> None:
    for rank in range(consumers):
        first, last = held(consumers, rank, heads)
        filled: list[int] = []
        for source in sources(producers, consumers, rank, heads):
            begins, ends = held(producers, source.rank, heads)
            assert 0 <= source.theirs[0] < source.theirs[1] <= ends - begins
            theirs = [begins + head for head in range(*source.theirs)]
            ours = [first + head for head in range(*source.ours)]
            assert theirs == ours, "a head of the model must land where that head belongs"
            filled += ours
        assert filled == list(range(first, last))


@pytest.mark.parametrize(("producers", "consumers", "heads"), GRID)
def test_readers_agrees_with_sources(producers: int, consumers: int, heads: int) -> None:
    counts = [0] * producers
    for rank in range(consumers):
        ranks = [source.rank for source in sources(producers, consumers, rank, heads)]
        assert len(set(ranks)) == len(ranks), "nobody is asked twice by the same rank"
        for source in ranks:
            counts[source] += 1
    assert readers(producers, consumers, heads) == counts


@pytest.mark.parametrize(("producers", "consumers", "heads"), GRID)
def test_replicas_share_the_readers(producers: int, consumers: int, heads: int) -> None:
    counts = readers(producers, consumers, heads)
    if producers > heads and consumers >= producers:
        assert min(counts) > 0, "a replica without readers while others have several"


def test_examples() -> None:
    assert sources(1, 2, 1, 8) == [Source(0, (4, 8), (0, 4))]
    assert sources(2, 1, 0, 8) == [Source(0, (0, 4), (0, 4)), Source(1, (0, 4), (4, 8))]
    assert sources(4, 4, 3, 8) == [Source(3, (0, 2), (0, 2))]
    assert sources(3, 2, 0, 6) == [Source(0, (0, 2), (0, 2)), Source(1, (0, 1), (2, 3))]
    assert readers(4, 1, 1) == [1, 0, 0, 0]
    assert readers(4, 8, 2) == [2, 2, 2, 2]


def _stages(layers: int, cuts: set[int]) -> list[int]:
    """How many layers each stage has that begins at these cuts."""
    return [b - a for a, b in itertools.pairwise(sorted({0, layers, *cuts}))]


CUTS = st.integers(1, 40).flatmap(
    lambda layers: st.tuples(
        *[
            st.sets(st.integers(1, max(1, layers - 1)), max_size=6).map(
                functools.partial(_stages, layers)
            )
        ]
        * 2
    )
)


@given(CUTS)
def test_each_layer_of_a_consumer_comes_once_and_from_its_stage(
    cuts: tuple[list[int], list[int]],
) -> None:
    producers, consumers = cuts
    counts = [0] * len(producers)
    for number, layers in enumerate(consumers):
        begins, filled = sum(consumers[:number]), list[int]()
        for source in stages(producers, consumers, number):
            counts[source.number] += 1
            assert 0 <= source.theirs[0] < source.theirs[1] <= producers[source.number]
            theirs = [sum(producers[: source.number]) + i for i in range(*source.theirs)]
            assert theirs == [begins + i for i in range(*source.ours)]
            filled += range(*source.ours)
        assert filled == list(range(layers))
    assert counts == [readers_of_stage(*cuts, number) for number in range(len(producers))]
    assert min(counts) > 0, "each stage is read, so its lease ends"


def test_stages_as_they_are_cut() -> None:
    assert stages([16, 16], [16, 16], 1) == [Stage(1, (0, 16), (0, 16))]
    assert stages([32], [16, 16], 1) == [Stage(0, (16, 32), (0, 16))]
    assert stages([10, 12, 10], [16, 16], 0) == [
        Stage(0, (0, 10), (0, 10)),
        Stage(1, (0, 6), (10, 16)),
    ]
