"""The KV cache groups of a model: which blocks of each a prompt needs, and the keys of chunks.

vLLM keeps one block table per group. Layers with a sliding window or local attention see only the
last tokens; vLLM frees earlier blocks, and the null block takes their place. So for such a group a
prefix needs only its last chunks, and of a chunk perhaps only its last blocks. For layers with
recurrent state it needs only the block with the state after its last token.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from disagg.connector.kv_cache_layout import NULL_BLOCK
from disagg.connector.whole_pages import layer_specs
from disagg.identity.weights import Adapters
from disagg.store.base import Key

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_SUFFIX_BYTES = 4  # as in vLLM's own `BlockHashWithGroupId`
_SINCE_BYTES = 8


@dataclass(frozen=True)
class Group:
    """window: tokens that its layers see, including the one being computed. local: tokens of the
    pieces within which they attend. 0: they see all tokens. state: they keep a recurrent state."""

    window: int = 0
    local: int = 0
    state: bool = False

    @property
    def sees_all(self) -> bool:
        return not (self.window or self.local or self.state)

    def skipped(self, computed: int) -> int:
        """How many leading tokens are no longer needed after `computed` tokens, as vLLM's
        `get_num_skipped_tokens`."""
        if self.state:
            return max(0, computed - 1)
        if self.window:
            return max(0, computed - self.window + 1)
        return computed // self.local * self.local if self.local else 0


def read(kv_cache: KVCacheConfig) -> list[Group]:
    """vLLM's groups."""
    groups = []
    for group in kv_cache.kv_cache_groups:
        spec = layer_specs(group)[0]
        if isinstance(spec, SlidingWindowSpec):
            groups.append(Group(window=spec.sliding_window + spec.extra_retained_tokens))
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            groups.append(Group(local=spec.attention_chunk_size))
        elif isinstance(spec, MambaSpec):
            groups.append(Group(state=True))
        else:
            groups.append(Group())
    return groups


class Part(NamedTuple):
    """Blocks that a load fills from the slots of some keys, without the first `skip` blocks."""

    keys: Sequence[Key]
    skip: int
    block_ids: list[int]


class Chunks:
    """The chunks of prompts, by group and number; a chunk is `per` blocks of `block_size` tokens.

    In groups with larger blocks it is fewer of them, at the end of a slot. block_sizes: tokens of a
    block by group; empty if all have `block_size`. full: the groups that see all tokens. windowed:
    the others. stateful: those of the others that keep a state.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        per: int,
        block_size: int,
        hash_bytes: int = 32,
        block_sizes: Sequence[int] = (),
    ) -> None:
        self._groups, self.per, self.block_size = tuple(groups), per, block_size
        self.tokens = per * block_size
        self.block_sizes = tuple(block_sizes) or (block_size,) * len(self._groups)
        self._per = [self.tokens // size for size in self.block_sizes]
        assert all(self.tokens % size == 0 for size in self.block_sizes)
        self.full = [n for n, group in enumerate(groups) if group.sees_all]
        self.windowed = [n for n, group in enumerate(groups) if not group.sees_all]
        self.stateful = [n for n, group in enumerate(groups) if group.state]
        self._hash_bytes, self._adapters, self._since = hash_bytes, Adapters(), b""
        # With one group, without adapter and reset, a key is just the block's hash.
        several = len(groups) > 1
        self._suffixes = [
            n.to_bytes(_SUFFIX_BYTES, "big") if several else b"" for n in range(len(groups))
        ]

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(self._groups)

    def loadable(self, request: Request) -> int:
        """The most chunks of a request that a load may bring.

        vLLM computes the last token in any case, and allocates a window's blocks for the token
        after the loaded ones. So with windows it must see one token less than there are. A state
        after the last token would be useless too.
        """
        return self._known(request, request.num_tokens - bool(self.windowed))

    def first(self, group: int, stop: int) -> int:
        """The first chunk of a group that is needed once the chunks before `stop` are computed."""
        return self._groups[group].skipped(stop * self.tokens) // self.tokens

    def keys(self, request: Request, group: int, first: int, stop: int) -> list[Key]:
        """The keys of chunks [first, stop), as far as their last block's hash is known."""
        hashes = request.block_hashes
        adapter = self._adapters.of(request.lora_request)
        suffix = self._since + adapter + self._suffixes[group]
        ends = hashes[(first + 1) * self.per - 1 : stop * self.per : self.per]
        return [bytes(hash_) + suffix for hash_ in ends]

    def begin_anew(self) -> None:
        """Make all later keys differ from earlier ones."""
        self._since = secrets.token_bytes(_SINCE_BYTES)

    def needed(self, request: Request, stop: int) -> list[Key]:
        """The keys that a prompt needs if it continues after `stop` chunks, in order of chunks."""
        stop = self._known(request, stop * self.tokens)
        firsts = [self.first(group, stop) for group in range(self.groups)]
        numbered = [
            (first + number, key)
            for group, first in enumerate(firsts)
            for number, key in enumerate(self.keys(request, group, first, stop))
        ]
        return [key for _, key in sorted(numbered, key=lambda one: one[0])]

    def filled(
        self, request: Request, first: int, tokens: int, tables: Sequence[Sequence[int]]
    ) -> tuple[int, dict[Key, list[int]]]:
        """The chunks to store of a request's first `tokens`, from chunk `first` on: the chunk after
        the last one, and the blocks of each, in prompt order.

        tables: the request's block ids, by group. Null blocks at a chunk's beginning stand for
        blocks that no load needs, as a load ends with this chunk or a later one. States are not
        included: not every block has the state after its own last token.
        """
        attending = {n: table for n, table in enumerate(tables) if not self._groups[n].state}
        allocated = (len(table) // self._per[n] for n, table in attending.items())
        stop = min(self._known(request, tokens), *allocated)
        keys = {group: self.keys(request, group, first, stop) for group in attending}
        found = dict[Key, list[int]]()
        for chunk in range(first, stop):
            for group, table in attending.items():
                per = self._per[group]
                ids = list(table[chunk * per : (chunk + 1) * per])
                if self._is_there(group, chunk, ids):
                    found[keys[group][chunk - first]] = [NULL_BLOCK] * (self.per - per) + ids
        return max(first, stop), found

    def states(
        self, request: Request, behind: Iterable[tuple[int, int, int]]
    ) -> dict[Key, list[int]]:
        """The chunks to store of a request's states; a chunk is then one block.

        behind: group, block, and the number of tokens after which its state is; a multiple of the
        block size. States whose hash is not known yet are left out.
        """
        return {
            key: [block]
            for group, block, tokens in behind
            for key in self.keys(request, group, tokens // self.tokens - 1, tokens // self.tokens)
            if block != NULL_BLOCK
        }

    def _is_there(self, group: int, chunk: int, ids: list[int]) -> bool:
        """Whether all blocks of a chunk that a load may need are there; replaces the blocks before
        them by null blocks."""
        if self._groups[group].sees_all:
            return NULL_BLOCK not in ids
        gone = _gone(ids)
        ids[:gone] = [NULL_BLOCK] * gone
        skipped = self._groups[group].skipped((chunk + 1) * self.tokens)
        per = self._per[group]
        return gone <= max(0, skipped // self.block_sizes[group] - chunk * per) < per

    def to_fill(
        self, group: int, first: int, keys: Sequence[Key], table: Sequence[int], span: range
    ) -> list[Part]:
        """What a load fills of a span of tokens: the blocks that vLLM keeps.

        first: the first chunk of `keys`. table: the request's block ids in this group.
        """
        size, per = self.block_sizes[group], self._per[group]
        begin, stop = span.start // size, span.stop // size
        begin += _gone(table[begin:stop])
        ids = list(table[begin:stop])
        if per == self.per:
            return [Part(keys, begin - first * per if ids else 0, ids)]
        found = []
        for chunk, key in enumerate(keys, first):
            low, high = max(begin, chunk * per), min(begin + len(ids), (chunk + 1) * per)
            if low < high:
                skip = self.per - per + low - chunk * per
                found.append(Part([key], skip, list(table[low:high])))
        return found

    def split_key(self, key: Key) -> tuple[Key, int | None]:
        """The hash in a key, and the group's number if there are several."""
        hash_ = key[: self._hash_bytes]
        return hash_, int.from_bytes(key[-_SUFFIX_BYTES:], "big") if self.groups > 1 else None

    def _known(self, request: Request, tokens: int) -> int:
        return min(tokens // self.tokens, len(request.block_hashes) // self.per)


def _gone(ids: Iterable[int]) -> int:
    """How many blocks there are up to the last freed one."""
    return max((n + 1 for n, id_ in enumerate(ids) if id_ == NULL_BLOCK), default=0)
