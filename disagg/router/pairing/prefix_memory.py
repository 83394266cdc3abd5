"""Remembers which engine was sent which prompt prefixes.

It is an estimate: an engine may evict a prefix without notice. It must never decide correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from disagg.router.pairing.other_routers import MOST_KEYS

_MAX_PREFIXES = 1 << 17
_ENGINES_EACH = 4


class PrefixMemory:
    """A bounded memory. The keys come from `prompt_length.prefixes`."""

    def __init__(self) -> None:
        self._engines: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._news: list[tuple[str, list[int]]] | None = None
        self._untold = 0

    def share(self) -> None:
        """From now on keep what is new, for `news`."""
        self._news = self._news or []

    def news(self) -> list[tuple[str, list[int]]]:
        """Engines, and the keys of which each has become the latest, since the last call."""
        news, self._untold = self._news or [], 0
        if self._news is not None:
            self._news = []
        return news

    def sent(self, keys: Sequence[int], engine: str) -> None:
        """This process sent the engine the prompt with these keys."""
        if self._news is not None:
            fresh = [key for key in keys if self._engines.get(key, ("",))[0] != engine]
            if fresh and self._untold < MOST_KEYS:
                self._untold += len(fresh)
                self._news.append((engine, fresh))
        self.note(keys, engine)

    def note(self, keys: Sequence[int], engine: str) -> None:
        """The engine now has the prompt with these keys."""
        for key in keys:
            before = self._engines.get(key, ())
            if before[:1] != (engine,):
                others = [name for name in before if name != engine]
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
