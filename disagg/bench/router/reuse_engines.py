"""Simulated prefill engines for `disagg bench reuse`. They compute nothing: they keep the time that
a prompt would take, and a cache of names of blocks, of which they tell in KV events as vLLM does.

No sleep and no real clock: who calls says what time it is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.bench.router.publish_events import batch, removed, stored
from disagg.bench.router.reuse_trace import BLOCK, TracedRequest, leading
from disagg.router.caches import messages
from disagg.router.caches.picture import Picture
from disagg.router.pairing.in_flight import Seat


@dataclass(frozen=True)
class Speeds:
    """Tokens a second of one engine: that it computes, and that it gets from another's cache."""

    computed: float
    moved: float


class LruCache:
    """An engine's prefix cache, least recently used first out.

    The end of a prompt goes before its beginning, as in vLLM. So whoever has a block has all before
    it.
    """

    def __init__(self, blocks: int) -> None:
        """`blocks`: how many it has room for."""
        self._room = blocks
        self._held: OrderedDict[int, None] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._held)

    def depth(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first on, it holds."""
        return leading(blocks, self._held)

    def use(self, blocks: Sequence[int]) -> None:
        """These leading blocks of a prompt, which it holds, were read just now."""
        for block in reversed(blocks):
            self._held.move_to_end(block)

    def keep(self, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """A prompt's blocks were read or stored just now. Returns how many of them it held before,
        and the blocks that had to go. Of a prompt with more blocks than room only the first ones
        are kept."""
        blocks = blocks[: self._room]
        before = self.depth(blocks)
        for block in reversed(blocks[before:]):
            self._held[block] = None
        self.use(blocks[:before])  # the beginning of a prompt counts as used after its end
        gone = []
        while len(self._held) > self._room:
            gone.append(self._held.popitem(last=False)[0])
        return before, gone


@dataclass
class Job:
    """A prompt at an engine. `source`: the engine that the router named as a holder of more."""

    request: TracedRequest
    arrived_s: float
    seat: Seat
    source: SimulatedEngine | None = None


@dataclass
class SimulatedEngine:
    """One prefill engine, which computes one prompt after another, as with `max_num_seqs: 1`.

    `computed`, `moved`, `own`: tokens of prompts so far: that it computed, had from other engines,
    and found in its own cache. `busy_s`: seconds of work.
    """

    name: str
    cache: LruCache
    picture: Picture
    speeds: Speeds
    queue: deque[Job] = field(default_factory=deque)
    requests: int = 0
    computed: int = 0
    moved: int = 0
    own: int = 0
    busy_s: float = 0.0
    evicted: int = 0

    def begin(self) -> float:
        """The first job of the queue begins. Returns how many seconds it takes."""
        job = self.queue[0]
        blocks, length = job.request.reusable, job.request.input_length
        own, moved = self.cache.depth(blocks), 0
        if job.source is not None:
            # What the other engine still holds: it may have evicted some since the choice.
            there = job.source.cache.depth(blocks)
            if there > own:
                moved = (there - own) * BLOCK
                job.source.cache.use(blocks[:there])
        computed = length - own * BLOCK - moved
        self.requests += 1
        self.own += own * BLOCK
        self.moved += moved
        self.computed += computed
        seconds = computed / self.speeds.computed + moved / self.speeds.moved
        self.busy_s += seconds
        return seconds

    def end(self) -> Job:
        """The first job of the queue ends: its blocks are in the cache, and the router hears it."""
        job = self.queue.popleft()
        blocks = job.request.cacheable
        before, gone = self.cache.keep(blocks)
        self.evicted += len(gone)
        events = [removed([block]) for block in gone]
        kept = self.cache.depth(blocks)
        if kept > before:
            names, tokens = job.request.hash_ids, job.request.token_ids(before, kept)
            parent = names[before - 1] if before else None
            events.append(stored(names[before:kept], parent, tokens, BLOCK))
        if events:
            self._publish(events)
        return job

    def _publish(self, events: Sequence[dict[str, Any]]) -> None:
        """Through the router's own decoders, as over a socket."""
        for raw in messages.events(batch(events)):
            for _ in self.picture.apply(messages.event(raw)):
                pass
