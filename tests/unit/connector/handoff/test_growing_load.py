"""A load's chunks: together they are the load, each as soon as it may be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.connector.handoff.growing_load import Chunk, GrowingLoad, Leases, whole
from disagg.connector.handoff.messages import HandoffLoad, SpanGrowth
from disagg.transport import protocol as p
from disagg.transport.control.client import Endpoint

UNIT = 4
Slot = tuple[int, int]
"""One of our blocks, and the unit in it."""


def load_of(
    spans: Sequence[tuple[int, int]],
    growth: Sequence[SpanGrowth],
    first: int,
    per_block: int,
    block_ids: Sequence[int],
) -> HandoffLoad:
    hosts = [Endpoint("192.0.2.1", 4000, "life")]
    return HandoffLoad(
        "r", -1, hosts, ([2], [2]), UNIT, tuple(spans), first, list(block_ids),
        stream=b"s" * 16, per_block=per_block, growth=tuple(growth),
    )  # fmt: skip


def places(chunk: Chunk, per_block: int) -> Iterator[tuple[int, Slot]]:
    """Each of the producer's units, and where it goes; as `Part` and `Selection` say."""
    theirs = [unit for start, stop in chunk.spans for unit in range(start, stop)]
    assert len(theirs) == chunk.units
    assert len(chunk.block_ids) == -(-(chunk.first + chunk.units) // per_block)
    for at, unit in enumerate(theirs, chunk.first):
        yield unit, (chunk.block_ids[at // per_block], at % per_block)


def one_group(rng: random.Random) -> HandoffLoad:
    """Block sizes of both sides, where the larger is a multiple of the smaller."""
    per_block, per_theirs = rng.choice(((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 8)))
    start = rng.randrange(20)
    stop = start + rng.randrange(1, 40)
    first = start % per_block
    count = -(-(first + stop - start) // per_block)
    grows = SpanGrowth(0, UNIT, per_theirs * UNIT)
    ids = rng.sample(range(1000), count)
    return load_of([(start, stop)], [grows], first, per_block, ids)


def several_groups(rng: random.Random) -> HandoffLoad:
    """Some with larger blocks, some that are final at the end alone, in whole or in part."""
    spans, growth, before = list[tuple[int, int]](), list[SpanGrowth](), 0
    for _ in range(rng.randrange(1, 4)):
        tokens, blocks = rng.choice((UNIT, 2 * UNIT)), rng.randrange(1, 20)
        start = rng.randrange(blocks)
        middle = rng.choice((start, blocks, rng.randrange(start, blocks + 1)))
        for begin, end, block in ((start, middle, 0), (middle, blocks, tokens)):
            if begin < end:
                spans.append((before + begin, before + end))
                growth.append(SpanGrowth(before, tokens, block))
        before += blocks
    count = sum(stop - start for start, stop in spans)
    return load_of(spans, growth, 0, 1, rng.sample(range(1000), count))


def is_final(load: HandoffLoad, unit: int, tokens: int) -> bool:
    """Whether the producer's whole block of this unit is computed, and may be fetched so early."""
    of_span = [start <= unit < stop for start, stop in load.spans].index(True)
    before, size, block = load.growth[of_span]
    return bool(block) and ((unit - before) * size // block + 1) * block <= tokens


@pytest.mark.parametrize("make", [one_group, several_groups])
def test_any_progress_fetches_each_unit_once_and_to_its_place(make: Any) -> None:
    rng = random.Random(3)
    for _ in range(1500):
        load = make(rng)
        due = dict(places(whole(load), load.per_block))
        rest, tokens, seen = GrowingLoad(load), 0, dict[int, Slot]()
        for turn in range(rng.randrange(1, 12)):
            if turn and rng.random() < 0.1:
                rest.begin_anew()
                tokens = 0
                seen.clear()
                if len(load.spans) == 1:
                    assert rest.right() == 0
            tokens += rng.choice((0, 1, 3, UNIT, 2 * UNIT, 30))
            take(rest, load, tokens, seen)
            assert seen.keys() == {unit for unit in due if is_final(load, unit, tokens)}
            check_right(rest, load, seen)
        chunk = rest.take(rng.choice((0, tokens)), is_whole=True)
        if chunk is not None:
            fresh = dict(places(chunk, load.per_block))
            assert not fresh.keys() & seen.keys()
            seen |= fresh
        assert seen == due
        assert rest.take(tokens + 99, is_whole=True) is None


def take(rest: GrowingLoad, load: HandoffLoad, tokens: int, seen: dict[int, Slot]) -> None:
    chunk = rest.take(tokens, is_whole=False)
    if chunk is not None:
        fresh = dict(places(chunk, load.per_block))
        assert fresh
        assert not fresh.keys() & seen.keys()
        seen |= fresh
    assert rest.take(tokens, is_whole=False) is None


def check_right(rest: GrowingLoad, load: HandoffLoad, seen: dict[int, Slot]) -> None:
    """A block is right once all that the load brings into it, to its end, is there."""
    if len(load.spans) > 1:
        return
    filled = Counter(block for block, _ in seen.values())
    filled[load.block_ids[0]] += load.first  # what was there before
    right = rest.right()
    assert all(filled[block] == load.per_block for block in load.block_ids[:right])
    assert all(filled[block] < load.per_block for block in load.block_ids[right:])


def test_a_prompt_of_three_steps() -> None:
    """Ours are blocks of 4 units, from the middle of one on; theirs have two."""
    load = load_of([(2, 11)], [SpanGrowth(0, UNIT, 2 * UNIT)], 2, 4, [7, 8, 9])
    rest = GrowingLoad(load)
    assert rest.take(2 * UNIT, is_whole=False) is None, "we have those"
    assert rest.take(7 * UNIT, is_whole=False) == Chunk(((2, 6),), [7, 8], 2, 4)
    assert rest.right() == 1
    assert rest.take(8 * UNIT, is_whole=False) == Chunk(((6, 8),), [8], 2, 2)
    assert rest.right() == 2
    assert rest.take(0, is_whole=True) == Chunk(((8, 11),), [9], 0, 3)
    assert whole(load) == Chunk(((2, 11),), [7, 8, 9], 2, 9)


# ---- several ranks -----------------------------------------------------------------------------


def leases(*grown: tuple[int, int, bool]) -> tuple[Leases, list[Any]]:
    """epoch, tokens, is_whole of each rank."""
    ranks: list[Any] = [SimpleNamespace(grown=p.Grown(0, *one)) for one in grown]
    return Leases(ranks), ranks


@pytest.mark.parametrize(
    ("grown", "tokens", "is_whole", "behind"),
    [
        ([(0, 16, False)], 16, False, [0]),
        ([(0, 16, False), (0, 32, False)], 16, False, [0]),
        ([(0, 16, False), (0, 16, False), (0, 48, False)], 16, False, [0, 1]),
        # One began anew, and is ahead although it has more to do.
        ([(0, 64, False), (1, 16, False)], 0, False, [0]),
        ([(1, 16, False), (1, 0, False)], 0, False, [1]),
        # One was granted, perhaps before it had told of all tokens.
        ([(0, 0, True), (0, 16, False)], 16, False, [1]),
        ([(0, 0, True), (1, 16, False)], 0, False, [1]),
        ([(0, 48, True), (0, 0, True)], 0, True, [1]),
        ([(0, 48, True)], 0, True, [0]),
    ],
)
def test_ranks_that_are_not_equally_far(
    grown: list[tuple[int, int, bool]], tokens: int, is_whole: bool, behind: list[int]
) -> None:
    found, ranks = leases(*grown)
    assert (found.tokens, found.is_whole) == (tokens, is_whole)
    assert found.behind() == [ranks[number] for number in behind]


@pytest.mark.parametrize("news", [(1, 16, False), (0, 32, False), (0, 16, True)])
def test_whatever_changes_is_news(news: tuple[int, int, bool]) -> None:
    found, ranks = leases((0, 16, False), (0, 16, False))
    before = found.state
    assert found.state == before
    ranks[1].grown = p.Grown(0, *news)
    assert found.state != before
