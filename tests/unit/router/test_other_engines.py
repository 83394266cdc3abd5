"""The engines behind a router are replaced while it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from unit.router.conftest import FakeEngine, Loop, Setup
from unit.router.pairing.test_admission import until

from disagg.config import RouterSection
from disagg.router.processes.parent import Processes, claim
from disagg.router.server.server import RouterPlan
from disagg.router.topology import Away, EngineEndpoint
from disagg.testing.http import client

Make = Callable[..., Setup]


def complete(url: str, **body: Any) -> httpx.Response:
    asked = {"model": "m", "prompt": "x", **body}
    return client().post(f"{url}/v1/completions", json=asked, timeout=20)


def replace(setup: Setup, engines: Sequence[EngineEndpoint], **down: str | Away) -> None:
    away = {name: Away(one) if isinstance(one, str) else one for name, one in down.items()}
    setup.loop.run(setup.server.replace(engines, away))


def is_ready(setup: Setup) -> bool:
    """Whether all engines are up, and new ones have the adapters of the others."""
    return client().get(f"{setup.url}/ready").status_code == 200


def test_requests_go_to_the_current_engines(make: Make) -> None:
    setup = make(others=["prefill", "decode"])
    prefill, decode, _, other = setup.endpoints
    replace(setup, [prefill, decode])
    for _ in range(8):
        assert complete(setup.url).status_code == 200
    assert (len(setup.decode.bodies), len(setup.others[1].bodies)) == (8, 0)

    replace(setup, [prefill, other], **{"decode-2": "starts again"})
    until(lambda: is_ready(setup))
    for _ in range(8):
        assert complete(setup.url).status_code == 200
    assert (len(setup.decode.bodies), len(setup.others[1].bodies)) == (8, 8)
    ready = client().get(f"{setup.url}/ready")
    assert ready.status_code == 200
    assert ready.json()["engines"] == {
        "prefill-0": "up",
        "decode-1": "up",
        "decode-2": "starts again",
    }
    lines = client().get(f"{setup.url}/metrics").text.splitlines()
    assert {line for line in lines if line.startswith("disagg_router_engine_up")} == {
        'disagg_router_engine_up{engine="prefill-0",role="prefill"} 1.0',
        'disagg_router_engine_up{engine="decode-1",role="decode"} 1.0',
        'disagg_router_engine_up{engine="decode-2",role="decode"} 0.0',
    }


def test_without_decode_503_and_without_prefill_decode_only(setup: Setup) -> None:
    prefill, decode = setup.endpoints
    replace(setup, [prefill])
    refused = complete(setup.url)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert client().get(f"{setup.url}/ready").status_code == 503
    replace(setup, [decode])
    assert complete(setup.url).status_code == 200
    assert setup.prefill.bodies == []
    replace(setup, [prefill, decode])
    until(lambda: is_ready(setup))
    assert complete(setup.url).status_code == 200
    assert len(setup.prefill.bodies) == 1


def test_a_deployment_without_prefill_is_ready(make: Make) -> None:
    setup = make(others=["decode"])
    prefill, *plain = setup.endpoints
    replace(setup, plain)
    assert client().get(f"{setup.url}/ready").status_code == 200
    for _ in range(4):
        assert complete(setup.url).status_code == 200
    assert setup.prefill.bodies == []
    # A prefill engine that is down makes it not ready.
    replace(setup, plain, **{prefill.name: "starts again"})
    assert client().get(f"{setup.url}/ready").status_code == 503


def test_a_stream_continues_after_its_engine_is_removed(setup: Setup) -> None:
    setup.decode.chunks, setup.decode.chunk_s = 5, 0.1
    body = {"model": "m", "prompt": "x", "stream": True}
    with client().stream("POST", f"{setup.url}/v1/completions", json=body, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        replace(setup, setup.endpoints[:1])
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_queued_request_gets_the_new_engine(make: Make) -> None:
    setup = make(others=["prefill", "decode"], limits={"max_in_flight_per_engine": 1})
    gate = setup.decode.gate = threading.Event()
    replace(setup, setup.endpoints[:2])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(complete, setup.url)
        until(lambda: len(setup.decode.bodies) == 1)
        second = pool.submit(complete, setup.url)
        until(lambda: "disagg_router_queued 1" in client().get(f"{setup.url}/metrics").text)
        replace(setup, setup.endpoints)
        assert second.result(10).status_code == 200
        assert len(setup.others[1].bodies) == 1
        gate.set()
        assert first.result(10).status_code == 200


def test_an_engine_that_comes_back_under_its_name_has_a_clean_record(setup: Setup) -> None:
    """Else it would be paused, and get no requests."""
    prefill, decode = setup.endpoints
    setup.loop.run(setup.prefill.stop())
    for _ in range(4):
        assert complete(setup.url).status_code == 200
    until(lambda: not is_ready(setup))
    again = FakeEngine("prefill")
    setup.loop.run(again.start())
    replace(setup, [EngineEndpoint(prefill.name, "prefill", again.url), decode])
    until(lambda: is_ready(setup))
    assert complete(setup.url).status_code == 200
    assert len(again.bodies) == 1
    setup.loop.run(again.stop())


@pytest.fixture
def engines(loop: Loop) -> Any:
    fakes = [FakeEngine(role) for role in ("prefill", "decode", "decode")]
    for fake in fakes:
        loop.run(fake.start())
    yield fakes
    for fake in fakes:
        loop.run(fake.stop())


def test_all_processes_get_the_new_engines_later_ones_too(
    loop: Loop, engines: list[FakeEngine]
) -> None:
    prefill, first, second = engines
    known = [EngineEndpoint("prefill-0", "prefill", prefill.url)]
    section = RouterSection.model_validate(
        {"port": 0, "processes": 2, "pairing": {"local_prefill_tokens": 0}}
    )
    sock = claim("127.0.0.1", 0, 2)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    plan = RouterPlan(section, [*known, EngineEndpoint("decode-0", "decode", first.url)])
    router = Processes(plan, sock)
    loop.run(router.start())
    try:
        known.append(EngineEndpoint("decode-0", "decode", second.url))
        loop.run(router.replace(known, {}))
        for _ in range(20):  # with a new connection each, so that both processes get some
            assert complete(url).status_code == 200
        assert (len(first.bodies), len(second.bodies)) == (0, 20)
        before = set(router._open)
        loop.run(_close_all(router))
        until(lambda: len(router._open - before) == 2)
        until(lambda: is_up(url))
        for _ in range(20):
            assert complete(url).status_code == 200
        assert len(first.bodies) == 0
    finally:
        loop.run(router.stop(1))


async def _close_all(router: Processes) -> None:
    for channel in list(router._open):
        channel.close()


def is_up(url: str) -> bool:
    try:
        return client().get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
