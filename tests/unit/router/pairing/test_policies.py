"""Policies, the load and health they go by, and legs that are tried again elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from unit.router.conftest import PARAMS, Setup

from disagg.config import PairingSection
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.policies import LeastLoaded, Pairer, PrefixAffinity, SessionAffinity
from disagg.router.request.plan import RequestPlan
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint, Topology
from disagg.testing.http import client

ENGINES = [EngineEndpoint(f"decode-{n}", "decode", f"http://127.0.0.1:{n}") for n in range(4)]
Make = Callable[..., Setup]


@pytest.fixture
def in_flight() -> InFlight:
    return InFlight(RouterMetrics())


@pytest.fixture
def health() -> Health:
    return Health(RouterMetrics())


def ask(prompt: Any, **headers: str) -> RequestPlan:
    return RequestPlan("/v1/completions", {"model": "m", "prompt": prompt}, headers)


def chosen_of(pairer: Pairer, *args: Any, **more: Any) -> EngineEndpoint | None:
    """The engine that `pairer.choose` names."""
    chosen = pairer.choose(*args, **more)
    return None if chosen is None else chosen.engine


def test_least_loaded(in_flight: InFlight) -> None:
    seats = [in_flight.take(engine, 1000) for engine in ENGINES[:3]]
    policy = LeastLoaded(in_flight)
    chosen = Counter(policy.choose(ask("x"), ENGINES).engine.name for _ in range(400))
    assert chosen["decode-3"] > 150, "it is in half of all draws"
    for seat in seats:
        seat.leave()
        seat.leave()
    assert [in_flight.cost(engine) for engine in ENGINES] == [0] * 4
    assert policy.choose(ask("x"), ENGINES[:1]).engine == ENGINES[0]


def test_prefix_affinity(in_flight: InFlight) -> None:
    policy = PrefixAffinity(in_flight)
    turn = list(range(2000))
    first = policy.choose(ask(turn), ENGINES).engine
    for _ in range(5):
        turn = [*turn, *range(300)]
        assert policy.choose(ask(turn), ENGINES).engine == first
    seat = in_flight.take(first, 1700)
    assert policy.choose(ask(turn), ENGINES).engine == first, "it is a little busier"
    seat.leave()
    seat = in_flight.take(first, 10_000)
    assert policy.choose(ask(turn), ENGINES).engine != first, "it is clearly busier"
    seat.leave()
    rest = [engine for engine in ENGINES if engine != first]
    assert policy.choose(ask(turn), rest).engine in rest


def test_a_known_prefix_is_no_work(in_flight: InFlight) -> None:
    """So the engine of many conversations is not taken for a busy one."""
    policy = PrefixAffinity(in_flight)
    turn = list(range(2000))
    first = policy.choose(ask(turn), ENGINES)
    assert first.work == 2000
    again = policy.choose(ask([*turn, *range(100)]), ENGINES)
    assert (again.engine, again.work) == (first.engine, 2100 - 2000 // 128 * 128)
    assert policy.choose(ask("other words"), ENGINES).work == ask("other words").tokens


def test_a_long_prefix_is_worth_a_long_wait(in_flight: InFlight) -> None:
    policy = PrefixAffinity(in_flight)
    turn = list(range(20_000))
    first = policy.choose(ask(turn), ENGINES).engine
    in_flight.take(first, 15_000)
    assert policy.choose(ask(turn), ENGINES).engine == first
    in_flight.take(first, 6000)
    assert policy.choose(ask(turn), ENGINES).engine != first


def test_a_prefix_of_many_prompts_goes_to_all_engines(in_flight: InFlight) -> None:
    """Else the first few that had it would crowd, and evict what they have."""
    policy = PrefixAffinity(in_flight)
    shared = list(range(500))
    for number in range(40):
        own = list(range(1000 * number, 1000 * number + 3000))
        chosen = policy.choose(ask([*shared, *own]), ENGINES)
        in_flight.take(chosen.engine, chosen.work)
    assert min(in_flight.requests(engine) for engine in ENGINES) > 5


def test_session_affinity(in_flight: InFlight) -> None:
    policy = SessionAffinity("X-Session-Id", in_flight)
    homes = {
        name: policy.choose(ask("x", **{"x-session-id": name}), ENGINES).engine
        for name in map(str, range(200))
    }
    assert set(homes.values()) == set(ENGINES)
    left = ENGINES[:3]
    for name, home in homes.items():
        again = SessionAffinity("x-session-id", in_flight)
        moved = again.choose(ask("y", **{"x-session-id": name}), left).engine
        assert moved == home or home == ENGINES[3], "only sessions of the engine that went move"


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "prefix_affinity"])
def test_pairer_never_names_one_twice(in_flight: InFlight, health: Health, name: Any) -> None:
    pairer = Pairer(
        Topology(ENGINES), PairingSection(decode=name), in_flight, health, Compatibility()
    )
    tried: list[EngineEndpoint] = []
    while (engine := chosen_of(pairer, "decode", ask("x"), tried)) is not None:
        tried.append(engine)
    assert sorted(e.name for e in tried) == [e.name for e in ENGINES]
    assert chosen_of(pairer, "prefill", ask("x")) is None


def test_an_engine_that_rests_is_tried_by_one_request(in_flight: InFlight) -> None:
    now = 1000.0
    health = Health(RouterMetrics(), lambda: now)
    pairer = Pairer(Topology(ENGINES[:2]), PairingSection(), in_flight, health, Compatibility())
    for _ in range(3):
        health.failed(ENGINES[0])
    for _ in range(2):
        now += 30
        chosen = [chosen_of(pairer, "decode", ask("x"), ENGINES[1:]) for _ in range(5)]
        assert chosen == [ENGINES[0], *[None] * 4]
        assert pairer.awaits("decode", ENGINES[1:]), "the others wait for what comes of it"
        assert health.usable(ENGINES[:2]) == ENGINES[1:2], "the first of them was the trial"
    now += 30
    got = Counter(chosen_of(pairer, "decode", ask("x")) for _ in range(100))
    assert got[ENGINES[0]] <= 1


def test_no_engine_gets_more_than_it_has_room_for(in_flight: InFlight, health: Health) -> None:
    pairer = Pairer(Topology(ENGINES[:2]), PairingSection(), in_flight, health, Compatibility())
    for _ in range(4):
        engine = chosen_of(pairer, "decode", ask("x"), room=2)
        assert engine is not None
        in_flight.take(engine, 10)
    assert [in_flight.requests(engine) for engine in ENGINES[:2]] == [2, 2]
    assert chosen_of(pairer, "decode", ask("x"), room=2) is None
    assert chosen_of(pairer, "decode", ask("x")) is not None
    assert pairer.serves("decode"), "a seat may become free"
    assert not pairer.serves("decode", ENGINES[:2])
    assert not pairer.serves("prefill")


def test_engines_that_do_not_fit_are_not_paired(in_flight: InFlight, health: Health) -> None:
    prefills = [EngineEndpoint(f"prefill-{n}", "prefill", "") for n in range(2)]
    fits = Compatibility()
    own = {"max_model_len": "8", "chats": "parsed"}  # nothing to the other engine
    fits.note(prefills[0], {"vllm": "1", "dtype": "float32", "other": "a", **own})
    fits.note(prefills[1], {"vllm": "1", "dtype": "bfloat16"})
    own = {"max_model_len": "16", "chats": "plain"}
    fits.note(ENGINES[0], {"vllm": "1", "dtype": "float32", **own})
    fits.note(ENGINES[1], {"vllm": "2"})
    topology = Topology([*prefills, *ENGINES])
    pairer = Pairer(topology, PairingSection(), in_flight, health, fits)

    def partners(decode: EngineEndpoint) -> set[str]:
        chosen = (chosen_of(pairer, "prefill", ask("x"), partner=decode) for _ in range(50))
        return {engine.name for engine in chosen if engine}

    assert partners(ENGINES[0]) == {"prefill-0"}
    assert partners(ENGINES[1]) == set()
    assert partners(ENGINES[2]) == {"prefill-0", "prefill-1"}, "it said nothing"
    fits.forget(ENGINES[1])
    assert partners(ENGINES[1]) == {"prefill-0", "prefill-1"}


# ---- over HTTP, with engines that fail on purpose -----------------------------------------


def complete(setup: Setup) -> httpx.Response:
    body = {"model": "m", "prompt": "x", "stream": False}
    return client().post(f"{setup.url}/v1/completions", json=body, timeout=20)


def metric(setup: Setup, name: str) -> float:
    lines = client().get(f"{setup.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("fault", ["status", "dead"])
def test_a_failing_prefill_is_replaced(make: Make, fault: str) -> None:
    setup = make(others=["prefill"], section={"probe_interval_s": 60})  # requests find it
    if fault == "status":
        setup.prefill.status = 503
    else:
        setup.lose(setup.prefill)
    assert [complete(setup).status_code for _ in range(20)] == [200] * 20
    assert [body["kv_transfer_params"] for body in setup.decode.bodies] == [PARAMS] * 20
    assert metric(setup, "disagg_router_retries_total") >= 1
    assert len(setup.prefill.bodies) <= 4, "it rests after three failures"
    assert metric(setup, "disagg_router_local_total") == 0
    assert metric(setup, "disagg_router_in_flight") == 0


@pytest.mark.parametrize("fault", [500, 503, "dead"])
def test_a_failing_decode_is_replaced(make: Make, fault: Any) -> None:
    setup = make(others=["prefill", "decode"], section={"probe_interval_s": 60})
    if fault == "dead":
        setup.lose(setup.decode)
    else:
        setup.decode.status = fault
    assert [complete(setup).status_code for _ in range(20)] == [200] * 20
    assert all(body["kv_transfer_params"] == PARAMS for body in setup.others[1].bodies)
    assert metric(setup, 'disagg_router_retries_total{role="decode"}') >= 1
    assert setup.prefill.released == setup.others[0].released == []
    assert metric(setup, "disagg_router_in_flight") == 0


def test_all_decodes_fail(make: Make) -> None:
    setup = make(others=["prefill", "decode"])
    setup.decode.status = setup.others[1].status = 500
    answer = complete(setup)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "told to"
    deadline = time.monotonic() + 5
    while not setup.prefill.released + setup.others[0].released and time.monotonic() < deadline:
        time.sleep(0.02)
    assert setup.prefill.released + setup.others[0].released == [PARAMS]
