"""What router processes tell each other about the engines of one model, so that they choose alike.

Each tells the load that it gives every engine, and which prompts it has newly sent where. Engines
are known by their URLs, which all routers share; names are each router's own. Both are estimates,
and must never decide correctness: what is late or lost costs a worse choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

FRESH_S = 1.0
"""A load that was told longer ago counts nothing: its router is gone, or cut off."""
MOST_KEYS = 8192
"""Keys of prefixes in one report. More than that are new only under a flood of new prompts."""
_MOST_ROUTERS = 1024

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Key = Annotated[int, msgspec.Meta(ge=0)]
MemoryName: TypeAlias = Literal["prefill", "decode", "answered"]
"""Which memory of prompts: of a role's policy, or of the decode engines that answered."""
_Url = Annotated[str, msgspec.Meta(max_length=2048)]
Clock: TypeAlias = Callable[[], float]


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The load that one router process gives an engine. cost: work in flight, in prompt tokens.
    reading_s: the estimated seconds until it has computed its prompts."""

    cost: _Count
    reading_s: _Seconds = 0.0


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that an engine now has, by the keys of its prefixes."""

    memory: MemoryName
    engine: _Url
    keys: list[_Key]


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one router process tells of one model's engines."""

    loads: dict[_Url, Load] = {}
    sent: list[Sent] = []


class OtherRouters:
    """The load that other router processes give the engines of one model."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, Mapping[str, Load]]] = {}

    def hear(self, router: str, loads: Mapping[str, Load]) -> None:
        """A router tells its loads; they replace those that it told before."""
        now = self._clock()
        for name, (at, _) in list(self._told.items()):
            if now - at > FRESH_S:
                del self._told[name]
        if router in self._told or len(self._told) < _MOST_ROUTERS:
            self._told[router] = now, loads

    def count(self) -> int:
        """How many routers told something within the last `FRESH_S`."""
        now = self._clock()
        return sum(now - at <= FRESH_S for at, _ in self._told.values())

    def cost(self, engine: str) -> int:
        """The work of other routers in flight at the engine of this URL, in prompt tokens."""
        if not self._told:
            return 0
        now = self._clock()
        return sum(
            loads[engine].cost
            for at, loads in self._told.values()
            if engine in loads and now - at <= FRESH_S
        )

    def reading_s(self, engine: str) -> float:
        """The estimated seconds until that engine has computed the prompts of other routers."""
        if not self._told:
            return 0.0
        now = self._clock()
        return sum(
            max(0.0, loads[engine].reading_s - (now - at))
            for at, loads in self._told.values()
            if engine in loads and now - at <= FRESH_S
        )
