"""Remembers which engine was sent which prompt prefixes.

It is an estimate: an engine may evict a prefix without notice. It must never decide correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from disagg.router.api.prompt_length import CHUNK_TOKENS

_MAX_PREFIXES = 1 << 16
_ENGINES_EACH = 4


class PrefixMemory:
    """A bounded memory. The keys come from `prompt_length.prefix_keys`."""

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

    def tokens(self, keys: Sequence[int], engine: str) -> int:
        """The estimated number of leading tokens of the prompt that the engine has."""
        known = 0
        for key in keys:
            if engine not in self.engines(key):
                break
            known += CHUNK_TOKENS
        return known
