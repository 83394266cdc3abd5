"""The pictures of all engines of one model by the engines' names: what pairing may ask.

It has no sockets: `listeners.py` feeds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.caches.index import CacheIndex
from disagg.router.caches.picture import Picture
from disagg.router.topology import EngineEndpoint


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens of a prompt's prefix that an engine holds: `on_gpu`, and `below`, those that follow
    them in other media (host memory, files)."""

    on_gpu: int = 0
    below: int = 0

    @property
    def tokens(self) -> int:
        """Of all media."""
        return self.on_gpu + self.below


class EngineCaches:
    """What is known of the engines' caches."""

    def __init__(self) -> None:
        self.index = CacheIndex()
        self.pictures: dict[str, Picture] = {}

    def join(self, name: str) -> Picture:
        """An empty picture of the engine of this name, in place of any other."""
        self.leave(name)
        picture = self.pictures[name] = Picture(self.index)
        return picture

    def leave(self, name: str) -> None:
        """The engine of this name is not followed any more."""
        picture = self.pictures.pop(name, None)
        if picture is not None:
            picture.close()

    def tells(self, name: str) -> bool:
        """Whether anything was heard of the cache of the engine of this name."""
        picture = self.pictures.get(name)
        return picture is not None and picture.block_size is not None

    def adapter(self, model: object) -> str | None:
        """The name of the LoRA adapter that reads the prompts of this model, if one does."""
        return model if isinstance(model, str) and model in self.index.adapters else None

    def held(self, prompt: PromptBlocks, model: object, name: str) -> Held:
        """What the engine of this name holds of a prompt."""
        picture = self.pictures.get(name)
        if picture is None or picture.block_size is None:
            return Held()
        size = picture.block_size
        keys = prompt.keys(size, self.adapter(model))
        on_gpu, anywhere = self.index.depths(keys, self.index.bit(picture.slot))
        first = on_gpu[-1][0]
        return Held(first * size, (anywhere[-1][0] - first) * size)


class Among:
    """The engines of a choice by their slots; kept from one choice to the next.

    `sizes`: the slots of the engines of each block size. `unknown`: engines without a picture.
    """

    def __init__(self, engines: Sequence[EngineEndpoint], caches: EngineCaches) -> None:
        self._engines, self._index = engines, caches.index
        self._version = caches.index.version
        self.by_slot: dict[int, EngineEndpoint] = {}
        self.unknown: list[EngineEndpoint] = []
        self.sizes: dict[int, int] = defaultdict(int)
        for engine in engines:
            picture = caches.pictures.get(engine.name)
            if picture is None or picture.block_size is None:
                self.unknown.append(engine)
            else:
                self.by_slot[picture.slot] = engine
                self.sizes[picture.block_size] |= caches.index.bit(picture.slot)

    def is_of(self, engines: Sequence[EngineEndpoint]) -> bool:
        """Whether it is still right for a choice among these engines."""
        return self._version == self._index.version and self._engines == engines
