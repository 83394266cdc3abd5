"""Where an engine fetches a prefix, and whether it should: without engines."""

from __future__ import annotations

from typing import Any

import pytest
from unit.router.pairing.test_cache_aware import ENGINES, PROMPT, SIZE, ask, holds

from disagg.config import PairingSection
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.pairing.cache_aware import CacheAware
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.policies import PrefixAffinity
from disagg.router.pairing.sharing import LEAST_TOKENS, Moves, Sharing, Source
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint, Topology

DECODE = EngineEndpoint("decode-0", "decode", "http://127.0.0.1:9")
ALL = (*ENGINES, DECODE)


class Scene:
    """Engines of both roles, which hold one block each."""

    def __init__(self, *, always: bool = False) -> None:
        self.metrics = RouterMetrics()
        self.in_flight, self.caches = InFlight(self.metrics), EngineCaches()
        topology, self.compatibility = Topology(ALL), Compatibility()
        self.health = Health(self.metrics, is_known=topology.has)
        self.moves = Moves(self.in_flight, always=always)
        self.sharing = Sharing(
            topology, self.caches, self.in_flight, self.health, self.compatibility, self.moves
        )
        for engine in ALL:
            self.caches.join(engine.name)
            holds(self.caches, engine, [1] * SIZE)

    def holds(self, engine: EngineEndpoint, blocks: int) -> None:
        holds(self.caches, engine, PROMPT[: blocks * SIZE])

    def computes(self, tokens: int, seconds: float) -> None:
        """An engine has computed so many tokens in this time."""
        self.in_flight._speed.learn(tokens, seconds)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_engine_that_holds_most_is_the_source(scene: Scene) -> None:
    """Whatever its role."""
    scene.holds(ENGINES[1], 20)
    scene.holds(DECODE, 60)
    asked = ask()
    assert scene.sharing.source(asked, ENGINES[0]) == Source(DECODE, 60 * SIZE, 60 * SIZE)
    assert scene.sharing.source(asked, ENGINES[1]) == Source(DECODE, 60 * SIZE, 40 * SIZE)
    assert scene.sharing.source(asked, DECODE) is None, "it would be itself"
    assert asked.blocks is not None
    assert scene.sharing.held_anywhere(asked.blocks, "m") == 60 * SIZE


def test_a_few_tokens_are_computed(scene: Scene) -> None:
    scene.holds(DECODE, 60)
    few = LEAST_TOKENS // SIZE - 1
    scene.holds(ENGINES[0], 60 - few)
    assert scene.sharing.source(ask(), ENGINES[0]) is None
    scene.holds(ENGINES[1], 59 - few)
    assert scene.sharing.source(ask(), ENGINES[1]) is not None


def test_of_equal_sources_the_idle_one_answers(scene: Scene) -> None:
    for engine in ENGINES[1:]:
        scene.holds(engine, 50)
    scene.in_flight.take(ENGINES[1], 10)
    scene.in_flight.take(ENGINES[3], 10)
    found = scene.sharing.source(ask(), ENGINES[0])
    assert found is not None
    assert found.engine == ENGINES[2]


def test_sources_are_up_and_fit(scene: Scene) -> None:
    """The next best serves otherwise."""
    scene.holds(ENGINES[1], 90)
    scene.holds(ENGINES[2], 80)
    scene.holds(ENGINES[3], 70)
    scene.compatibility.note(ENGINES[0], {"block_size": "16"})
    scene.compatibility.note(ENGINES[1], {"block_size": "32"})
    for _ in range(3):
        scene.health.failed(ENGINES[2])
    assert scene.sharing.source(ask(), ENGINES[0]) == Source(ENGINES[3], 70 * SIZE, 70 * SIZE)


@pytest.mark.parametrize(
    "prompt", ["a text", [PROMPT, PROMPT], PROMPT[: SIZE + 3]], ids=["text", "several", "short"]
)
def test_nothing_is_known(scene: Scene, prompt: Any) -> None:
    scene.holds(ENGINES[1], 90)
    assert scene.sharing.source(ask(prompt), ENGINES[0]) is None


def test_a_move_that_takes_longer_is_not_made(scene: Scene) -> None:
    """By the measured speeds; now and then it is tried all the same."""
    scene.holds(DECODE, 60)
    scene.computes(1000, 1.0)
    scene.moves.asked(0.1)  # as long as 100 tokens
    scene.moves.fetched(1000, 0.5)
    assert scene.sharing.source(ask(), ENGINES[0]) is not None
    scene.holds(ENGINES[1], 50)
    assert scene.sharing.source(ask(), ENGINES[1]) is None, "160 tokens: 0.18 s against 0.16 s"
    found = [scene.sharing.source(ask(), ENGINES[1]) for _ in range(63)]
    assert sum(one is not None for one in found) == 2
    scene.moves.fetched(100_000, 0.0)  # the link got better
    assert scene.sharing.source(ask(), ENGINES[1]) is not None


def test_what_each_prompt_takes_anyway_is_not_saved(scene: Scene) -> None:
    """A step takes 0.2 s of its own. To fetch 70 tokens takes 0.054 s and spares 0.035 s; a mean
    per token would say 0.055 s."""
    for tokens in (100, 400, 1600) * 10:
        scene.computes(tokens, 0.2 + 0.0005 * tokens)
    scene.moves.asked(0.05)
    scene.moves.fetched(1000, 0.05)
    assert not scene.moves.pay(70)
    assert scene.moves.pay(1000)


def test_always() -> None:
    scene = Scene(always=True)
    scene.holds(DECODE, 60)
    scene.computes(1_000_000, 1.0)
    scene.moves.asked(10.0)
    assert scene.sharing.source(ask(), ENGINES[0]) is not None


def test_what_can_be_fetched_costs_little(scene: Scene) -> None:
    """So the queue decides: the engine that holds the prefix is busy with another one."""
    policy = CacheAware(
        scene.in_flight, scene.caches, PrefixAffinity(scene.in_flight), scene.sharing
    )
    scene.holds(ENGINES[0], 90)
    asked = ask()
    assert policy.choose(asked, ENGINES).engine == ENGINES[0]
    scene.in_flight.take(ENGINES[0], 0)  # 256 tokens, more than a tenth of 90 blocks
    assert policy.choose(asked, ENGINES).engine in ENGINES[1:]
    alone = CacheAware(scene.in_flight, scene.caches, PrefixAffinity(scene.in_flight))
    assert alone.choose(asked, ENGINES).engine == ENGINES[0], "nobody shares"


@pytest.mark.parametrize("how", ["if_faster", "always"])
def test_sharing_needs_to_know(how: str) -> None:
    with pytest.raises(ValueError, match=r"share_caches.*cache_aware"):
        PairingSection.model_validate({"share_caches": how})
    section = PairingSection.model_validate({"share_caches": how, "prefill": "cache_aware"})
    assert section.shares_caches
    assert not PairingSection().shares_caches
