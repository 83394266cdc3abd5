"""How much of a prompt the tiers hold, and where. Without side effects on the tiers' content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from disagg.connector.offload.groups import Chunks
from disagg.store.base import Key, Presence
from disagg.store.host_index import HostIndex
from disagg.store.shared_index import SharedIndex

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class GroupChunks:
    """For one KV cache group: the keys of its chunks, from number `first` on."""

    group: int
    first: int
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Match:
    """The chunks to load, after which all chunks before number `stop` are computed. Keys that are
    not `in_shared` are in host memory.

    computed: tokens in the engine's own cache.
    """

    computed: int
    stop: int
    parts: tuple[GroupChunks, ...]
    in_shared: frozenset[Key]

    @property
    def keys(self) -> list[Key]:
        return [key for part in self.parts for key in part.keys]


class Matcher:
    """Searches both tiers. shared: None if there is no such tier."""

    def __init__(self, host: HostIndex, shared: SharedIndex | None, chunks: Chunks) -> None:
        self._host, self._shared, self._chunks = host, shared, chunks

    def find(self, request: Request, computed: int) -> tuple[Match, bool]:
        """The longest match, and whether it may soon be longer."""
        return _Search(self._host, self._shared, self._chunks, request, computed).result()


class _Search:
    """One search. later: some key is not known yet, and counts as missing."""

    def __init__(
        self,
        host: HostIndex,
        shared: SharedIndex | None,
        chunks: Chunks,
        request: Request,
        computed: int,
    ) -> None:
        self._host, self._shared, self._chunks = host, shared, chunks
        self._request, self._computed = request, computed
        self._first = computed // chunks.tokens
        self._in_shared = set[Key]()
        self._later = False

    def result(self) -> tuple[Match, bool]:
        first, stop = self._first, max(self._first, self._chunks.loadable(self._request))
        if full := self._chunks.full:
            stop = first + self._leading(self._keys(full, first, stop)) // len(full)
        match = self._match(self._within_windows(stop))
        while (excess := self._excess(match)) > 0:
            # No further than it may help: what is in host memory needs no other slots.
            less = match.stop - -(-min(excess, len(match.in_shared)) // self._chunks.groups)
            match = self._match(self._within_windows(max(first, less)))
        return match, self._later

    def _keys(self, groups: Sequence[int], first: int, stop: int) -> list[Key]:
        """Chunk by chunk."""
        by_group = [self._chunks.keys(self._request, group, first, stop) for group in groups]
        return by_group[0] if len(groups) == 1 else [*chain(*zip(*by_group, strict=True))]

    def _leading(self, keys: list[Key]) -> int:
        """How many of the keys are there, from the first on."""
        ready, self._later = self._host.leading(keys)
        self._later = self._later or self._host.loading(keys[:ready])
        if self._later or self._shared is None or ready == len(keys):
            return ready
        where = [(key, self._host.lookup(key)) for key in keys[ready:]]
        rest = list(takewhile(lambda one: one[1] is not Presence.LATER, where))
        missing = [key for key, presence in rest if presence is Presence.MISS]
        present = self._shared.leading(missing)
        if present.later:
            self._later = True
            return ready
        self._in_shared.update(missing[: present.ready])
        if present.ready < len(missing):
            return keys.index(missing[present.ready], ready)
        self._later = len(rest) < len(where)
        return ready + len(rest)

    def _within_windows(self, stop: int) -> int:
        """The longest prefix of so many chunks at most whose windows are there too."""
        windowed, end, begin = self._chunks.windowed, stop, stop
        keys, there = list[list[Key]](), set[Key]()
        while windowed and stop * self._chunks.tokens > self._computed:
            firsts = [max(self._first, self._chunks.first(group, stop)) for group in windowed]
            if min(firsts) < begin:
                # After the first gap all that may matter is looked for at once: elsewhere, the
                # answer takes a while.
                low = min(firsts) if begin == end else self._first
                keys = [self._chunks.keys(self._request, group, low, end) for group in windowed]
                there |= self._present([key for of in keys for key in of[: begin - low]])
                begin = low
            gaps = (
                chunk
                for chunk in range(stop - 1, min(firsts) - 1, -1)
                for first, of in zip(firsts, keys, strict=True)
                if chunk >= first and of[chunk - begin] not in there
            )
            gap = next(gaps, None)
            if gap is None:
                break
            stop = gap
        return stop

    def _present(self, keys: list[Key]) -> set[Key]:
        """The keys that are in a tier, each looked up separately."""
        there, missing = set[Key](), list[Key]()
        for key in keys:
            presence = self._host.lookup(key)
            self._later = self._later or presence is Presence.LATER
            if presence is Presence.HIT:
                there.add(key)
            elif presence is Presence.MISS:
                missing.append(key)
        if self._later or self._shared is None:
            return there
        for key in missing:
            presence = self._shared.lookup(key)
            self._later = self._later or presence is Presence.LATER
            if presence is Presence.HIT:
                there.add(key)
                self._in_shared.add(key)
        return there

    def _match(self, stop: int) -> Match:
        parts = []
        for group in range(self._chunks.groups):
            first = max(self._first, self._chunks.first(group, stop))
            keys = self._chunks.keys(self._request, group, first, stop)
            parts.append(GroupChunks(group, first, tuple(keys)))
            if group in self._chunks.windowed and self._host.loading(keys):
                self._later = True
        in_shared = self._in_shared.intersection(key for part in parts for key in part.keys)
        return Match(self._computed, stop, tuple(parts), frozenset(in_shared))

    def _excess(self, match: Match) -> int:
        """How many slots are lacking for reads from the shared tier: free or idle slots minus the
        keys."""
        if not match.in_shared:
            return 0
        stats = self._host.stats
        return len(match.keys) - (stats.capacity - stats.in_use)
