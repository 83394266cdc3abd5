"""Which requests are admitted, queued or refused, and which prompts decode computes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import agent_bodies
import httpx
import pytest
from unit.router.conftest import PARAMS, Setup

from disagg.config import LimitsSection, PairingSection, Role
from disagg.router.api.errors import ApiError
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.pairing.admission import Admission
from disagg.router.pairing.fair_queue import Served
from disagg.router.pairing.in_flight import InFlight, Seat
from disagg.router.pairing.policies import Pairer
from disagg.router.request.plan import RequestPlan
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint, Topology
from disagg.testing.http import client

Make = Callable[..., Setup]


def complete(setup: Setup, prompt: Any = "x", timeout: float = 20) -> httpx.Response:
    body = {"model": "m", "prompt": prompt}
    return client().post(f"{setup.url}/v1/completions", json=body, timeout=timeout)


def metric(setup: Setup, name: str) -> float:
    lines = client().get(f"{setup.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def test_requests_queue_in_order_and_get_429_when_the_queue_is_full(
    make: Make, gate: threading.Event
) -> None:
    setup = make(limits={"max_in_flight": 2, "max_queued": 1})
    setup.decode.gate = gate
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(complete, setup) for _ in range(3)]
        until(lambda: metric(setup, "disagg_router_queued") == 1)
        until(lambda: len(setup.decode.bodies) == 2)
        refused = complete(setup)
        gate.set()
        assert [job.result().status_code for job in jobs] == [200] * 3
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "RateLimitError"
    assert metric(setup, "disagg_router_queue_seconds_count") == 1
    assert metric(setup, "disagg_router_in_flight") == metric(setup, "disagg_router_queued") == 0
    assert len(setup.prefill.bodies) == 3, "nothing was computed for who was sent away"


def test_a_wait_has_a_deadline(make: Make, gate: threading.Event) -> None:
    setup = make(limits={"max_in_flight_per_engine": 1, "queue_timeout_s": 0.3})
    setup.decode.gate = gate
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(complete, setup)
        until(lambda: len(setup.decode.bodies) == 1)
        began = time.monotonic()
        assert complete(setup).status_code == 429
        assert 0.2 < time.monotonic() - began < 5
        gate.set()
        assert first.result().status_code == 200
    assert complete(setup).status_code == 200
    assert metric(setup, "disagg_router_in_flight") == metric(setup, "disagg_router_queued") == 0


def test_a_client_that_leaves_the_queue_takes_no_seat(make: Make, gate: threading.Event) -> None:
    setup = make(limits={"max_in_flight": 1})
    setup.decode.gate = gate
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(complete, setup)
        until(lambda: len(setup.decode.bodies) == 1)
        with pytest.raises(httpx.ReadTimeout):
            complete(setup, timeout=0.3)
        until(lambda: metric(setup, "disagg_router_queued") == 0)
        second = pool.submit(complete, setup)
        until(lambda: metric(setup, "disagg_router_queued") == 1)
        gate.set()
        assert first.result().status_code == second.result().status_code == 200
    assert len(setup.decode.bodies) == 2
    assert metric(setup, "disagg_router_in_flight") == 0


def test_the_fuller_engine_is_passed_over(make: Make, gate: threading.Event) -> None:
    setup = make(limits={"max_in_flight_per_engine": 1}, others=["prefill", "decode"])
    setup.decode.gate = setup.others[1].gate = gate
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(complete, setup) for _ in range(2)]
        until(lambda: len(setup.decode.bodies) == len(setup.others[1].bodies) == 1)
        gate.set()
        assert [job.result().status_code for job in jobs] == [200] * 2


def test_prompts_that_are_too_long(make: Make) -> None:
    setup = make(limits={"max_prompt_tokens": 100})
    assert complete(setup, list(range(100))).status_code == 200
    answer = complete(setup, list(range(101)))
    assert answer.status_code == 400
    assert "101 tokens" in answer.json()["error"]["message"]
    assert len(setup.prefill.bodies) == len(setup.decode.bodies) == 1


# ---- seats, without HTTP -----------------------------------------------------------------------

REQUEST = RequestPlan("/v1/completions", {"model": "m", "prompt": "x"}, {})
ENGINES = [EngineEndpoint(f"decode-{n}", "decode", f"http://127.0.0.1:{n}") for n in (1, 2)]


class Seats:
    """An admission of two decode engines, and what it has given out."""

    def __init__(self, **limits: float) -> None:
        metrics = RouterMetrics()
        self.in_flight = InFlight(metrics)
        pairer = Pairer(
            Topology(ENGINES), PairingSection(), self.in_flight, Health(metrics), Compatibility()
        )
        section = LimitsSection.model_validate(limits)
        self.served: dict[Role, Served] = {"prefill": Served({}), "decode": Served({})}
        self.admission = Admission(pairer, self.in_flight, section, metrics, self.served)

    def free(self) -> Seat:
        seat = self.admission.another("decode", REQUEST)
        assert seat is not None
        return seat

    def taken(self) -> int:
        return self.in_flight.of_role("decode")

    async def asks(self, *tried: EngineEndpoint) -> asyncio.Task[Seat | None]:
        """A request that waits in the queue by now."""
        task = asyncio.create_task(
            self.admission.seat("decode", REQUEST, tried, is_admitted=bool(tried))
        )
        await asyncio.sleep(0)
        return task


def test_a_seat_won_at_the_moment_of_time_out_goes_to_the_next() -> None:
    async def run() -> None:
        seats = Seats(max_in_flight=1, queue_timeout_s=0.05)
        loop, taken = asyncio.get_running_loop(), seats.free()
        asked = loop.time()
        late = await seats.asks()
        loop.call_at(asked + 0.04, taken.leave)
        time.sleep(0.1)  # noqa: ASYNC251  both come due in one round of the loop
        with pytest.raises(ApiError) as refused:
            await late
        assert refused.value.status == 429
        assert seats.taken() == 0
        seats.free()

    asyncio.run(run())


def test_a_seat_won_by_a_client_that_leaves_goes_to_the_next() -> None:
    async def run() -> None:
        seats = Seats(max_in_flight=1)
        taken = seats.free()
        leaving, waiting = await seats.asks(), await seats.asks()
        taken.leave()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        seat = await waiting
        assert seat is not None
        assert seats.taken() == 1
        seat.leave()
        assert seats.taken() == 0

    asyncio.run(run())


def test_who_was_admitted_before_is_first_and_others_in_order() -> None:
    async def run() -> None:
        seats = Seats(max_in_flight=2, max_in_flight_per_engine=1, max_queued=2)
        held = [seats.free(), seats.free()]
        first, second = await seats.asks(), await seats.asks()
        again = await seats.asks(held[0].engine)  # however long the queue is
        with pytest.raises(ApiError):
            await seats.admission.seat("decode", REQUEST)
        held[0].leave()  # of no use to the one that has tried this engine
        seat = await first
        assert seat is not None
        assert seat.engine == held[0].engine
        assert not again.done()
        held[1].leave()
        seat = await again
        assert seat is not None
        assert seat.engine == held[1].engine
        assert not second.done()
        seat.leave()
        assert (await second) is not None
        assert seats.taken() == 2

    asyncio.run(run())


def test_nobody_passes_those_who_wait() -> None:
    """Although a seat is free that they have not heard of."""

    async def run() -> None:
        seats = Seats(max_in_flight=1)
        held = seats.free()
        first = await seats.asks()
        seats.in_flight._by_role["decode"] = 0  # as after a change that nobody announced
        second = await seats.asks()
        assert not second.done()
        seats.admission.admit_waiting()
        await asyncio.sleep(0.01)
        assert first.done()
        assert not second.done()
        second.cancel()
        held.leave()

    asyncio.run(run())


def test_a_client_pays_for_its_seat_once() -> None:
    """Not while it waits for one, nor for another one after a failure."""

    async def run() -> None:
        seats = Seats(max_in_flight=1)
        served = seats.served["decode"]
        first = await seats.admission.seat("decode", REQUEST)
        assert first is not None
        price = served.level(REQUEST.client)
        assert price > 0
        waiting, again = await seats.asks(), await seats.asks(first.engine)
        for _ in range(3):
            seats.admission.admit_waiting()
        first.leave()
        second = await again
        assert second is not None
        assert served.level(REQUEST.client) == price
        second.leave()
        assert (await waiting) is not None
        assert served.level(REQUEST.client) == 2 * price

    asyncio.run(run())


def test_who_leaves_the_queue_makes_room_in_it() -> None:
    async def run() -> None:
        seats = Seats(max_in_flight=1, max_queued=1)
        held = seats.free()
        leaving = await seats.asks()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        waiting = await seats.asks()
        held.leave()
        assert (await waiting) is not None

    asyncio.run(run())


# ---- conditional disaggregation ------------------------------------------------------------


def test_short_prompts_are_computed_by_decode(make: Make) -> None:
    setup = make(section={"pairing": {"local_prefill_tokens": 64}})
    complete(setup, list(range(64)))
    assert setup.prefill.bodies == []
    assert "kv_transfer_params" not in setup.decode.bodies[0]
    complete(setup, list(range(65)))
    assert len(setup.prefill.bodies) == 1
    assert setup.decode.bodies[1]["kv_transfer_params"] == PARAMS
    assert metric(setup, 'disagg_router_local_total{reason="short_prompt"}') == 1


def test_a_prefix_at_decode_is_not_handed_off_again(make: Make) -> None:
    setup = make(section={"pairing": {"local_prefill_tokens": 64}})
    turn = list(range(1000, 1000 + 128 * 5))
    complete(setup, turn)
    complete(setup, turn)
    complete(setup, [*turn, *range(60)])
    assert len(setup.prefill.bodies) == 1
    complete(setup, [*turn, *range(100)])
    complete(setup, [7, *turn])
    assert len(setup.prefill.bodies) == 3
    assert metric(setup, 'disagg_router_local_total{reason="prefix_known"}') == 2


def slow_prefill(setup: Setup, gate: threading.Event) -> None:
    """The router has measured 1,000 tokens in 5 s. From now on the engines wait for the gate."""
    setup.prefill.first_byte_s = 0.5
    assert complete(setup, list(range(100))).status_code == 200
    for engine in (setup.prefill, setup.decode):
        engine.first_byte_s, engine.gate = 0, gate
        engine.bodies.clear()


@pytest.mark.parametrize(("share", "read_by"), [(0.02, (3, 2)), (2, (5, 0))])
def test_decode_computes_prompts_when_prefill_is_busy(
    make: Make, gate: threading.Event, share: float, read_by: tuple[int, int]
) -> None:
    """Alternately, prefill has the same backlog as decode, or one prompt more. Decode computes none
    if that would delay its other requests too much."""
    setup = make(section={"pairing": {"local_prefill_tokens": 64, "prefill_wait_share": share}})
    slow_prefill(setup, gate)
    with ThreadPoolExecutor(5) as pool:
        answers = []
        for number in range(5):
            asked = pool.submit(complete, setup, list(range(number, number + 1000)))
            answers.append(asked)
            until(lambda: len(setup.prefill.bodies) + len(setup.decode.bodies) == len(answers))
        assert (len(setup.prefill.bodies), len(setup.decode.bodies)) == read_by
        gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 5
    assert metric(setup, 'disagg_router_local_total{reason="prefill_busy"}') == read_by[1]


def test_decode_computes_short_prompts_sooner(make: Make, gate: threading.Event) -> None:
    """The other requests at decode wait for the time of this prompt."""
    setup = make(section={"pairing": {"local_prefill_tokens": 64, "prefill_wait_share": 2}})
    slow_prefill(setup, gate)
    with ThreadPoolExecutor(3) as pool:
        answers = []
        for number, (length, read_by) in enumerate([(1000, (1, 0)), (1000, (2, 0)), (100, (2, 1))]):
            answers.append(pool.submit(complete, setup, list(range(number, number + length))))
            until(lambda: len(setup.prefill.bodies) + len(setup.decode.bodies) == len(answers))
            assert (len(setup.prefill.bodies), len(setup.decode.bodies)) == read_by
        gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3


def test_failed_answers_are_not_remembered(make: Make) -> None:
    setup = make(section={"pairing": {"local_prefill_tokens": 64}})
    setup.decode.status = 400
    complete(setup, list(range(640)))
    setup.decode.status = 200
    complete(setup, list(range(640)))
    assert len(setup.prefill.bodies) == 2


def test_without_prefill_decode_serves(make: Make) -> None:
    setup = make(section={"probe_interval_s": 0.1, "pairing": {"local_prefill_tokens": 0}})
    setup.loop.run(setup.prefill.stop())
    until(lambda: client().get(f"{setup.url}/ready", timeout=10).status_code == 503)
    until(lambda: complete(setup).status_code == 200)
    until(
        lambda: (
            complete(setup).status_code == 200
            and metric(setup, 'disagg_router_local_total{reason="no_prefill_engine"}') > 0
        )
    )


def chat(setup: Setup, body: dict[str, Any]) -> None:
    answer = client().post(
        f"{setup.url}/v1/chat/completions", json={**body, "model": "m"}, timeout=20
    )
    assert answer.status_code == 200


def test_an_agent_is_handed_off(make: Make) -> None:
    """Its prompt is what its tools said; its words are few."""
    setup = make(
        section={"pairing": {"local_prefill_tokens": 4096}}, limits={"max_prompt_tokens": 60_000}
    )
    chat(setup, agent_bodies.chat_agent())
    assert len(setup.prefill.bodies) == 1
    body = agent_bodies.chat_agent(40)
    answer = client().post(
        f"{setup.url}/v1/chat/completions", json={**body, "model": "m"}, timeout=20
    )
    assert answer.status_code == 400, "it has more tokens than are allowed"


def test_another_image_is_handed_off(make: Make) -> None:
    setup = make(section={"pairing": {"local_prefill_tokens": 64}})
    text = {"type": "text", "text": "What is shown here? " * 40}
    for height in (400, 400, 401):
        image = {"type": "image_url", "image_url": {"url": agent_bodies.png(600, height)}}
        chat(setup, {"messages": [{"role": "user", "content": [text, image]}]})
    assert len(setup.prefill.bodies) == 2
    assert metric(setup, 'disagg_router_local_total{reason="prefix_known"}') == 1


def test_idle_prefill_engines_are_noticed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    setup = make(section={"pairing": {"local_prefill_tokens": 64}})
    for number in range(260):
        complete(setup, list(range(80 if number % 4 == 0 else 8)))
    assert metric(setup, "disagg_router_idle_prefill_ratio") > 0.7
    said = [line for line in caplog.messages if "all prefill engines were idle" in line]
    assert len(said) == 1
    assert "short_prompt (see router.pairing.local_prefill_tokens)" in said[0]
