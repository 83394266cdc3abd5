"""What routers tell each other, and that two of them then choose as one would."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from unit.router.pairing.test_policies import ENGINES, ask

from disagg.router.pairing import other_routers
from disagg.router.pairing.in_flight import REQUEST_TOKENS, InFlight
from disagg.router.pairing.other_routers import FRESH_S, Load, OtherRouters
from disagg.router.pairing.policies import LeastLoaded, PrefixAffinity
from disagg.router.pairing.prefix_memory import PrefixMemory
from disagg.router.pairing.request_info import RequestInfo
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

URL = ENGINES[0].url


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_loads_add_up_until_they_are_old() -> None:
    clock = Clock()
    others = OtherRouters(clock)
    in_flight = InFlight(RouterMetrics(), others)
    in_flight.take(ENGINES[0], 1000)
    own = 1000 + REQUEST_TOKENS
    others.hear("a", {URL: Load(500, 2.0), ENGINES[1].url: Load(7)})
    others.hear("b", {URL: Load(300)})
    assert in_flight.cost(ENGINES[0]) == own + 800
    assert in_flight.cost(ENGINES[1]) == 7
    assert others.count() == 2
    clock.now += FRESH_S / 2
    assert others.reading_s(URL) == pytest.approx(2.0 - FRESH_S / 2)  # it has read on meanwhile
    others.hear("b", {URL: Load(200)})
    assert in_flight.cost(ENGINES[0]) == own + 700
    clock.now += FRESH_S * 0.6
    assert in_flight.cost(ENGINES[0]) == own + 200  # "a" is gone, or cut off
    assert others.count() == 1
    others.hear("b", {})
    assert in_flight.cost(ENGINES[0]) == own


def test_only_own_loads_are_told() -> None:
    others = OtherRouters()
    in_flight = InFlight(RouterMetrics(), others)
    others.hear("a", {URL: Load(500)})
    assert in_flight.loads() == {}
    seat = in_flight.take(ENGINES[0], 1000)
    assert in_flight.loads() == {URL: Load(1000 + REQUEST_TOKENS)}
    seat.leave()
    assert in_flight.loads() == {}


def test_news_is_what_changes_who_was_last() -> None:
    memory = PrefixMemory()
    memory.sent([1, 2], "a")
    assert memory.news() == [], "nobody listens yet"
    memory.share()
    memory.sent([1, 2, 3], "a")
    memory.sent([1, 2, 3], "a")
    memory.note([4], "a")  # of another router
    memory.sent([1], "b")
    assert memory.news() == [("a", [3]), ("b", [1])]
    assert memory.news() == []
    assert memory.engines(1) == ("b", "a")


def test_news_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PrefixMemory()
    memory.share()
    for number in range(other_routers.MOST_KEYS):
        memory.sent([10 * number + place for place in range(10)], "a")
    told = sum(len(keys) for _, keys in memory.news())
    assert other_routers.MOST_KEYS <= told < other_routers.MOST_KEYS + 10
    memory.sent([1 << 40], "a")
    assert memory.news() == [("a", [1 << 40])]


@dataclass
class OneRouter:
    """The deciding parts of a router, without HTTP."""

    others: OtherRouters = field(default_factory=OtherRouters)

    def __post_init__(self) -> None:
        self.in_flight = InFlight(RouterMetrics(), self.others)
        self.affinity = PrefixAffinity(self.in_flight)
        self.affinity.memory.share()
        self.least = LeastLoaded(self.in_flight)
        self.least._random = random.Random(1)  # the same draws each time

    def tell(self, name: str, another: OneRouter) -> None:
        for engine, keys in self.affinity.memory.news():
            another.affinity.memory.note(keys, engine)
        another.others.hear(name, self.in_flight.loads())


def exchange(routers: list[OneRouter]) -> None:
    for number, teller in enumerate(routers):
        for another in routers:
            if another is not teller:
                teller.tell(str(number), another)


def reused(routers: list[OneRouter], *, tell: bool) -> float:
    """Of later turns of 200 conversations, the share that goes to the engine of the turn before.
    Each turn is a request at any of the routers; eight are in flight at a time."""
    draw, again, turns = random.Random(5), 0, 0
    talks = [[draw.randrange(5000) for _ in range(600)] for _ in range(200)]
    last: dict[int, EngineEndpoint] = {}
    for number, talk in enumerate(draw.sample([*range(200)] * 6, 1200)):
        router = draw.choice(routers)
        request: RequestInfo = ask(talks[talk])
        chosen = router.affinity.choose(request, ENGINES).engine
        if talk in last:
            turns += 1
            again += chosen == last[talk]
        last[talk] = chosen
        talks[talk] += [draw.randrange(5000) for _ in range(300)]
        if tell and number % 8 == 0:
            exchange(routers)
    return again / turns


def test_conversations_stay_where_they_are_as_with_one_router() -> None:
    alone = reused([OneRouter()], tell=False)
    together = reused([OneRouter(), OneRouter()], tell=True)
    apart = reused([OneRouter(), OneRouter()], tell=False)
    assert alone == 1.0
    assert together > 0.95
    assert apart < 0.8


def largest_gap(count: int, *, tell: bool) -> float:
    """The busiest engine's work over the mean, on average, while 40 long prompts are in flight."""
    draw, routers = random.Random(9), [OneRouter() for _ in range(count)]
    seats, gaps = [], []
    load = Counter[str]()
    for number in range(2000):
        router, tokens = draw.choice(routers), draw.choice([500, 20_000])
        engine = router.least.choose(ask("x"), ENGINES).engine
        seats.append((router.in_flight.take(engine, tokens), engine.name, tokens))
        load[engine.name] += tokens
        if len(seats) > 40:
            seat, name, done = seats.pop(draw.randrange(len(seats)))
            seat.leave()
            load[name] -= done
        if tell and number % 8 == 0:
            exchange(routers)
        gaps.append(max(load.values()) / max(1.0, load.total() / len(ENGINES)))
    return sum(gaps[200:]) / len(gaps[200:])


def test_four_routers_spread_load_about_as_one_does() -> None:
    one, told, untold = (
        largest_gap(1, tell=False),
        largest_gap(4, tell=True),
        largest_gap(4, tell=False),
    )
    print(f"one router {one:.2f}, four that tell {told:.2f}, four that do not {untold:.2f}")
    assert one < told < untold
