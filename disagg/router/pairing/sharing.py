"""Which engine's cache serves another engine: how far, and whether that pays.

    moved if   move_s(n) < compute_s(n)     n: tokens that the source holds and the engine lacks

    compute_s  n more tokens of a prompt that is computed, at the measured speed of prefills
    move_s     what asking a source takes, and n at the measured speed of engines that fetch

With `share_caches: always` it is not asked whether that pays. Before the first measurement a moved
token counts a tenth of a computed one. While moving does not pay, one prompt in `_TRIED` is moved
all the same, so that the measurement follows a link that got better.

What engines hold is heard from their KV events, so a source may hold less by now: it then computes
what it lacks. Only blocks in a source's own cache count; those of its tiers would be loaded first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.caches.engine_caches import Among, EngineCaches
from disagg.router.caches.index import slots_of
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.prefill_backlog import Speed
from disagg.router.pairing.request_info import RequestInfo
from disagg.router.topology import EngineEndpoint, Topology

LEAST_TOKENS = 64
"""Fewer are not worth a leg."""
_GUESS = 0.1  # of a token's computation, before anything is measured
_TRIED = 32
_STEP_S, _PATIENCE_S = 0.5, 5.0
_MOST_COMPARED = 64
_DECAY = 0.9


class Source(NamedTuple):
    """`tokens`: of the prompt's beginning, which `engine` holds. `lacking`: how many of them the
    other engine lacks."""

    engine: EngineEndpoint
    tokens: int
    lacking: int


class Moves:
    """The measured cost of moving tokens from one engine's cache to another's. `always`: move them
    whatever it costs."""

    def __init__(self, in_flight: InFlight, *, always: bool = False) -> None:
        self._in_flight, self._speed, self._always = in_flight, Speed(), always
        self._ask_s: float | None = None
        self._declined = 0

    def asked(self, seconds: float) -> None:
        """A source took so long to answer with a lease."""
        before = seconds if self._ask_s is None else self._ask_s
        self._ask_s = before * _DECAY + seconds * (1 - _DECAY)

    def fetched(self, tokens: int, seconds: float) -> None:
        """An engine took so long to fetch so many tokens, while it had nothing else to do."""
        self._speed.learn(tokens, max(0.0, seconds))

    def cost(self, tokens: int) -> float:
        """What moving so many tokens costs, in computed tokens."""
        per_token = self._in_flight.token_s  # the prompt itself is computed in any case
        if not per_token or self._ask_s is None:
            return _GUESS * tokens
        return (self._ask_s + self._speed.takes(tokens)) / per_token

    def limit_s(self, tokens: int) -> float:
        """How long a source of so many tokens may take to answer: no longer than to compute them,
        but a source in the middle of a step answers after it."""
        return _PATIENCE_S if self._always else max(_STEP_S, self._in_flight.takes_s(tokens))

    def pay(self, tokens: int) -> bool:
        """Whether to move so many tokens."""
        if tokens < LEAST_TOKENS:
            return False
        if self._always or self.cost(tokens) < tokens:
            return True
        self._declined += 1
        return self._declined % _TRIED == 0


class Sharing:
    """Finds sources among all engines of a model."""

    def __init__(
        self,
        topology: Topology,
        caches: EngineCaches,
        in_flight: InFlight,
        health: Health,
        compatibility: Compatibility,
        moves: Moves,
    ) -> None:
        self._topology, self._caches, self._in_flight = topology, caches, in_flight
        self._health, self._compatibility = health, compatibility
        self.moves = moves
        self._among = Among((), caches)

    def held_anywhere(self, blocks: PromptBlocks, model: object) -> int:
        """The most tokens of the prompt's beginning that any engine's own cache holds."""
        return max((tokens for tokens, _ in self._holders(blocks, model)), default=0)

    def source(self, request: RequestInfo, engine: EngineEndpoint) -> Source | None:
        """Where `engine` should fetch the prompt's beginning; None if it should compute it."""
        blocks = request.blocks
        if blocks is None:
            return None
        own = self._caches.held(blocks, request.model, engine.name).tokens
        for tokens, slots in sorted(self._holders(blocks, request.model), reverse=True):
            if tokens - own < LEAST_TOKENS:
                return None
            found = self._usable(slots, engine)
            if found is not None:
                pays = self.moves.pay(tokens - own)
                return Source(found, tokens, tokens - own) if pays else None
        return None

    def _holders(self, blocks: PromptBlocks, model: object) -> Iterator[tuple[int, int]]:
        """How many tokens engines hold, and the slots of those engines."""
        if not self._among.is_of(self._topology.engines):
            self._among = Among(self._topology.engines, self._caches)
        adapter, index = self._caches.adapter(model), self._caches.index
        for size, slots in self._among.sizes.items():
            on_gpu, _ = index.depths(blocks.keys(size, adapter), slots, leaps=True)
            for depth, holders in on_gpu:
                yield depth * size, holders

    def _usable(self, slots: int, engine: EngineEndpoint) -> EngineEndpoint | None:
        """The least busy of these engines that `engine` can fetch from."""
        engines = []
        for slot in slots_of(slots):
            one = self._among.by_slot[slot]
            if one != engine and self._compatibility.fit(one, engine):
                engines.append(one)
            if len(engines) == _MOST_COMPARED:
                break
        usable = self._health.usable(engines)
        return min(usable, key=self._in_flight.cost, default=None)
