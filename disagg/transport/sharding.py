"""Which heads lie on which tensor-parallel rank, and from whom a consumer's rank reads them.

vLLM splits K KV heads over ranks evenly, and replicates them where there are more ranks than
heads; an MLA cache is one head on every rank. Pure functions of four numbers, so that all ranks
of both sides come to the same answer without talking.
"""

from __future__ import annotations

from dataclasses import dataclass

Heads = tuple[int, int]


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
    """Whom consumer rank `rank` reads, each of its heads exactly once, in order of heads."""
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
    """How many consumer ranks read each producer rank; 0 where replicas are left over."""
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
