"""Requests that change an engine's state go to all engines; LoRA adapters of later engines."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import vllm
from unit.router.conftest import AS_OPERATOR, FakeEngine, Setup
from unit.router.pairing.test_admission import until

from disagg.config import PairingSection, RouterSection
from disagg.router.api import paths
from disagg.router.engines import broadcast
from disagg.router.server.app import create_app
from disagg.router.server.server import RouterServer, bind
from disagg.router.topology import EngineEndpoint
from disagg.testing.http import client

Make = Callable[..., Setup]
# Operators' routes that a router does not send to all engines: they only read, or no engine here
# has them.
TO_ONE = {
    "/fault_tolerance/apply",
    "/fault_tolerance/status",
    "/get_world_size",
    "/is_paused",
    "/is_scaling_elastic_ep",
    "/is_sleeping",
    "/kv_event_sources",
    "/scale_elastic_ep",
    "/server_info",
    "/weight_info",
}
OWN = {"/health"}  # the router answers it itself


def post(setup: Setup, path: str, body: object = None) -> httpx.Response:
    return client().post(f"{setup.url}{path}", json=body, headers=AS_OPERATOR, timeout=20)


def engines(setup: Setup) -> list[FakeEngine]:
    return [setup.prefill, setup.decode, *setup.others]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/sleep?level=1", "/%73leep"])
def test_a_change_goes_to_all_engines(make: Make, path: str) -> None:
    setup = make(others=["prefill", "decode"])
    answer = post(setup, path, {"lora_name": "a", "kv_transfer_params": {"x": 1}})
    assert answer.status_code == 200
    assert answer.json()["text"] == '{"lora_name": "a"}'
    for engine in engines(setup):
        assert engine.asked.count(answer.json()["path"]) == 1


def test_a_query_goes_to_one_engine(make: Make) -> None:
    setup = make(others=["prefill", "decode"])
    for path in ("/tokenize", "/v1/score"):
        assert post(setup, path, {}).status_code == 200
        asked = [engine.role for engine in engines(setup) if path in engine.asked]
        assert asked == ["decode"]


def test_an_engine_that_refuses_is_named(make: Make, setup: Setup) -> None:
    setup.decode.refusing["/sleep"] = (400, {"error": {"message": "it is running"}})
    answer = post(setup, "/sleep")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "decode-0 answered 400: it is running; 1 of 2 engines did it"
    setup.decode.refusing["/sleep"] = (500, {"detail": "no"})
    setup.prefill.refusing["/sleep"] = (404, "what")
    answer = post(setup, "/sleep")
    assert answer.status_code == 500
    said = "prefill-0 answered 404: what, decode-0 answered 500: no; 0 of 2 engines did it"
    assert answer.json()["error"]["message"] == said


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_failure_with_status_200_reaches_the_client(setup: Setup, role: str) -> None:
    """vLLM reports that blocks are in use: the client should retry."""
    for engine in engines(setup):
        engine.refusing["/reset_prefix_cache"] = (200, {"success": engine.role != role})
    answer = post(setup, "/reset_prefix_cache?reset_external=true")
    assert (answer.status_code, answer.json()) == (200, {"success": False})


def test_an_engine_that_is_gone(setup: Setup) -> None:
    setup.loop.run(setup.decode.stop())
    answer = post(setup, "/reset_prefix_cache")
    assert answer.status_code == 503
    assert "decode-0 answered 503: the decode engine cannot be reached" in answer.text


def test_no_route_of_vllm_is_missing() -> None:
    """Of the installed vLLM: a new route must be classified."""
    folder = Path(vllm.__file__).parent / "entrypoints"
    files = [*folder.rglob("api_router.py"), *folder.rglob("basic.py"), *folder.rglob("health.py")]
    source = "".join(file.read_text() for file in files)
    called = r'router\.(?:get|post|put|delete|patch|add_api_route)\(\s*"([^"]+)"'
    routes = {path.replace("{response_id}", "resp_1") for path in re.findall(called, source)}
    assert len(routes) > 50
    assert routes >= broadcast.PATHS
    assert routes >= paths.CLIENTS
    clients = {path for path in routes if paths.is_for_clients(path)}
    assert clients >= {"/v1/responses/resp_1", "/v1/responses/resp_1/cancel"}
    assert not clients & (broadcast.PATHS | TO_ONE)
    assert routes - clients - broadcast.PATHS - OWN == TO_ONE


# ---- adapters --------------------------------------------------------------------------------

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def replace(setup: Setup, engines: list[EngineEndpoint]) -> None:
    setup.loop.run(setup.server.replace(engines, {}))


def test_a_new_engine_loads_the_adapters_first(make: Make) -> None:
    setup = make(others=["decode"])
    prefill, decode, later = setup.endpoints
    newcomer = setup.others[0]
    replace(setup, [prefill, decode])
    for name in ("a", "b"):
        assert post(setup, LOAD, {"lora_name": name, "lora_path": "/x"}).status_code == 200
    assert post(setup, UNLOAD, {"lora_name": "b"}).status_code == 200
    setup.prefill.refusing[LOAD] = (400, {"error": {"message": "no such folder"}})
    assert post(setup, LOAD, {"lora_name": "c", "lora_path": "/y"}).status_code == 400
    newcomer.gate = threading.Event()
    replace(setup, [prefill, decode, later])

    def asked() -> int:
        assert post(setup, "/v1/completions", {"model": "m", "prompt": "x"}).status_code == 200
        return sum("prompt" in body for body in newcomer.bodies)

    for _ in range(8):
        assert asked() == 0
    newcomer.gate.set()
    until(lambda: asked() > 0)


A = {"lora_name": "a", "lora_path": "/x", "is_3d_lora_weight": False, "load_inplace": False}


def loads(engine: FakeEngine) -> list[Any]:
    """The load requests that it got while its gate is set."""
    return [body for body in engine.bodies if "lora_name" in body]


def gated(engine: FakeEngine) -> FakeEngine:
    """With a gate, so that it records load requests."""
    engine.gate = threading.Event()
    engine.gate.set()
    return engine


def test_engines_report_adapters_that_this_process_did_not_load(make: Make) -> None:
    """Another router process loaded them, or this one before its restart. An adapter that another
    process unloaded is not loaded again."""
    setup = make(others=["prefill", "decode"])
    prefill, decode, *later = setup.endpoints
    replace(setup, [prefill, decode])
    assert post(setup, LOAD, {"lora_name": "gone", "lora_path": "/x"}).status_code == 200
    setup.prefill.adapters, setup.decode.adapters = [A], []
    new = [gated(one) for one in setup.others]
    replace(setup, [prefill, decode, *later])
    until(lambda: all(map(loads, new)))
    assert [*map(loads, new)] == [[A], [A]]


def test_an_engine_that_still_loads_is_not_asked_for_adapters(make: Make) -> None:
    """All engines were lost: the first one back does not have yet what the second one needs."""
    setup = make(others=["prefill", "decode"])
    prefill, decode, first, second = setup.endpoints
    replace(setup, [prefill, decode])
    assert post(setup, LOAD, {"lora_name": "a", "lora_path": "/x"}).status_code == 200
    slow, new = setup.others[0], gated(setup.others[1])
    slow.adapters, slow.gate = [], threading.Event()
    replace(setup, [first])
    until(lambda: bool(loads(slow)))
    replace(setup, [first, second])
    until(lambda: bool(loads(new)))
    slow.gate.set()


def test_a_new_router_gives_all_engines_the_same_adapters(make: Make) -> None:
    setup = make(others=["decode"])
    fakes = [gated(one) for one in engines(setup)]
    for engine, adapters in zip(fakes, ([A], None, []), strict=True):
        engine.adapters = adapters
    sock = bind("127.0.0.1", 0)
    router = RouterSection(port=0, pairing=PairingSection(local_prefill_tokens=0))
    server = RouterServer(create_app(router, setup.endpoints), sock)
    setup.loop.run(server.start())
    try:
        until(lambda: bool(loads(fakes[2])))
        assert [*map(loads, fakes)] == [[], [], [A]]
    finally:
        setup.loop.run(server.stop(1))


def test_an_adapter_that_fails_to_load_does_not_block_its_engine(make: Make) -> None:
    setup = make(others=["decode"])
    prefill, decode, later = setup.endpoints
    newcomer = setup.others[0]
    replace(setup, [prefill, decode])
    assert post(setup, LOAD, {"lora_name": "a", "lora_path": "/x"}).status_code == 200
    newcomer.refusing[LOAD] = (404, {"error": {"message": "not here"}})
    replace(setup, [prefill, later])
    until(lambda: client().get(f"{setup.url}/ready", timeout=20).status_code == 200)
    assert post(setup, "/v1/completions", {"model": "m", "prompt": "x"}).status_code == 200
    assert newcomer.asked.count(LOAD) == 1
