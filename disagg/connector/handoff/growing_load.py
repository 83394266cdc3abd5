"""What is still to be fetched of a lease that grows: chunk after chunk, whatever is final by then.

So a fast link fetches each step's blocks by themselves, and a slow one those of several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from disagg.connector.handoff.messages import HandoffLoad
from disagg.transport.follow import Followed

Span = tuple[int, int]


class Chunk(NamedTuple):
    """A part of a load. spans: as `Part.spans`. block_ids, first, units: as in `Selection`."""

    spans: tuple[Span, ...]
    block_ids: Sequence[int]
    first: int
    units: int


def whole(load: HandoffLoad) -> Chunk:
    """All of a load."""
    count = sum(stop - start for start, stop in load.spans)
    return Chunk(load.spans, load.block_ids, load.first, count)


class GrowingLoad:
    """The rest of a load. Spans of several KV cache groups have units of one block."""

    def __init__(self, load: HandoffLoad) -> None:
        assert len(load.spans) == 1 or load.per_block == 1
        self._load = load
        self._done = [start for start, _ in load.spans]

    def begin_anew(self) -> None:
        """Nothing that was taken counts."""
        self._done = [start for start, _ in self._load.spans]

    def right(self) -> int:
        """How many of our first blocks are right, if all that was taken so far is."""
        load = self._load
        return (load.first + self._done[0] - load.spans[0][0]) // load.per_block

    def take(self, tokens: int, *, is_whole: bool) -> Chunk | None:
        """What is final with so many tokens of the prompt, or the whole prompt, and was not taken
        yet; None if nothing."""
        load, spans, ours, first = self._load, list[Span](), list[int](), 0
        at, unit_before = 0, load.first
        for number, (start, stop) in enumerate(load.spans):
            begin = self._done[number]
            end = stop if is_whole else min(stop, load.growth[number].final(tokens))
            if begin < end:
                ahead = unit_before + begin - start
                last = -(-(ahead + end - begin) // load.per_block)
                ours += load.block_ids[at + ahead // load.per_block : at + last]
                first = first if spans else ahead % load.per_block
                spans.append((begin, end))
                self._done[number] = end
            at += -(-(unit_before + stop - start) // load.per_block)
            unit_before = 0
        count = sum(end - begin for begin, end in spans)
        return Chunk(tuple(spans), ours, first, count) if spans else None


class Leases:
    """The leases of all producer ranks that one load reads, which grow together."""

    def __init__(self, followed: Sequence[Followed]) -> None:
        self.followed = followed

    @property
    def is_whole(self) -> bool:
        """Whether every rank's lease can be fetched as a whole."""
        return all(one.grown.is_whole for one in self.followed)

    @property
    def epoch(self) -> int:
        """How often the prompt has begun anew, on all ranks."""
        return min(one.grown.epoch for one in self.followed)

    @property
    def tokens(self) -> int:
        """How many tokens are final on all ranks. Ranks where the prompt began anew are ahead of
        the others for a moment: none are final then."""
        if len({one.grown.epoch for one in self.followed}) > 1:
            return 0
        # A rank that has granted its lease need not have said that all its tokens are final.
        growing = [one.grown.tokens for one in self.followed if not one.grown.is_whole]
        return min(growing, default=0)

    @property
    def state(self) -> tuple[tuple[int, int, bool], ...]:
        """Changes whenever there is news."""
        grown = [one.grown for one in self.followed]
        return tuple((one.epoch, one.tokens, one.is_whole) for one in grown)

    def behind(self) -> list[Followed]:
        """Those whose news are waited for: the ones that are not ahead of others."""

        def at(one: Followed) -> tuple[bool, int, int]:
            return one.grown.is_whole, one.grown.epoch, one.grown.tokens

        least = min(at(one) for one in self.followed)
        return [one for one in self.followed if at(one) == least]
