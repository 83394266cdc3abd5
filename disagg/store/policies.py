"""Eviction policies: LRU, ARC, and one for conversations. Pure data structures, for one thread.

A policy knows all keys that occupy a place. Keys in use are **held**: they are in no list of
candidates, so they are never evicted, and choosing a victim takes constant time however many are
held. A released key becomes the most recently used of its list.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from disagg.errors import ConfigError
from disagg.store.base import Key

_MOST_USES = 4
"""Of a key, that count for `Turns`."""


class Admission(NamedTuple):
    """Whether a key was admitted, and which one was evicted for it."""

    admitted: bool
    evicted: Key | None = None


class Policy(Protocol):
    """Keys and their order of eviction. A key must be known (`in`) to be touched, refreshed, held,
    released or removed, and unknown to be admitted."""

    def admit(self, key: Key, full: bool) -> Admission:
        """Admit a key, held; if the tier is `full`, evict another first. If all are held, nothing
        changes and the key is not admitted."""

    def touch(self, key: Key) -> None:
        """A new request used the key."""

    def refresh(self, key: Key) -> None:
        """Make the key the most recently used, as `touch` does, without counting it as a use."""

    def hold(self, key: Key) -> None:
        """Protect the key from eviction. A held key must not be held again."""

    def release(self, key: Key) -> None:
        """The key may be evicted again."""

    def remove(self, key: Key) -> None:
        """Drop the key, held or not, without a trace."""

    def __contains__(self, key: Key) -> bool: ...

    def __len__(self) -> int: ...

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken. For tests."""


class Lru:
    """Evicts the least recently used key."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._line: OrderedDict[Key, None] = OrderedDict()
        self._held: set[Key] = set()

    def admit(self, key: Key, full: bool) -> Admission:
        evicted = None
        if full:
            if not self._line:
                return Admission(False)
            evicted, _ = self._line.popitem(last=False)
        self._held.add(key)
        return Admission(True, evicted)

    def touch(self, key: Key) -> None:
        if key not in self._held:
            self._line.move_to_end(key)

    def refresh(self, key: Key) -> None:
        self.touch(key)

    def hold(self, key: Key) -> None:
        del self._line[key]
        self._held.add(key)

    def release(self, key: Key) -> None:
        self._held.remove(key)
        self._line[key] = None

    def remove(self, key: Key) -> None:
        if key in self._held:
            self._held.remove(key)
        else:
            del self._line[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._held or key in self._line

    def __len__(self) -> int:
        return len(self._held) + len(self._line)

    def check_integrity(self) -> None:
        assert not self._held & self._line.keys(), "held and evictable at once"
        assert len(self) <= self._capacity, "more keys than places"


class Arc:
    """Adaptive replacement: two lists, of keys used once and used again. A key that was evicted
    too early from one list shifts the balance towards it. So a long scan of prompts that never
    return does not evict the system prompts that do.

    N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003;
    T1, T2, B1, B2 and p are the paper's. The paper's lists include keys in use; here these
    are kept apart, and count for their list. If the list that the paper chooses for the victim has
    only held keys, the other list gives it. Then the paper's bounds on the ghosts
    (|T1| + |B1| <= c, and all four together <= 2c) would no longer follow: `_trim`
    enforces them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: OrderedDict[Key, None] = OrderedDict()  # T1
        self._again: OrderedDict[Key, None] = OrderedDict()  # T2
        self._once_ghosts: OrderedDict[Key, None] = OrderedDict()  # B1
        self._again_ghosts: OrderedDict[Key, None] = OrderedDict()  # B2
        self._held_once: set[Key] = set()
        self._held_again: set[Key] = set()
        self._target = 0.0  # p, the target number of places for keys used once

    def admit(self, key: Key, full: bool) -> Admission:
        target = self._learned(key)
        evicted = None
        if full:
            line = self._victims(key, target)
            if not line:
                return Admission(False)
            evicted, _ = line.popitem(last=False)
            ghosts = self._once_ghosts if line is self._once else self._again_ghosts
            ghosts[evicted] = None
        self._target = target
        if key in self._once_ghosts or key in self._again_ghosts:
            self._once_ghosts.pop(key, None)
            self._again_ghosts.pop(key, None)
            self._held_again.add(key)
        else:
            self._held_once.add(key)
        self._trim()
        return Admission(True, evicted)

    def touch(self, key: Key) -> None:
        if key in self._again:
            self._again.move_to_end(key)
        elif key in self._once:
            del self._once[key]
            self._again[key] = None
        elif key in self._held_once:
            self._held_once.remove(key)
            self._held_again.add(key)

    def refresh(self, key: Key) -> None:
        for line in (self._once, self._again):
            if key in line:
                line.move_to_end(key)

    def hold(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
            self._held_once.add(key)
        else:
            del self._again[key]
            self._held_again.add(key)

    def release(self, key: Key) -> None:
        if key in self._held_once:
            self._held_once.remove(key)
            self._once[key] = None
        else:
            self._held_again.remove(key)
            self._again[key] = None

    def remove(self, key: Key) -> None:
        for line in (self._once, self._again):
            line.pop(key, None)
        for held in (self._held_once, self._held_again):
            held.discard(key)

    def __contains__(self, key: Key) -> bool:
        return (
            key in self._once
            or key in self._again
            or key in self._held_once
            or key in self._held_again
        )

    def __len__(self) -> int:
        return self._num_once() + len(self._again) + len(self._held_again)

    def check_integrity(self) -> None:
        parts = [
            set(self._once), set(self._again), self._held_once, self._held_again,
            set(self._once_ghosts), set(self._again_ghosts),
        ]  # fmt: skip
        assert len(set().union(*parts)) == sum(map(len, parts)), "a key is in two lists"
        assert len(self) <= self._capacity, "more keys than places"
        assert self._num_once() + len(self._once_ghosts) <= self._capacity, "too many ghosts"
        assert sum(map(len, parts)) <= 2 * self._capacity, "too many ghosts"
        assert 0 <= self._target <= self._capacity, "the target is out of range"

    def _num_once(self) -> int:
        return len(self._once) + len(self._held_once)

    def _learned(self, key: Key) -> float:
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            return min(self._capacity, self._target + max(again / once, 1))
        if key in self._again_ghosts:
            return max(0.0, self._target - max(once / again, 1))
        return self._target

    def _victims(self, key: Key, target: float) -> OrderedDict[Key, None]:
        """The list of the next victim; empty if all keys are held."""
        count = self._num_once()
        from_once = count > target or (key in self._again_ghosts and count == target)
        if from_once:
            return self._once or self._again
        return self._again or self._once

    def _trim(self) -> None:
        while self._once_ghosts and self._num_once() + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        ghosts = len(self._once_ghosts) + len(self._again_ghosts)
        for _ in range(min(len(self) + ghosts - 2 * self._capacity, len(self._again_ghosts))):
            self._again_ghosts.popitem(last=False)


class Turns:
    """Evicts the oldest key, where each use takes as much off a key's age as the tier has places,
    for the first four uses. Age counts in keys that were admitted or used since.

    A conversation that has come back twice comes back more often than one that has not, and within
    the same time: so its blocks stay longer. On public traces this keeps more than LRU, or as
    much, and so of ARC except in the smallest tiers (docs/benchmarks/reuse.md).

    Keys with the same number of uses are in one line, the oldest first, so a victim is the first of
    one of few lines. The uses of as many evicted keys as there are places are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._now = 0
        self._lines: list[OrderedDict[Key, int]] = [OrderedDict() for _ in range(_MOST_USES + 1)]
        """By the number of uses: the keys that nobody holds, and when each was used."""
        self._uses: dict[Key, int] = {}
        self._held: set[Key] = set()
        self._gone: OrderedDict[Key, int] = OrderedDict()
        """The uses of evicted keys, the first one evicted first."""

    def admit(self, key: Key, full: bool) -> Admission:
        evicted = None
        if full:
            line = self._oldest()
            if line is None:
                return Admission(False)
            evicted, _ = line.popitem(last=False)
            self._gone[evicted] = self._uses.pop(evicted)
        uses = self._gone.pop(key, None)
        self._uses[key] = 0 if uses is None else min(uses + 1, _MOST_USES)
        self._held.add(key)
        self._now += 1
        while len(self._gone) > self._capacity:
            self._gone.popitem(last=False)
        return Admission(True, evicted)

    def touch(self, key: Key) -> None:
        if key in self._held:
            self._uses[key] = min(self._uses[key] + 1, _MOST_USES)
            self._now += 1
            return
        self.hold(key)
        self.touch(key)
        self.release(key)

    def refresh(self, key: Key) -> None:
        if key not in self._held:
            self.hold(key)
            self.release(key)

    def hold(self, key: Key) -> None:
        del self._lines[self._uses[key]][key]
        self._held.add(key)

    def release(self, key: Key) -> None:
        self._held.remove(key)
        self._lines[self._uses[key]][key] = self._now

    def remove(self, key: Key) -> None:
        line = self._lines[self._uses.pop(key)]
        if key in self._held:
            self._held.remove(key)
        else:
            del line[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def check_integrity(self) -> None:
        for uses, line in enumerate(self._lines):
            assert all(self._uses[key] == uses for key in line), "a key is in the wrong line"
            assert not self._held & line.keys(), "held and evictable at once"
            assert list(line.values()) == sorted(line.values()), "a line is out of order"
        in_lines = sum(map(len, self._lines))
        assert in_lines + len(self._held) == len(self._uses), "a key is in no line"
        assert len(self) <= self._capacity, "more keys than places"
        assert len(self._gone) <= self._capacity, "too many evicted keys are remembered"
        assert not self._gone.keys() & self._uses.keys(), "evicted and here at once"

    def _oldest(self) -> OrderedDict[Key, int] | None:
        """The line whose first key is the next victim; None if all keys are held."""
        first, best = None, math.inf
        for uses, line in enumerate(self._lines):
            if line:
                used = next(iter(line.values())) + uses * self._capacity
                if used < best:
                    first, best = line, used
        return first


POLICIES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "arc": Arc, "turns": Turns}


def make(name: str, capacity: int) -> Policy:
    """The policy of this name. Raises `ConfigError` for unknown names."""
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r} is not known; there are {', '.join(POLICIES)}")
    return POLICIES[name](capacity)
