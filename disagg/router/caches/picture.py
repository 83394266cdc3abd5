"""What one engine's cache holds, as its events tell: from the engine's hashes to the router's keys.

Only groups of full attention are followed, and of several only the first one that is heard of
(`group_idx`): a prompt's prefix is of use as far as the full attention has it. Groups with a
sliding window or a recurrent state keep a part of the blocks by other rules, so an engine of such
a model may have to compute more than this picture promises.

An engine stores a block twice if two requests compute it at the same time. Each copy has events of
its own, so copies are counted. (`kv_cache_report_mode: full` reports copies that do not exist; the
picture is then too good.)

The events come over the network, and an engine may send anything. So what does not fit is left out
and counted, and all sizes are bounded. A wrong picture costs a worse choice of engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from disagg.router.caches import block_keys
from disagg.router.caches.index import GPU, CacheIndex
from disagg.router.caches.messages import Cleared, Event, Removed, Stored, handle

MOST_BLOCKS = 1 << 20
"""Blocks of one engine, in all media."""
_MOST_BLOCK_SIZE = 1 << 16
_SLICE = 128  # blocks between two yields of `apply`
_ALMOST = 0.9  # an engine that frees a few blocks is full soon
_FULL = ("full_attention", "mla_attention", "sink_full_attention")


class Picture:
    """The picture of one engine in an index."""

    def __init__(self, index: CacheIndex, most_blocks: int = MOST_BLOCKS) -> None:
        self._index, self._most = index, most_blocks
        self.slot = index.take_slot()
        self.block_size: int | None = None
        """In tokens; None until it is heard."""
        self.stored = self.removed = 0
        """Blocks in events that were applied."""
        self.ignored: Counter[str] = Counter()
        """Blocks, or events, that were left out, by reason."""
        self._keys: dict[int, int] = {}
        """The engine's hash of each block -> its key."""
        self._copies: dict[int, int] = {}
        """The engine's hash of a block -> copies beyond the first one."""
        self._group: int | None = None
        self._full_at: int | None = None
        """The most blocks that the engine held when its own cache evicted some."""

    @property
    def is_full(self) -> bool:
        """Whether the engine has to evict blocks from its own cache to store others."""
        return self._full_at is not None and len(self._keys) >= _ALMOST * self._full_at

    def __len__(self) -> int:
        """How many blocks the engine holds, in all media."""
        return len(self._keys)

    def apply(self, event: Event) -> Iterator[None]:
        """Note what an event tells, in steps of some 0.1 ms."""
        match event:
            case Stored():
                return self._apply_stored(event)
            case Removed():
                return self._apply_removed(event)
            case Cleared():
                self.drop()
        return iter(())

    def drop(self) -> None:
        """Nothing is known of the engine any more. See `CacheIndex.sweep`."""
        self._index.give_back(self.slot, self._keys.values())
        self._keys, self._copies = {}, {}
        self._group = self.block_size = self._full_at = None
        self.slot = self._index.take_slot()

    def close(self) -> None:
        """The engine is gone."""
        self._index.give_back(self.slot, self._keys.values())
        self._keys = {}

    # ---- stored ----------------------------------------------------------------------------------

    def _apply_stored(self, event: Stored) -> Iterator[None]:
        if not self._follows(event):
            self.ignored["other_group"] += len(event.block_hashes)
        elif not event.token_ids:
            yield from self._in_another_medium(event)
        elif (parent := self._parent(event)) is not None:
            yield from self._store(event, parent)

    def _follows(self, event: Stored) -> bool:
        """Whether these blocks are of the group that is followed."""
        kind, group = event.kv_cache_spec_kind, event.group_idx
        if group is None or not event.token_ids:
            return group is None or self._group is None or group == self._group
        if self._group is None:
            is_full = kind in _FULL if kind is not None else group == 0
            if not is_full:
                return False
            self._group = group
        return group == self._group

    def _parent(self, event: Stored) -> int | None:
        """The key of the block before these; None if they cannot be placed."""
        count, size = len(event.block_hashes), event.block_size
        odd = not 0 < size <= _MOST_BLOCK_SIZE or len(event.token_ids) != count * size
        if odd or (event.extra_keys is not None and len(event.extra_keys) != count):
            self.ignored["malformed"] += count
            return None
        if self.block_size is None:
            self.block_size = size
            self._index.version += 1
        if size != self.block_size:
            self.ignored["other_size"] += count
            return None
        if event.parent_block_hash is None:
            return block_keys.root(size)
        parent = self._keys.get(handle(event.parent_block_hash))
        if parent is None:
            self.ignored["unknown_parent"] += count
        return parent

    def _store(self, event: Stored, parent: int) -> Iterator[None]:
        index, keys, slot = self._index, self._keys, self.slot
        holders, is_gpu = self._medium(event.medium)
        count, width = len(event.block_hashes), event.block_size * block_keys.BYTES_EACH
        try:
            data = block_keys.packed(event.token_ids)
            extra = self._extra(event, count)
        except (ValueError, TypeError, RecursionError):
            self.ignored["malformed"] += count
            return
        for first in range(0, count, _SLICE):
            names = event.block_hashes[first : first + _SLICE]
            some = data[first * width : (first + _SLICE) * width]
            more = extra and extra[first : first + _SLICE]
            made = block_keys.chain(some, width, parent, more)
            for number, (name, key) in enumerate(zip(names, made, strict=True), first):
                hash_ = name if type(name) is int else handle(name)
                known = keys.get(hash_)
                if known is None:
                    if len(keys) >= self._most:
                        self.ignored["too_many"] += count - number
                        return
                    keys[hash_] = key
                elif known != key:
                    # One hash for two blocks: an engine's 64 bits collided, or it is no engine.
                    self.ignored["malformed"] += count - number
                    return
                elif is_gpu and index.gpu.get(known, 0) & index.bit(slot):
                    self._copies[hash_] = self._copies.get(hash_, 0) + 1
                index.add(holders, key, slot)
                self.stored += 1
            parent = made[-1]
            yield

    def _extra(self, event: Stored, count: int) -> list[bytes] | None:
        """What of each block counts besides its tokens. Raises TypeError."""
        adapter = event.lora_name
        if adapter is not None:
            self._index.heard_adapter(adapter)
        of_all = block_keys.extra_bytes(adapter)
        each = event.extra_keys
        if each is None or not any(each):
            return [of_all] * count if of_all else None
        # The adapter's name is the first one of them.
        first = int(adapter is not None)
        return [block_keys.extra_bytes(adapter, keys[first:]) if keys else of_all for keys in each]

    def _in_another_medium(self, event: Stored) -> Iterator[None]:
        index, slot = self._index, self.slot
        holders, _ = self._medium(event.medium)
        for number, name in enumerate(event.block_hashes):
            key = self._keys.get(handle(name))
            if key is None:
                self.ignored["unknown_block"] += 1
            else:
                index.add(holders, key, slot)
                self.stored += 1
            if number % _SLICE == _SLICE - 1:
                yield

    # ---- removed ---------------------------------------------------------------------------------

    def _apply_removed(self, event: Removed) -> Iterator[None]:
        group = event.group_idx
        if group is not None and self._group is not None and group != self._group:
            self.ignored["other_group"] += len(event.block_hashes)
            return
        index, keys, slot = self._index, self._keys, self.slot
        holders, is_gpu = self._medium(event.medium)
        if is_gpu:
            self._full_at = max(self._full_at or 0, len(keys))
        for number, name in enumerate(event.block_hashes):
            hash_ = name if type(name) is int else handle(name)
            key = keys.get(hash_)
            if key is None:
                self.ignored["unknown_block"] += 1
            elif is_gpu and hash_ in self._copies:
                self._one_copy_less(hash_)
            else:
                index.discard(holders, key, slot)
                if not index.holds(key, slot):
                    del keys[hash_]
                self.removed += 1
            if number % _SLICE == _SLICE - 1:
                yield

    def _one_copy_less(self, hash_: int) -> None:
        self.removed += 1
        if self._copies[hash_] == 1:
            del self._copies[hash_]
        else:
            self._copies[hash_] -= 1

    def _medium(self, name: str | None) -> tuple[dict[int, int], bool]:
        is_gpu = name is None or name == GPU
        return (self._index.gpu, True) if is_gpu else (self._index.of_medium(str(name)), False)
