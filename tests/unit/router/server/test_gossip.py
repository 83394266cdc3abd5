"""Routers that tell each other what they know: real processes, on fake engines, and the call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from unit.router.conftest import AS_OPERATOR, OPERATOR, FakeEngine, Loop
from unit.router.test_process import START_S, until

from disagg import credentials
from disagg.config import RouterSection
from disagg.credentials import ApiKey
from disagg.errors import ConfigError
from disagg.router.main import RouterServer, bind, create_app
from disagg.router.server.gossip import PATH
from disagg.router.topology import EngineEndpoint
from disagg.testing.http import client
from disagg.testing.ports import free_port

CONVERSATIONS = 12
HEARD = "disagg_router_prompts_of_others_total"
CLIENT = ApiKey("someone", "of-a-client")


@pytest.fixture
def engines(loop: Loop) -> Iterator[list[FakeEngine]]:
    """A prefill engine and four decode engines."""
    made = [FakeEngine("prefill"), *(FakeEngine("decode") for _ in range(4))]
    for engine in made:
        loop.run(engine.start())
    yield made
    for engine in made:
        loop.run(engine.stop())


@contextmanager
def router(folder: Path, engines: list[FakeEngine], **settings: Any) -> Iterator[str]:
    """The URL of one `disagg router`; it knows an operator and may have peers."""
    keys = folder / "operators"
    keys.write_text(f"op={OPERATOR.value}")
    keys.chmod(0o600)
    prefill, *decodes = (engine.url for engine in engines)
    port = settings.setdefault("port", 0)
    config = folder / f"{port}.yaml"
    section = {
        "admin_keys_file": str(keys),
        "engines": {"prefill": [prefill], "decode": decodes},
        "pairing": {"decode": "prefix_affinity", "local_prefill_tokens": 0},
        **settings,
    }
    config.write_text(json.dumps(section))  # JSON is YAML
    out = folder / f"{port}.out"
    with out.open("w") as log:
        words = ["-m", "disagg.cli", "router", "--config", str(config)]
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: "Ready: " in out.read_text() or process.poll() is not None, START_S)
        lines = out.read_text().splitlines()
        ready = [line for line in lines if line.startswith("Ready: ")]
        assert ready, lines
        yield ready[0].removeprefix("Ready: ").removesuffix("/v1")
        assert "Traceback" not in out.read_text()
    finally:
        process.terminate()
        process.wait(60)


def figure(url: str, name: str) -> float:
    """The sum over all processes of a router."""
    text = client().get(f"{url}/metrics", headers=AS_OPERATOR, timeout=20).text
    families = text_string_to_metric_families(text)
    return sum(s.value for family in families for s in family.samples if s.name == name)


def turn(url: str, number: int, *, more: int) -> None:
    """A turn of a conversation, over a connection of its own."""
    prompt = f"conversation {number}: " + " ".join(map(str, range(600 + 300 * more)))
    body = {"model": "m", "prompt": prompt}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def two_turns(first: str, second: str) -> None:
    """A turn of each conversation at one router, and once that was told, the next at the other."""
    for number in range(CONVERSATIONS):
        turn(first, number, more=0)
    until(lambda: figure(second, HEARD) >= CONVERSATIONS, words="nothing was told")
    for number in range(CONVERSATIONS):
        turn(second, number, more=1)


def homes(engines: list[FakeEngine]) -> dict[int, list[int]]:
    """The engines that answered the turns of each conversation, by number."""
    found: dict[int, list[int]] = {}
    for place, engine in enumerate(engines[1:]):
        for body in engine.bodies:
            number = int(body["prompt"].split(":")[0].split()[1])
            found.setdefault(number, []).append(place)
    return found


def test_two_routers_choose_as_one(engines: list[FakeEngine], tmp_path: Path) -> None:
    """The second turns of all conversations come to the other router. By chance all of them would
    go where the first ones went once in 16 million times."""
    port = free_port()
    with ExitStack() as stack:
        one = stack.enter_context(router(tmp_path, engines, peers=[f"http://127.0.0.1:{port}"]))
        two = stack.enter_context(router(tmp_path, engines, port=port, peers=[one]))
        two_turns(one, two)
        until(lambda: figure(one, HEARD) >= CONVERSATIONS, words="nothing was told back")
    assert "is not told of loads" in (tmp_path / "0.out").read_text()  # while two did not run
    assert "is told of loads" not in (tmp_path / f"{port}.out").read_text()
    found = homes(engines)
    assert [len(turns) for turns in found.values()] == [2] * CONVERSATIONS
    assert all(first == second for first, second in found.values())


def test_a_name_that_does_not_exist_is_said_once(engines: list[FakeEngine], tmp_path: Path) -> None:
    out = tmp_path / "0.out"
    with router(tmp_path, engines, peers=["dns://nobody.invalid:8000"]) as url:
        turn(url, 0, more=0)
        until(lambda: "nobody.invalid" in out.read_text(), words="nothing was said")
        turn(url, 1, more=0)
    assert out.read_text().count("nobody.invalid") == 1


def test_the_processes_of_one_router_choose_as_one(
    engines: list[FakeEngine], tmp_path: Path
) -> None:
    with router(tmp_path, engines, processes=2) as url:
        two_turns(url, url)
    assert all(first == second for first, second in homes(engines).values())


# ---- the call ------------------------------------------------------------------------------


@pytest.fixture
def url(loop: Loop) -> Iterator[str]:
    engine = EngineEndpoint("decode-0", "decode", "http://127.0.0.1:1")
    sock = bind("127.0.0.1", 0)
    app = create_app(RouterSection(port=0), [engine], api_keys=[CLIENT, OPERATOR])
    server = RouterServer(app, sock)
    loop.run(server.start())
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    loop.run(server.stop(0))


def told(**report: Any) -> dict[str, Any]:
    return {"router": "0123456789abcdef", "models": {"": report}}


def test_loads_are_believed_of_operators_alone(url: str) -> None:
    message = told(loads={"http://127.0.0.1:1": [500, 0.5]})
    stranger = client().post(url + PATH, json=message)
    assert stranger.status_code == 401
    theirs = {"authorization": f"Bearer {CLIENT.value}"}
    refused = client().post(url + PATH, json=message, headers=theirs)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, 403)
    assert figure(url, "disagg_router_other_routers") == 0
    assert client().post(url + PATH, json=message, headers=AS_OPERATOR).status_code == 204
    assert figure(url, "disagg_router_other_routers") == 1


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"[]",
        b"\xff",
        {"router": "short", "models": {}},
        told(loads={"http://127.0.0.1:1": [-5, 0.5]}),
        told(loads={"http://127.0.0.1:1": [1 << 60, 0.5]}),
        told(loads={"http://127.0.0.1:1": [1, -1.0]}),
        told(loads={"u" * 3000: [1, 1.0]}),
        told(sent=[["nobody", "http://127.0.0.1:1", [1]]]),
        told(sent=[["decode", "http://127.0.0.1:1", [-1]]]),
        told(sent=[["decode", "http://127.0.0.1:1", ["x"]]]),
        told(other=1),
    ],
)
def test_what_no_router_tells_is_refused(url: str, message: Any) -> None:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    answer = client().post(url + PATH, content=data, headers=AS_OPERATOR)
    assert answer.status_code == 400
    assert "not what a router of this version tells" in answer.json()["error"]["message"]
    assert figure(url, "disagg_router_other_routers") == 0


def test_what_is_not_known_here_is_left_out(url: str) -> None:
    message = told(
        loads={"http://elsewhere:1": [5, 0.5]}, sent=[["decode", "http://elsewhere:1", [1, 2]]]
    )
    message["models"]["nobody"] = {"loads": {}}
    assert client().post(url + PATH, json=message, headers=AS_OPERATOR).status_code == 204
    assert figure(url, HEARD) == 0


def test_a_long_message_is_refused(url: str) -> None:
    answer = client().post(url + PATH, content=b" " * (5 << 20), headers=AS_OPERATOR)
    assert answer.status_code == 413


def test_peers_need_a_key_of_operators() -> None:
    with pytest.raises(ConfigError, match=r"router\.peers: .*set router\.admin_keys_file"):
        credentials.router_keys(RouterSection(peers=["http://a:1"]))
    for wrong in ("a:1", "ftp://a", "http://a/v1", "http://user@a", "http:// a"):
        with pytest.raises(ValueError, match="peers"):
            RouterSection(peers=[wrong])
