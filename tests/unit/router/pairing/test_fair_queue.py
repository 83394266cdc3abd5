"""Who is next when requests wait: shares by tokens, priorities, and room in a full queue."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from unit.router.conftest import Setup
from unit.router.pairing.test_admission import metric, until

from disagg.config import ShareSection
from disagg.credentials import ApiKey
from disagg.router.pairing.fair_queue import FairQueue, Served
from disagg.testing.http import client

Make = Callable[..., Setup]
KEYS = [ApiKey("flood", "of-flood"), ApiKey("calm", "of-calm"), ApiKey("urgent", "of-urgent")]


def serve(queue: FairQueue[str], served: Served, count: int, tokens: int = 100) -> list[str]:
    """The next requests, each of so many tokens."""
    order = []
    for _ in range(count):
        found = queue.next()
        assert found is not None
        who, item = found
        assert queue.remove(item)
        served.seats(who, tokens)
        order.append(item)
    return order


def test_tokens_are_shared_by_weight() -> None:
    served = Served({"a": ShareSection(weight=3), "*": ShareSection(weight=1)})
    queue = FairQueue[str](served)
    for number in range(100):
        queue.push("a", f"a{number}")
        queue.push("b", f"b{number}")
    order = serve(queue, served, 40)
    assert Counter(item[0] for item in order) == {"a": 30, "b": 10}
    assert [item for item in order if item[0] == "a"] == [f"a{n}" for n in range(30)]


def test_long_requests_cost_more_than_short_ones() -> None:
    served = Served({})
    queue = FairQueue[str](served)
    for number in range(100):
        queue.push("long", f"long{number}")
        queue.push("short", f"short{number}")
    order = list[str]()
    for _ in range(44):
        found = queue.next()
        assert found is not None
        served.seats(found[0], 1000 if found[0] == "long" else 100)
        queue.remove(found[1])
        order.append(found[1])
    assert sum(item.startswith("long") for item in order) == 4


def test_who_was_away_has_no_credit() -> None:
    """Else a client that asks once a day could take all seats for an hour."""
    served = Served({})
    queue = FairQueue[str](served)
    for number in range(50):
        queue.push("busy", f"busy{number}")
    serve(queue, served, 40)
    for number in range(50):
        queue.push("late", f"late{number}")
    assert Counter(item[:4] for item in serve(queue, served, 10)) == {"busy": 5, "late": 5}


def test_who_was_away_while_nobody_waited_has_no_credit() -> None:
    """Seats that are given at once count too."""
    served = Served({})
    queue = FairQueue[str](served)
    for _ in range(50):
        served.comes("busy")
        served.seats("busy", 100)
    for number in range(50):
        queue.push("late", f"late{number}")
        queue.push("busy", f"busy{number}")
    order = serve(queue, served, 20)
    assert order[0] == "late0"
    assert abs(Counter(item[:4] for item in order)["late"] - 10) <= 1


def test_priorities_come_before_shares() -> None:
    served = Served({"urgent": ShareSection(priority=-1), "rich": ShareSection(weight=100)})
    queue = FairQueue[str](served)
    for number in range(3):
        for who in ("rich", "other", "urgent"):
            queue.push(who, f"{who}{number}")
    assert serve(queue, served, 3) == ["urgent0", "urgent1", "urgent2"]


def test_the_one_with_most_waiting_gives_way() -> None:
    served = Served({"big": ShareSection(weight=10)})
    queue = FairQueue[str](served)
    for number in range(10):
        queue.push("flood", f"flood{number}")
    queue.push("big", "big0")
    assert queue.to_give_way("calm") == "flood9"
    assert queue.to_give_way("flood") is None
    for number in range(9):
        queue.push("calm", f"calm{number}")
    assert queue.to_give_way("calm") is None


def ask(setup: Setup, key: ApiKey) -> int:
    headers = {"authorization": f"Bearer {key.value}"}
    body = {"model": "m", "prompt": "x"}
    url = f"{setup.url}/v1/completions"
    return client().post(url, json=body, headers=headers, timeout=30).status_code


@pytest.mark.parametrize("who", [1, 2])
def test_a_flood_costs_another_client_one_step(make: Make, who: int) -> None:
    """One seat, twenty requests of one client, then one of another."""
    shares = {"urgent": {"priority": -1}}
    setup = make(api_keys=KEYS, limits={"max_in_flight_per_engine": 1}, section={"shares": shares})
    gate = setup.decode.gate = threading.Event()
    with ThreadPoolExecutor(21) as pool:
        flood = [pool.submit(ask, setup, KEYS[0]) for _ in range(20)]
        until(lambda: metric(setup, "disagg_router_queued") == 19)
        other = pool.submit(ask, setup, KEYS[who])
        until(lambda: metric(setup, "disagg_router_queued") == 20)
        setup.decode.first_byte_s = 0.1
        gate.set()
        assert other.result() == 200
        assert sum(one.done() for one in flood) <= 2
        assert [one.result() for one in flood] == [200] * 20


def test_a_full_queue_has_room_for_others(make: Make) -> None:
    limits = {"max_in_flight_per_engine": 1, "max_queued": 4}
    setup = make(api_keys=KEYS, limits=limits)
    gate = setup.decode.gate = threading.Event()
    with ThreadPoolExecutor(12) as pool:
        flood = [pool.submit(ask, setup, KEYS[0]) for _ in range(5)]
        until(lambda: metric(setup, "disagg_router_queued") == 4)
        other = pool.submit(ask, setup, KEYS[1])
        until(lambda: sum(one.done() for one in flood) == 1)
        assert ask(setup, KEYS[0]) == 429
        gate.set()
        assert other.result() == 200
        assert sorted(one.result() for one in flood) == [200] * 4 + [429]
