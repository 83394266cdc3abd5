"""Which engines hold which blocks, and how far each of them holds a prompt.

Every engine has a slot: a bit in the sets of engines that are kept for each key and medium. A set
is a Python int, and equal sets are one object: most blocks are held by one engine, so their sets
cost nothing. A prompt's keys are looked up along the chain, and the engines that lack a block drop
out, all in one operation. Does no I/O.

A slot that is given back is dead at once: its bits do not count. They are cleared in small steps
(`sweep`), so that dropping an engine's million blocks does not hold the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

GPU = "GPU"
"""vLLM's name of the medium that is the engine's own cache."""
_MOST_MEDIA = 8
_OTHER = "other"  # of the media beyond that
_MOST_SETS = 1 << 16
_MOST_ADAPTERS = 1 << 12

Holders: TypeAlias = dict[int, int]
"""Of one medium: key -> set of slots."""
Steps: TypeAlias = list[tuple[int, int]]
"""`(blocks, slots)`: these engines hold so many leading blocks of the prompt, and no more. The
fewest first. Together they are all engines that were asked for."""


class CacheIndex:
    """The blocks of all engines."""

    def __init__(self) -> None:
        self.gpu: Holders = {}
        self._media: dict[str, Holders] = {GPU: self.gpu}
        self._lower: list[Holders] = []
        """Of all media but the GPU's."""
        self.adapters: set[str] = set()
        """Names of LoRA adapters that engines read prompts with."""
        self.version = 0
        """Changes with every slot that is taken, and with every block size that is heard."""
        self._bits: list[int] = []
        self._live = 0
        self._free: list[int] = []
        self._sets: dict[int, int] = {}
        self._dead: deque[tuple[int, Iterator[int]]] = deque()

    # ---- engines ---------------------------------------------------------------------------------

    def take_slot(self) -> int:
        """A slot for an engine, which holds nothing yet."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._bits)
            self._bits.append(1 << slot)
        self._live |= self._bits[slot]
        self.version += 1
        return slot

    def give_back(self, slot: int, keys: Iterable[int]) -> None:
        """The engine's picture is dropped. `keys`: all that it may hold, for `sweep`."""
        self._live &= ~self._bits[slot]
        self._dead.append((slot, iter(keys)))

    def sweep(self, most: int) -> bool:
        """Clear up to `most` blocks of dead slots. Returns whether some are left."""
        while self._dead and most > 0:
            slot, keys = self._dead[0]
            for key in keys:
                self.discard_all(key, slot)
                most -= 1
                if most == 0:
                    return True
            self._dead.popleft()
            self._free.append(slot)
        return bool(self._dead)

    def bit(self, slot: int) -> int:
        """The set of this slot alone."""
        return self._bits[slot]

    # ---- blocks ----------------------------------------------------------------------------------

    def of_medium(self, name: str) -> Holders:
        """The blocks of this medium. Media beyond the first few are counted as one."""
        holders = self._media.get(name)
        if holders is None:
            if len(self._media) > _MOST_MEDIA:
                return self.of_medium(_OTHER)
            if len(self._media) == _MOST_MEDIA:
                name = _OTHER
            holders = self._media[name] = {}
            self._lower.append(holders)
        return holders

    def add(self, holders: Holders, key: int, slot: int) -> None:
        """This engine holds this block."""
        bit = self._bits[slot]
        before = holders.get(key)
        if before is None:
            holders[key] = bit
        elif not before & bit:
            holders[key] = self._one(before | bit)

    def discard(self, holders: Holders, key: int, slot: int) -> None:
        """This engine does not hold this block."""
        before, bit = holders.get(key, 0), self._bits[slot]
        if before == bit:
            del holders[key]
        elif before & bit:
            holders[key] = self._one(before ^ bit)

    def discard_all(self, key: int, slot: int) -> None:
        """This engine does not hold this block in any medium."""
        for holders in self._media.values():
            self.discard(holders, key, slot)

    def holds(self, key: int, slot: int) -> bool:
        """Whether this engine holds this block in any medium."""
        bit = self._bits[slot]
        if self.gpu.get(key, 0) & bit:
            return True
        return any(holders.get(key, 0) & bit for holders in self._lower)

    def heard_adapter(self, name: str) -> None:
        """An engine read a prompt with this LoRA adapter."""
        if len(self.adapters) < _MOST_ADAPTERS:
            self.adapters.add(name)

    def __len__(self) -> int:
        """How many different blocks are known, in all media."""
        return sum(map(len, self._media.values()))

    # ---- prompts ---------------------------------------------------------------------------------

    def depths(
        self, keys: Iterable[Sequence[int]], among: int, *, leaps: bool = False
    ) -> tuple[Steps, Steps]:
        """How many leading blocks each engine holds: on its GPU, and in any medium.

        `keys`: of the prompt's blocks, some at a time. `among`: the engines' slots. `leaps`: look
        only where engines drop out, by halving. Of a million blocks each look-up misses the
        processor's caches, so this takes a third of the time. It is right as long as engines that
        hold a block hold all before it, as they do while vLLM evicts the ends of prompts first; a
        hole may be overlooked. It does not leap where engines hold blocks in other media.
        """
        lower = [holders for holders in self._lower if holders]
        if lower:
            return self._depths_in_all(keys, among, lower)
        steps: Steps = []
        depth, left = 0, among & self._live
        if dead := among ^ left:
            steps.append((0, dead))
        walk = self._leap if leaps else self._walk
        for some in keys:
            if not left:
                break
            left = walk(some, depth, left, steps)
            depth += len(some)
        if left:
            _note(steps, depth, left)
        return steps, steps

    def _walk(self, keys: Sequence[int], depth: int, left: int, steps: Steps) -> int:
        """Which of these engines hold all of these blocks. Notes the others' steps. `depth`: of
        the first block."""
        last: int | None = -1
        for number, have in enumerate(map(self.gpu.get, keys), depth):
            if have is not last:  # else nothing can change: equal sets are one object
                last, before = have, left
                left = left & have if have else 0
                if left != before:
                    _note(steps, number, before ^ left)
                    if not left:
                        break
        return left

    def _leap(self, keys: Sequence[int], depth: int, left: int, steps: Steps) -> int:
        """The same by halving."""
        get = self.gpu.get
        at_end = left & get(keys[-1], 0)
        # `(first, end, before, after)`: of `before`, `after` hold the blocks up to `end`, too.
        parts = [(0, len(keys), left, at_end)]
        while parts:
            first, end, before, after = parts.pop()
            if before == after:
                continue
            if end - first == 1:
                _note(steps, depth + first, before ^ after)
                continue
            middle = (first + end) // 2
            amid = before & get(keys[middle - 1], 0) | after
            parts.append((middle, end, amid, after))
            parts.append((first, middle, before, amid))
        return at_end

    def _depths_in_all(
        self, keys: Iterable[Sequence[int]], among: int, lower: Sequence[Holders]
    ) -> tuple[Steps, Steps]:
        on_gpu: Steps = []
        anywhere: Steps = []
        depth, left = 0, among & self._live
        gpu_left = left
        if dead := among ^ left:
            on_gpu.append((0, dead))
            anywhere.append((0, dead))
        get = self.gpu.get
        for some in keys:
            if not left:
                break
            for key in some:
                have = get(key, 0)
                if lost := gpu_left & ~have:
                    _note(on_gpu, depth, lost)
                    gpu_left ^= lost
                for holders in lower:
                    have |= holders.get(key, 0)
                if lost := left & ~have:
                    _note(anywhere, depth, lost)
                    left ^= lost
                    if not left:
                        break
                depth += 1
        if gpu_left:
            _note(on_gpu, depth, gpu_left)
        if left:
            _note(anywhere, depth, left)
        return on_gpu, anywhere

    def _one(self, slots: int) -> int:
        """The one object that stands for this set."""
        if len(self._sets) >= _MOST_SETS:
            self._sets.clear()
        return self._sets.setdefault(slots, slots)


def _note(steps: Steps, depth: int, slots: int) -> None:
    if steps and steps[-1][0] == depth:
        steps[-1] = depth, steps[-1][1] | slots
    else:
        steps.append((depth, slots))


def slots_of(slots: int) -> Iterator[int]:
    """The slots in a set, the lowest first."""
    while slots:
        lowest = slots & -slots
        yield lowest.bit_length() - 1
        slots ^= lowest
