"""Choices by what engines hold and have to do, without engines."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from disagg.config import PairingSection
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.caches.messages import Removed, Stored
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.pairing.cache_aware import CacheAware
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.policies import Pairer, PrefixAffinity
from disagg.router.pairing.request_info import Choice
from disagg.router.request.plan import RequestPlan
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint, Topology

SIZE = 16
ENGINES = [EngineEndpoint(f"prefill-{n}", "prefill", f"http://127.0.0.1:{n}") for n in range(4)]
PROMPT = list(range(2000, 2000 + 100 * SIZE + 1))


@pytest.fixture
def in_flight() -> InFlight:
    return InFlight(RouterMetrics())


@pytest.fixture
def caches() -> EngineCaches:
    caches = EngineCaches()
    for engine in ENGINES:
        caches.join(engine.name)
        # So that its block size is known.
        holds(caches, engine, [1] * SIZE)
    return caches


@pytest.fixture
def policy(in_flight: InFlight, caches: EngineCaches) -> CacheAware:
    return CacheAware(in_flight, caches, PrefixAffinity(in_flight))


def hashes(ids: Sequence[int]) -> list[int | bytes]:
    return [hash(tuple(ids[: at + SIZE])) & (1 << 64) - 1 for at in range(0, len(ids), SIZE)]


def holds(caches: EngineCaches, engine: EngineEndpoint, ids: Sequence[int]) -> None:
    """The engine stores these tokens' whole blocks."""
    ids = list(ids)[: len(ids) // SIZE * SIZE]
    for _ in caches.pictures[engine.name].apply(Stored(hashes(ids), None, ids, SIZE, "GPU")):
        pass


def ask(prompt: Any = PROMPT, path: str = "/v1/completions", **more: Any) -> RequestPlan:
    return RequestPlan(path, {"model": "m", "prompt": prompt, **more})


def test_the_longest_prefix_wins(policy: CacheAware, caches: EngineCaches) -> None:
    for engine, blocks in zip(ENGINES, (10, 40, 90, 0), strict=True):
        holds(caches, engine, PROMPT[: blocks * SIZE])
    assert policy.choose(ask(), ENGINES).engine == ENGINES[2]
    assert policy.choose(ask([PROMPT]), ENGINES).engine == ENGINES[2]
    assert policy.choose(ask(PROMPT[: 30 * SIZE]), ENGINES).engine in ENGINES[1:3]
    assert policy.choose(ask(), ENGINES[:2]).engine == ENGINES[1]
    assert policy.choose(ask(), (ENGINES[3], ENGINES[0])).engine == ENGINES[0]


def evicts(caches: EngineCaches, engine: EngineEndpoint, ids: Sequence[int]) -> None:
    """The engine removes these tokens' blocks."""
    for _ in caches.pictures[engine.name].apply(Removed(hashes(ids), "GPU")):
        pass


def test_a_full_cache_costs_what_it_evicts(policy: CacheAware, caches: EngineCaches) -> None:
    """So prompts with the same first words do not crowd at the engine that has those."""
    holds(caches, ENGINES[0], PROMPT[: 10 * SIZE])
    holds(caches, ENGINES[0], range(90 * SIZE))
    assert policy.choose(ask(), ENGINES).engine == ENGINES[0]
    evicts(caches, ENGINES[0], range(90 * SIZE)[-SIZE:])
    assert caches.pictures[ENGINES[0].name].is_full
    assert policy.choose(ask(), ENGINES).engine in ENGINES[1:]
    assert policy.choose(ask(PROMPT[: 14 * SIZE]), ENGINES).engine == ENGINES[0], (
        "little is evicted"
    )
    holds(caches, ENGINES[0], PROMPT[: 60 * SIZE])
    assert policy.choose(ask(), ENGINES).engine == ENGINES[0], "it would be computed elsewhere"
    evicts(caches, ENGINES[0], PROMPT[: 60 * SIZE])
    for start in (70 * SIZE, 40 * SIZE, 10 * SIZE):
        evicts(caches, ENGINES[0], range(start))
    assert not caches.pictures[ENGINES[0].name].is_full, "it was reset, say"


def test_work_in_flight_counts_as_tokens(
    policy: CacheAware, caches: EngineCaches, in_flight: InFlight
) -> None:
    """One has to compute 160 tokens of the prompt, the others 1601."""
    holds(caches, ENGINES[0], PROMPT[: 90 * SIZE])
    seats = [in_flight.take(ENGINES[0], 1000)]  # and 256 more, as each request
    assert policy.choose(ask(), ENGINES).engine == ENGINES[0]
    seats.append(in_flight.take(ENGINES[0], 0))
    assert policy.choose(ask(), ENGINES).engine != ENGINES[0]
    for engine in ENGINES[1:]:
        seats.append(in_flight.take(engine, 0))
    assert policy.choose(ask(), ENGINES).engine == ENGINES[0]


def test_equal_costs_are_drawn(policy: CacheAware, in_flight: InFlight) -> None:
    chosen = Counter(policy.choose(ask(), ENGINES).engine.name for _ in range(400))
    assert len(chosen) == 4
    seat = in_flight.take(ENGINES[1], 1)
    assert all(policy.choose(ask(), ENGINES).engine != ENGINES[1] for _ in range(50))
    seat.leave()


def test_what_is_loaded_costs_a_little(policy: CacheAware, caches: EngineCaches) -> None:
    for engine in ENGINES[:3]:
        holds(caches, engine, PROMPT)
    names = hashes(PROMPT[:-1])
    for engine in ENGINES[1:3]:
        below = Stored(names, medium="CPU")
        for _ in caches.pictures[engine.name].apply(below):
            pass
    for engine, kept in ((ENGINES[0], 50), (ENGINES[1], 50), (ENGINES[2], 40)):
        for _ in caches.pictures[engine.name].apply(Removed(names[kept:], "GPU")):
            pass
    assert policy.choose(ask(), ENGINES).engine == ENGINES[1]
    assert policy.choose(ask(), [ENGINES[0], ENGINES[2]]).engine == ENGINES[2]


@pytest.mark.parametrize(
    "request_",
    [
        ask("text"),
        ask(truncate_prompt_tokens=100),
        ask([[1, 2], [3, 4]]),
        ask([-1, 2]),
        ask([]),
        RequestPlan("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_without_token_ids_the_estimate_decides(
    policy: CacheAware, caches: EngineCaches, request_: RequestPlan
) -> None:
    holds(caches, ENGINES[2], PROMPT)
    assert request_.blocks is None
    first = policy.choose(request_, ENGINES).engine
    if request_.prefixes.keys:
        assert policy.memory.engines(request_.prefixes.keys[-1]) == (first.name,)
        assert all(policy.choose(request_, ENGINES).engine == first for _ in range(20))


def test_nothing_known_of_any_engine(in_flight: InFlight) -> None:
    policy = CacheAware(in_flight, EngineCaches(), PrefixAffinity(in_flight))
    first = policy.choose(ask(), ENGINES).engine
    assert all(policy.choose(ask(), ENGINES).engine == first for _ in range(20))


def test_an_engine_that_tells_nothing_still_serves(
    policy: CacheAware, caches: EngineCaches, in_flight: InFlight
) -> None:
    caches.leave("prefill-3")
    holds(caches, ENGINES[0], PROMPT)
    assert policy.choose(ask(), ENGINES).engine == ENGINES[0]
    seats = [in_flight.take(engine, 5000) for engine in ENGINES[:3]]
    assert policy.choose(ask(), ENGINES).engine == ENGINES[3]
    for seat in seats:
        seat.leave()
    caches.pictures["prefill-0"].drop()
    assert {policy.choose(ask(), ENGINES).engine.name for _ in range(200)} == {
        e.name for e in ENGINES
    }
    holds(caches, ENGINES[0], PROMPT)
    assert policy.choose(ask(), ENGINES).engine == ENGINES[0]


def test_of_many_engines_those_that_hold_most_are_compared(in_flight: InFlight) -> None:
    engines = [EngineEndpoint(f"prefill-{n}", "prefill", f"http://{n}") for n in range(500)]
    caches = EngineCaches()
    for engine in engines:
        caches.join(engine.name)
        holds(caches, engine, PROMPT[: 10 * SIZE])
    for engine in engines[100:103]:
        holds(caches, engine, PROMPT[: 60 * SIZE])
    policy = CacheAware(in_flight, caches, PrefixAffinity(in_flight))
    seats = [in_flight.take(engine, 300) for engine in engines[100:102]]
    assert policy.choose(ask(), engines).engine == engines[102]
    seats += [in_flight.take(engine, 100_000) for engine in engines[100:103]]
    seats += [in_flight.take(engine, 1000) for engine in engines[:50]]
    chosen = Counter(policy.choose(ask(), engines).engine.name for _ in range(300))
    assert not set(chosen) & {engine.name for engine in [*engines[:50], *engines[100:103]]}
    assert len(chosen) > 100, "those that cost the same share the load"


def test_a_pairer_chooses_by_caches(in_flight: InFlight, caches: EngineCaches) -> None:
    health = Health(RouterMetrics())
    settings = PairingSection(prefill="cache_aware")
    pairer = Pairer(Topology(ENGINES), settings, in_flight, health, Compatibility(), caches)
    holds(caches, ENGINES[3], PROMPT)
    chosen = pairer.choose("prefill", ask())
    assert chosen == Choice(ENGINES[3], 1), "the last token is always computed"
    other = pairer.choose("prefill", ask(), tried=[ENGINES[3]])
    assert other is not None
    assert other.engine in ENGINES[:3]
    assert other.work == len(PROMPT)
    assert set(pairer.memories()) == {"prefill"}
    assert settings.hears_caches
    assert not PairingSection().hears_caches


def test_a_choice_leaves_no_garbage(in_flight: InFlight, caches: EngineCaches) -> None:
    """What holds itself waits for the collector, which then stops all requests for some 25 ms."""
    policy = CacheAware(in_flight, caches, PrefixAffinity(in_flight))
    holds(caches, ENGINES[0], PROMPT)
    holds(caches, ENGINES[1], PROMPT[: 40 * SIZE])
    policy.choose(ask(), ENGINES)
    gc.collect()
    gc.disable()
    try:
        for _ in range(100):
            policy.choose(ask(), ENGINES)
        assert gc.collect() < 50
    finally:
        gc.enable()
