"""How much of a prompt the tiers hold, and where. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg.store.base import Key, Presence
from disagg.store.directory_index import DirectoryIndex
from disagg.store.host_index import HostIndex

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Match:
    """`keys` of the chunks from number `first` on; those not `in_files` are in host memory.

    `computed`: tokens that the engine's own cache holds.
    """

    computed: int
    first: int
    keys: tuple[Key, ...]
    in_files: frozenset[Key]


class Matcher:
    """Over both tiers; `directory` may be none. A chunk is `per_chunk` blocks of the engine's."""

    def __init__(
        self, host: HostIndex, directory: DirectoryIndex | None, per_chunk: int, block_size: int
    ) -> None:
        self._host, self._directory = host, directory
        self._per_chunk, self._chunk_tokens = per_chunk, per_chunk * block_size

    def keys(self, request: Request, first: int, stop: int) -> list[Key]:
        """Of chunks [first, stop): the hash of each one's last block, as far as known."""
        per, hashes = self._per_chunk, request.block_hashes
        return [bytes(hash_) for hash_ in hashes[(first + 1) * per - 1 : stop * per : per]]

    def find(self, request: Request, computed: int) -> tuple[Match, bool]:
        """What the tiers hold, and whether it may be more in a moment."""
        first = computed // self._chunk_tokens
        keys = self.keys(request, first, request.num_tokens // self._chunk_tokens)
        leading = self._host.leading(keys)
        found, in_files = keys[: leading.ready], set[Key]()
        if leading.later or self._host.loading(found):
            return Match(computed, first, tuple(found), frozenset()), True
        if self._directory is None or leading.ready == len(keys):
            return Match(computed, first, tuple(found), frozenset()), False
        rest = keys[leading.ready :]
        present = self._directory.leading(rest)
        if present.later:
            return Match(computed, first, tuple(found), frozenset()), True
        for number, key in enumerate(rest):
            presence = self._host.lookup(key)
            if presence is Presence.LATER:
                return Match(computed, first, tuple(found), frozenset(in_files)), True
            if presence is Presence.MISS:
                if number >= present.ready:
                    break
                in_files.add(key)
            found.append(key)
        return self._that_fits(Match(computed, first, tuple(found), frozenset(in_files))), False

    def _that_fits(self, match: Match) -> Match:
        """Without what cannot be read from files, for want of slots that are free or idle."""
        stats = self._host.stats
        room = stats.capacity - stats.in_use - (len(match.keys) - len(match.in_files))
        if len(match.in_files) <= room:
            return match
        keys: list[Key] = []
        for key in match.keys:
            if key in match.in_files:
                room -= 1
                if room < 0:
                    break
            keys.append(key)
        return Match(match.computed, match.first, tuple(keys), match.in_files & {*keys})
