"""Both legs at once: when decode's leg is sent, and what happens where one of the two fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from unit.router.conftest import PARAMS, Setup, event, leave, wait_for

from disagg.router.api.bodies import REMOTE_DECODE
from disagg.router.engines.lease_releases import Prefilled
from disagg.router.pairing.in_flight import InFlight
from disagg.router.request.follow import EarlyDecode, Invitations, why_whole
from disagg.router.request.plan import RequestPlan
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.testing.http import client

FOLLOW = {"follow": True, "local_prefill_tokens": 0}  # auto would not on one host
INVITATION = {"ticket": "signed", "step_tokens": 100}
LONG = {"model": "m", "prompt": list(range(300)), "stream": True}
_PREFILLS = "disagg_router_prefill_seconds_count"
WHOLE = b"".join(event(number) for number in range(3)) + b"data: [DONE]\n\n"


def endpoints(prefill: str, decode: str) -> tuple[EngineEndpoint, EngineEndpoint]:
    """A prefill and a decode engine at these URLs."""
    return EngineEndpoint("p", "prefill", prefill), EngineEndpoint("d", "decode", decode)


def post(setup: Setup, body: dict[str, Any]) -> httpx.Response:
    return client().post(f"{setup.url}/v1/completions", json=body, timeout=20)


def outcomes(setup: Setup) -> dict[str, float]:
    """Requests whose decode leg could begin with their prefill leg, by what came of it."""
    found, name = {}, "disagg_router_followed_total{"
    for line in client().get(f"{setup.url}/metrics", timeout=10).text.splitlines():
        if line.startswith(name):
            found[line.split('"')[1]] = float(line.rpartition(" ")[2])
    return found


def in_flight(setup: Setup, role: str) -> float:
    """Requests with a seat at engines of this role."""
    text = client().get(f"{setup.url}/metrics", timeout=10).text
    name = f'disagg_router_in_flight{{role="{role}"}} '
    (line,) = [one for one in text.splitlines() if one.startswith(name)]
    return float(line.removeprefix(name))


def legs_of(setup: Setup) -> Any:
    """Those of the router's only group of engines."""
    return setup.server.app.state.models.only.service._legs


def prefills(setup: Setup) -> float:
    """Prefill legs that have ended."""
    text = client().get(f"{setup.url}/metrics", timeout=10).text
    (line,) = [one for one in text.splitlines() if one.startswith(_PREFILLS)]
    return float(line.rpartition(" ")[2])


@pytest.fixture
def invited(make: Callable[..., Setup]) -> Iterator[Callable[..., Setup]]:
    """Makes a router that a prefill engine has invited to follow its leases."""
    gates: list[threading.Event] = []

    def invited(**options: Any) -> Setup:
        options.setdefault("section", {"pairing": FOLLOW})
        setup = make(**options)
        setup.prefill.params = {**PARAMS, "disagg_invitation": INVITATION}
        assert post(setup, LONG).status_code == 200
        for engine in (setup.prefill, setup.decode):
            engine.bodies.clear()
            engine.headers.clear()
        gate = setup.prefill.gate = threading.Event()
        gates.append(gate)
        return setup

    yield invited
    for gate in gates:
        gate.set()


def in_background(setup: Setup, body: dict[str, Any]) -> Callable[[], httpx.Response]:
    """Send it; the result waits for the answer."""
    found: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: found.append(post(setup, body)))
    thread.start()

    def answer() -> httpx.Response:
        thread.join(20)
        return found[0]

    return answer


def test_both_legs_are_sent_at_once(
    invited: Callable[..., Setup], capsys: pytest.CaptureFixture[str]
) -> None:
    setup = invited()
    held = setup.decode.gate = threading.Event()
    answer = in_background(setup, LONG)
    assert wait_for(lambda: setup.prefill.bodies and setup.decode.bodies)
    (prefill,), (decode,) = setup.prefill.bodies, setup.decode.bodies
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    assert wait_for(lambda: prefills(setup) == 2)
    held.set()
    assert answer().content == WHOLE
    stream = prefill["kv_transfer_params"].pop("disagg_stream")
    assert prefill["kv_transfer_params"] == REMOTE_DECODE
    assert len(bytes.fromhex(stream)) == 16
    assert decode["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "disagg_invitation": INVITATION,
        "disagg_stream": stream,
    }
    assert outcomes(setup) == {"followed": 1}
    assert setup.prefill.headers[0]["x-request-id"] == setup.decode.headers[0]["x-request-id"]
    assert capsys.readouterr().out.count('"followed":"followed"') == 1


def test_each_request_has_a_stream_of_its_own(invited: Callable[..., Setup]) -> None:
    setup = invited()
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    for _ in range(3):
        post(setup, LONG)
    streams = {body["kv_transfer_params"]["disagg_stream"] for body in setup.prefill.bodies}
    assert len(streams) == 3


@pytest.mark.parametrize("field", ["disagg_stream", "disagg_invitation"])
def test_clients_name_no_streams(invited: Callable[..., Setup], field: str) -> None:
    setup = invited()
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    post(setup, {**LONG, "prompt": [1], "kv_transfer_params": {field: "ab" * 16}})
    assert field not in setup.prefill.bodies[0]["kv_transfer_params"]
    assert setup.decode.bodies[0]["kv_transfer_params"].get(field) in (None, INVITATION)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": list(range(100))},  # one step of prefill's
        {"prompt": ["a" * 2000, "b" * 2000]},  # not split
    ],
)
def test_prompts_that_gain_nothing_are_handed_off_as_before(
    invited: Callable[..., Setup], change: dict[str, Any]
) -> None:
    setup = invited()
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    post(setup, LONG | change)
    for body in setup.prefill.bodies:
        assert "disagg_stream" not in body["kv_transfer_params"]
    assert outcomes(setup).get("followed", 0) == 0


def test_prefill_fails_after_decode_began(invited: Callable[..., Setup]) -> None:
    """Decode's first leg is closed, so its engine aborts; decode computes the prompt."""
    setup = invited()
    held = setup.decode.gate = threading.Event()
    answer = in_background(setup, LONG)
    assert wait_for(lambda: setup.prefill.bodies and setup.decode.bodies)
    setup.prefill.dies = True
    setup.decode.gate = None
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    assert answer().content == WHOLE
    held.set()
    assert setup.decode.left.wait(5)
    assert "kv_transfer_params" not in setup.decode.bodies[-1]


def test_decode_fails_before_prefill_answers(invited: Callable[..., Setup]) -> None:
    """The second decode leg has the lease that prefill granted."""
    setup = invited()
    setup.decode.dies = True
    answer = in_background(setup, LONG)
    assert wait_for(lambda: setup.decode.bodies)
    assert wait_for(lambda: setup.prefill.bodies)
    setup.decode.dies = False
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    assert answer().content == WHOLE
    last = setup.decode.bodies[-1]["kv_transfer_params"]
    assert (last["disagg"], last["do_remote_prefill"]) == ("ticket", True)
    assert outcomes(setup) == {"failed": 1}


def test_decode_keeps_its_seat_when_prefill_is_left(invited: Callable[..., Setup]) -> None:
    """Its stream goes on after prefill was told to stop."""
    setup = invited()
    setup.decode.chunk_s = 0.5
    answer = in_background(setup, LONG)
    assert setup.prefill.left.wait(5)
    assert in_flight(setup, "prefill") == 0
    assert in_flight(setup, "decode") == 1
    assert answer().content == WHOLE
    assert wait_for(lambda: in_flight(setup, "decode") == 0)


def test_a_client_leaves_as_prefill_ends(invited: Callable[..., Setup]) -> None:
    """In the same moment. The lease is given back, and no engine counts as needed."""
    setup = invited()
    legs, engine = legs_of(setup), setup.endpoints[0]
    prefilled = Prefilled(engine, {"disagg": "ticket"}, b"")

    running: list[asyncio.Task[Any]] = []

    async def ends(*_: Any) -> Prefilled:
        legs._releases.hold(prefilled)
        running[0].cancel()
        return prefilled

    async def play() -> None:
        plan, record = RequestPlan("/v1/completions", LONG), Record("/v1/completions", "id")
        seat = legs._in_flight.take(setup.endpoints[1], 1)
        legs._prefilled = ends
        running.append(asyncio.create_task(legs._at_once(plan, seat, b"", record, {})))
        with pytest.raises(asyncio.CancelledError):
            await running[0]

    setup.loop.run(play())
    assert wait_for(lambda: setup.prefill.released)
    assert wait_for(lambda: legs.running() == {})


def test_decode_answers_before_prefill_does(invited: Callable[..., Setup]) -> None:
    """It has computed the prompt itself; nobody waits for prefill any more."""
    setup = invited()
    assert post(setup, LONG).content == WHOLE
    assert setup.prefill.left.wait(5)
    assert outcomes(setup) == {"computed": 1}


def test_a_client_that_leaves_ends_both_legs(invited: Callable[..., Setup]) -> None:
    setup = invited()
    held = setup.decode.gate = threading.Event()
    leave(setup.url, LONG, once=lambda: setup.prefill.bodies and setup.decode.bodies)
    assert setup.prefill.left.wait(5)
    assert setup.decode.left.wait(5)
    held.set()


def test_decode_waits_until_prefill_begins_with_the_prompt() -> None:
    """Prefill has another prompt to compute, which takes a minute."""
    prefill, decode = endpoints("http://p", "http://d")
    in_flight, invitations = InFlight(RouterMetrics()), Invitations()
    in_flight.take(prefill, 100).has_read()
    invitations.note(prefill, {"disagg_invitation": INVITATION})
    plan = RequestPlan("/v1/completions", LONG)
    opened: list[EngineEndpoint] = []

    async def open_early(engine: EngineEndpoint, params: dict[str, Any]) -> Any:
        opened.append(engine)
        await asyncio.Event().wait()

    async def legs(waits: bool) -> bool:
        early = EarlyDecode(plan, decode, "auto", invitations, in_flight, open_early)
        if waits:
            in_flight._speed.learn(100, 60.0)
            in_flight.take(prefill, 100).reads(100)
        assert early.begins(prefill).keys() == {"disagg_stream"}
        for _ in range(5):
            await asyncio.sleep(0)
        if waits:
            assert await early.opened() is None
        early.cancel()
        return early.was_sent

    assert asyncio.run(legs(waits=False))
    assert opened == [prefill]
    assert not asyncio.run(legs(waits=True))
    assert opened == [prefill]


def test_the_invitation_of_an_engine_that_failed_is_forgotten(
    invited: Callable[..., Setup],
) -> None:
    setup = invited()
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    setup.prefill.status = 500
    post(setup, LONG)
    setup.prefill.status = 200
    setup.decode.bodies.clear()
    post(setup, LONG)
    assert "disagg_stream" not in setup.decode.bodies[-1].get("kv_transfer_params", {})


def test_a_router_may_be_told_not_to_follow(invited: Callable[..., Setup]) -> None:
    setup = invited(section={"pairing": {"follow": False, "local_prefill_tokens": 0}})
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    assert post(setup, LONG).content == WHOLE
    assert "disagg_stream" not in setup.prefill.bodies[0]["kv_transfer_params"]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8001"),
        ("http://gpu.example:8000", "https://GPU.example.:8001/decode"),
        ("http://127.0.0.1:8000", "http://localhost:8001"),
        ("http://127.0.0.2:8000", "http://[::1]:8001"),
        ("http://[fd00::1]:8000", "http://[FD00:0::1]:8001"),
    ],
)
def test_one_host_is_followed_only_if_told_to(prefill: str, decode: str) -> None:
    both = endpoints(prefill, decode)
    assert why_whole("auto", 101, 100, *both) == "same_host"
    assert why_whole(True, 101, 100, *both) is None


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.2:8000"),
        ("http://gpu-1:8000", "http://gpu-2:8000"),
        ("http://127.0.0.1:8000", "http://10.0.0.2:8000"),
        ("http://[fd00::1]:8000", "http://[fd00::2]:8000"),
    ],
)
def test_two_hosts_are_followed_for_prompts_of_several_steps(prefill: str, decode: str) -> None:
    both = endpoints(prefill, decode)
    assert why_whole("auto", 101, 100, *both) is None
    assert why_whole("auto", 100, 100, *both) == "one_step"
    assert why_whole(True, 100, 100, *both) == "one_step"


def test_a_router_follows_nothing_on_one_host_by_default(invited: Callable[..., Setup]) -> None:
    """And counts why."""
    setup = invited(section={"pairing": {"local_prefill_tokens": 0}})
    assert setup.prefill.gate is not None
    setup.prefill.gate.set()
    assert post(setup, LONG).content == WHOLE
    assert "disagg_stream" not in setup.prefill.bodies[0]["kv_transfer_params"]
    assert "disagg_stream" not in setup.decode.bodies[0]["kv_transfer_params"]
    assert outcomes(setup) == {"same_host": 1}


def test_each_prefill_engine_is_judged_by_itself() -> None:
    """A prompt that prefill on decode's host failed to compute is followed on another host."""
    here, decode = endpoints("http://one:1", "http://one:2")
    there = EngineEndpoint("q", "prefill", "http://two:1")
    invitations = Invitations()
    for engine in (here, there):
        invitations.note(engine, {"disagg_invitation": INVITATION})
    plan = RequestPlan("/v1/completions", LONG)

    async def open_early(engine: EngineEndpoint, params: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    async def legs() -> None:
        in_flight = InFlight(RouterMetrics())
        early = EarlyDecode(plan, decode, "auto", invitations, in_flight, open_early)
        assert early.begins(here) == {}
        assert early.why_not_sent == "same_host"
        early.failed(here)
        assert early.begins(there).keys() == {"disagg_stream"}
        assert early.why_not_sent == "not_sent"
        early.cancel()

    asyncio.run(legs())
