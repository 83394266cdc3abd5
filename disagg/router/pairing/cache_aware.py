"""The engine that has least to do before a request's first token, by what its cache holds.

    cost = computed + 0.1 * loaded + moved + 0.5 * evicted + queue
                                                    in prompt tokens; the smallest wins

    computed   tokens of the prompt that the engine holds in no medium, and does not fetch
    loaded     tokens that it holds below its GPU (host memory, files) and has to load
    moved      of what it fetches from another engine's cache, where engines do (`sharing.py`)
    evicted    tokens of other prompts that have to make room, if its cache is full
    queue      the work that routers have in flight at it (`InFlight.cost`)

An evicted token may have to be computed again. Without that term, prompts that share their first
words would all go to the few engines that have them, which would keep nothing else for long.

Of equal costs the shorter queue wins, then chance. What engines hold is heard from their KV events
(`router/caches`). Where the prompt's token ids are not known, or nothing is known of any engine,
another policy chooses.

All of a few engines are compared. Of many, those that hold most come first, and of those that hold
the same a sample is taken, a small one once enough were compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.caches.engine_caches import Among, EngineCaches
from disagg.router.caches.index import Steps, slots_of
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.prefix_memory import PrefixMemory
from disagg.router.pairing.request_info import Choice, RequestInfo
from disagg.router.pairing.sharing import LEAST_TOKENS, Sharing
from disagg.router.topology import EngineEndpoint

LOAD_COST = 0.1
"""Of a token that is loaded from another medium, in computed tokens."""
EVICT_COST = 0.5
"""Of a token that is evicted for the prompt, in computed tokens."""
_MOST_COMPARED, _FEWEST_COMPARED = 64, 4
_Costs: TypeAlias = Callable[[int], Iterable[tuple[float, EngineEndpoint]]]
"""Engines that hold the same, and what each costs without its queue; about so many of them."""


class _Otherwise(Protocol):
    memory: PrefixMemory

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> Choice:
        """See `policies.Policy`."""


class CacheAware:
    """See the module. `otherwise` chooses where this policy cannot."""

    def __init__(
        self,
        in_flight: InFlight,
        caches: EngineCaches,
        otherwise: _Otherwise,
        sharing: Sharing | None = None,
    ) -> None:
        self._in_flight, self._caches, self._otherwise = in_flight, caches, otherwise
        self._sharing = sharing
        self._random = random.Random()
        self._among = Among((), caches)

    @property
    def memory(self) -> PrefixMemory:
        """Which engines were sent the prompts that the other policy chose for."""
        return self._otherwise.memory

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> Choice:
        blocks = request.blocks
        if blocks is None or len(engines) == 1:
            return self._otherwise.choose(request, engines)
        if not self._among.is_of(engines):
            self._among = Among(engines, self._caches)
        if not self._among.sizes:
            return self._otherwise.choose(request, engines)
        return self._cheapest(blocks, request.model, self._among)

    def _cheapest(self, blocks: PromptBlocks, model: object, among: Among) -> Choice:
        best: tuple[float, int, float] | None = None
        chosen: tuple[EngineEndpoint, float] | None = None
        left = _MOST_COMPARED
        for least, costs in self._by_cost(blocks, model, among):
            if best is not None and least > best[0]:
                break  # whoever comes now costs more
            for cost, engine in costs(max(left, _FEWEST_COMPARED)):
                queue = self._in_flight.cost(engine)
                rank = cost + queue, queue, self._random.random()
                left -= 1
                if best is None or rank < best:
                    best, chosen = rank, (engine, least)
        assert chosen is not None
        engine, work = chosen
        return Choice(engine, round(work))

    def _by_cost(
        self, blocks: PromptBlocks, model: object, among: Among
    ) -> list[tuple[float, _Costs]]:
        """The least that an engine of a group costs without its queue, and that group; the cheapest
        first."""
        adapter, index = self._caches.adapter(model), self._caches.index
        groups: list[tuple[float, _Costs]] = []
        anywhere_held = 0
        if self._sharing is not None:
            anywhere_held = self._sharing.held_anywhere(blocks, model)
        for size, slots in among.sizes.items():
            on_gpu, anywhere = index.depths(blocks.keys(size, adapter), slots, leaps=True)
            for depth, holders in anywhere:
                computed = self._after_moves(blocks.tokens, depth * size, anywhere_held)
                loads = None if on_gpu is anywhere else (on_gpu, depth, size)
                stored = blocks.tokens - depth * size
                costs = partial(self._costs, computed, stored, holders, among, loads)
                groups.append((computed, costs))
        if among.unknown:
            computed = self._after_moves(blocks.tokens, 0, anywhere_held)
            groups.append((computed, partial(self._costs_of_unknown, computed, among)))
        groups.sort(key=lambda group: group[0])
        return groups

    def _after_moves(self, tokens: int, held: int, anywhere: int) -> float:
        """What an engine computes of so many tokens, and what it costs to fetch more than it holds.
        `anywhere`: what some engine holds."""
        lacking = anywhere - held
        if self._sharing is None or lacking < LEAST_TOKENS:
            return tokens - held
        return tokens - held - lacking + min(lacking, self._sharing.moves.cost(lacking))

    def _costs(
        self,
        computed: float,
        stored: int,
        holders: int,
        among: Among,
        loads: tuple[Steps, int, int] | None,
        most: int,
    ) -> Iterator[tuple[float, EngineEndpoint]]:
        """The engines of these slots, which hold the same, and what each costs without its queue.
        `stored`: tokens that they do not hold yet. `loads`: what they hold on their GPUs, the
        blocks that they hold, and the block size. `most`: about how many of them."""
        for slot in self._some(holders, most):
            cost = computed
            if loads is not None:
                on_gpu, depth, size = loads
                first = next(blocks for blocks, slots in on_gpu if slots >> slot & 1)
                cost += LOAD_COST * (depth - first) * size
            engine = among.by_slot[slot]
            if self._caches.pictures[engine.name].is_full:
                cost += EVICT_COST * stored
            yield cost, engine

    def _costs_of_unknown(
        self, computed: float, among: Among, most: int
    ) -> Iterator[tuple[float, EngineEndpoint]]:
        """The same of engines without a picture."""
        some = among.unknown
        if len(some) > most:
            some = self._random.sample(some, most)
        for engine in some:
            yield computed, engine

    def _some(self, slots: int, most: int) -> Iterable[int]:
        if slots.bit_count() <= most:
            return slots_of(slots)
        length, found = slots.bit_length(), set[int]()
        for _ in range(most):
            start = self._random.randrange(length)
            rest = slots >> start
            found.add(start + (rest & -rest).bit_length() - 1)
        return found
