"""Remembers which engine was sent which prompt prefixes.

It is an estimate: an engine may evict a prefix without notice. It must never decide correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MAX_PREFIXES = 1 << 17
_ENGINES_EACH = 4


class PrefixMemory:
    """A bounded memory. The keys come from `prompt_length.prefixes`."""

    def __init__(self) -> None:
        self._engines: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def note(self, keys: Sequence[int], engine: str) -> None:
        """The engine now has the prompt with these keys."""
        for key in keys:
            others = (name for name in self._engines.get(key, ()) if name != engine)
            self._engines[key] = (engine, *others)[:_ENGINES_EACH]
            self._engines.move_to_end(key)
        while len(self._engines) > _MAX_PREFIXES:
            self._engines.popitem(last=False)

    def engines(self, key: int) -> tuple[str, ...]:
        """The engines that had the prefix of this key, the latest first."""
        return self._engines.get(key, ())

    def known(self, keys: Sequence[int], engine: str) -> int:
        """How many of these keys, from the first on, the engine is thought to have."""
        known = 0
        for key in keys:
            if engine not in self.engines(key):
                break
            known += 1
        return known
