"""Which engine had which prompt prefixes. A guess: engines evict without telling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from disagg.router.api.prompt_length import CHUNK_TOKENS

_KNOWN = 1 << 16
_ENGINES_EACH = 4


class PrefixMemory:
    """Bounded; the keys are those of `prompts.prefix_keys`."""

    def __init__(self) -> None:
        self._engines: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def note(self, keys: Sequence[int], engine: str) -> None:
        """The engine has this prompt now."""
        for key in keys:
            others = (name for name in self._engines.get(key, ()) if name != engine)
            self._engines[key] = (engine, *others)[:_ENGINES_EACH]
            self._engines.move_to_end(key)
        while len(self._engines) > _KNOWN:
            self._engines.popitem(last=False)

    def engines(self, key: int) -> tuple[str, ...]:
        """Who had the prefix of this key, the latest first."""
        return self._engines.get(key, ())

    def tokens(self, keys: Sequence[int], engine: str) -> int:
        """About how many leading tokens of the prompt the engine has."""
        known = 0
        for key in keys:
            if engine not in self.engines(key):
                break
            known += CHUNK_TOKENS
        return known
