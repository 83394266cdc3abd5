"""A request whose engine fails while the others have no free seat, or are paused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from unit.router.conftest import FakeEngine, Setup, wait_for

from disagg.testing.http import client

Make = Callable[..., Setup]


def ask(setup: Setup, prompt: str = "x", *, stream: bool = True) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "stream": stream}
    return client().post(f"{setup.url}/v1/completions", json=body, timeout=20)


def metric(setup: Setup, name: str) -> float:
    lines = client().get(f"{setup.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def gated(*engines: FakeEngine) -> list[threading.Event]:
    """Each engine answers later requests once its event is set."""
    gates = [threading.Event() for _ in engines]
    for engine, gate in zip(engines, gates, strict=True):
        engine.gate = gate
    return gates


@pytest.mark.parametrize("after", [0, 1])
def test_it_waits_at_the_head_of_the_queue(make: Make, after: int) -> None:
    """Its engine dies after this many events: before the first, the request is retried at another
    engine; later, another engine continues the stream."""
    setup = make(limits={"max_in_flight": 2}, others=["prefill", "decode"])
    dying, well = setup.decode, setup.others[1]
    dying.cut_after = after
    dies, room = gated(dying, well)
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(ask, setup, name) for name in ("one", "two")]
        assert wait_for(lambda: dying.bodies and well.bodies)
        (waits,) = gated(dying)
        third = pool.submit(ask, setup, "third")  # gets the last seat
        assert wait_for(lambda: metric(setup, "disagg_router_queued") == 1)
        dies.set()
        assert wait_for(lambda: len(dying.bodies) == 2)
        assert wait_for(lambda: metric(setup, "disagg_router_queued") == 1)
        fourth = pool.submit(ask, setup, "fourth")
        assert wait_for(lambda: metric(setup, "disagg_router_queued") == 2)
        dying.cut_after = None
        room.set()
        assert wait_for(lambda: len(well.bodies) == 3)
        waits.set()
        answers = [job.result() for job in (*first, third, fourth)]
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    assert all("error" not in answer.text for answer in answers)
    assert [body["prompt"] for body in well.bodies[1:]] == [dying.bodies[0]["prompt"], "fourth"]
    assert metric(setup, "disagg_router_queued") == metric(setup, "disagg_router_in_flight") == 0


def test_no_room_in_time(make: Make) -> None:
    limits = {"max_in_flight_per_engine": 1, "queue_timeout_s": 0.3}
    setup = make(limits=limits, others=["prefill", "decode"])
    dying, well = setup.decode, setup.others[1]
    dying.cut_after = 1
    dies, room = gated(dying, well)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(ask, setup) for _ in range(2)]
        assert wait_for(lambda: dying.bodies and well.bodies)
        dies.set()
        assert wait_for(lambda: any(job.done() for job in jobs))
        room.set()
        texts = sorted(job.result().text.count('"error"') for job in jobs)
    assert texts == [0, 1]
    assert metric(setup, 'disagg_router_migrations_total{outcome="failed"}') == 1
    assert metric(setup, "disagg_router_queued") == metric(setup, "disagg_router_in_flight") == 0


def test_a_refused_request_does_not_wait_for_its_own_seat(make: Make) -> None:
    setup = make(limits={"max_in_flight": 1}, others=["prefill", "decode"])
    refusing = setup.decode
    refusing.status = 500
    for _ in range(40):  # the choice among the two is random
        assert ask(setup, stream=False).status_code == 200
        if refusing.bodies:
            break
    assert refusing.bodies
    assert metric(setup, "disagg_router_queue_seconds_count") == 0


def test_a_paused_engine_is_tried_when_no_other_is_left(make: Make) -> None:
    setup = make(others=["prefill", "decode"])
    resting, failing = setup.decode, setup.others[1]
    resting.status = 503
    for _ in range(20):
        assert ask(setup, stream=False).status_code == 200
        if metric(setup, "disagg_router_engine_resting"):
            break
    assert metric(setup, "disagg_router_engine_resting") == 1
    resting.status, failing.status = 200, 503
    assert ask(setup, stream=False).status_code == 200
