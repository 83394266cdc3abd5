"""Which rank holds which heads and layers, and which producer ranks a consumer rank reads.

Tensor parallel: vLLM splits K KV heads evenly over ranks, and replicates them where there are more
ranks than heads; an MLA cache is one head on every rank. Pipeline parallel: each stage has a range
of the model's layers, and its own tensor parallel ranks. Pure functions of a few numbers, so that
all ranks of both sides compute the same result without communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Heads = tuple[int, int]
Regions = tuple[int, int]


@dataclass(frozen=True)
class Source:
    """One producer rank that a consumer rank reads: [first, last) heads as each side counts."""

    rank: int
    theirs: Heads
    ours: Heads


def held(size: int, rank: int, kv_heads: int) -> Heads:
    """The heads [first, last) of the model that this rank holds."""
    if size >= kv_heads:
        first = rank * kv_heads // size
        return first, first + 1
    share = kv_heads // size
    return rank * share, (rank + 1) * share


def fits(producers: int, consumers: int, kv_heads: int) -> bool:
    """Whether heads can be sliced or merged between two tensor-parallel sizes."""
    return all(
        size > 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        for size in (producers, consumers)
    )


def sources(producers: int, consumers: int, rank: int, kv_heads: int) -> list[Source]:
    """The producer ranks that consumer rank `rank` reads: each of its heads once, in order."""
    first, last = held(consumers, rank, kv_heads)
    found = []
    head = first
    while head < last:
        producer = _holder(producers, head, rank, kv_heads)
        begins, ends = held(producers, producer, kv_heads)
        stop = min(ends, last)
        found.append(Source(producer, (head - begins, stop - begins), (head - first, stop - first)))
        head = stop
    return found


def readers(producers: int, consumers: int, kv_heads: int) -> list[int]:
    """How many consumer ranks read each producer rank; 0 for surplus replicas."""
    counts = [0] * producers
    for rank in range(consumers):
        for source in sources(producers, consumers, rank, kv_heads):
            counts[source.rank] += 1
    return counts


def _holder(producers: int, head: int, rank: int, kv_heads: int) -> int:
    if producers <= kv_heads:
        return head * producers // kv_heads
    replicas = producers // kv_heads
    return head * replicas + rank % replicas


# ---- pipeline stages ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A producer's stage that a consumer's stage reads: regions [first, last) as each counts."""

    number: int
    theirs: Regions
    ours: Regions


def stages(producers: Sequence[int], consumers: Sequence[int], stage: int) -> list[Stage]:
    """The producer stages that consumer stage `stage` reads: each of its regions once, in order.

    producers, consumers: regions per stage of each side; both have the same sum.
    """
    ends = list(itertools.accumulate(consumers))
    mine = ends[stage] - consumers[stage], ends[stage]
    found, begins = [], 0
    for number, count in enumerate(producers):
        first, last = max(begins, mine[0]), min(begins + count, mine[1])
        if first < last:
            theirs, ours = (first - begins, last - begins), (first - mine[0], last - mine[0])
            found.append(Stage(number, theirs, ours))
        begins += count
    return found


def readers_of_stage(producers: Sequence[int], consumers: Sequence[int], number: int) -> int:
    """How many consumer stages read producer stage `number`."""
    every = (stages(producers, consumers, stage) for stage in range(len(consumers)))
    return sum(source.number == number for sources_ in every for source in sources_)
