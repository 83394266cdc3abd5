"""A rolling upgrade of vLLM under load: a prefill and two decode engines, one after another.

For `make matrix`, which names the old version's Python in DISAGG_TEST_OTHER_VLLM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from disagg.chaos.steady_load import SteadyLoad
from disagg.config import Role
from disagg.router import engines_client
from disagg.router.operator_client import OperatorClient
from disagg.router.server.engines_api import PATH
from disagg.testing.forked_servers import ForkServer
from disagg.testing.http import client
from disagg.testing.launch import launch
from disagg.testing.vllm_server import VllmServer
from disagg.testing.waiting import eventually
from engine.conftest import running, transfer

OTHER = os.environ.get("DISAGG_TEST_OTHER_VLLM", "")
pytestmark = pytest.mark.skipif(not OTHER, reason="with `make matrix` alone")
# Without these routes a router knows the versions alone, and pairs equal ones.
ROUTES = ("--middleware", "disagg.engine.routes.Routes")
ARGS = ("--num-gpu-blocks-override", "192", "--max-model-len", "4096", *ROUTES)
VERSIONS = ("old", "new")
CLIENTS, MOVED = 2, 3
WAIT_S, DRAIN_S, START_S = 60.0, 60.0, 120.0


@pytest.fixture
def forks() -> Iterator[dict[str, ForkServer]]:
    """Of the old version and of ours: engines start in seconds."""
    both = {"old": ForkServer(OTHER), "new": ForkServer()}
    yield both
    for one in both.values():
        one.stop()


@dataclass(frozen=True)
class Router:
    """A `disagg router` process."""

    url: str
    socket: Path

    def replace(self, role: Role, old: VllmServer, new: VllmServer) -> None:
        """As an operator does it: the new engine is added, the old one drains, is gone, ends."""
        new.launch()
        new.wait_ready()
        added = {role: [new.url]}
        engines_client.add(self._operator(), added.get("prefill", []), added.get("decode", []))
        name = next(name for name, url in self.engines().items() if url == old.url)
        engines_client.remove(self._operator(), [name], wait=True, timeout_s=DRAIN_S)
        old.stop()

    def engines(self) -> dict[str, str]:
        """The URL of each."""
        with self._operator() as operator:
            return {one["name"]: one["url"] for one in operator.ask("GET", PATH)["engines"]}

    def _operator(self) -> OperatorClient:
        return OperatorClient(str(self.socket), None, None)


def started(
    stack: ExitStack, folder: Path, prefill: VllmServer, decode: Sequence[VllmServer]
) -> Router:
    """In front of these engines, and ready."""
    command = [sys.executable, "-m", "disagg.cli", "router", "--port", "{port}"]
    command += ["--admin-socket", str(folder / "router.sock"), "--local-prefill-tokens", "0"]
    command += ["--prefill", prefill.url]
    for engine in decode:
        command += ["--decode", engine.url]

    def is_ready(url: str) -> bool:
        try:
            return client().get(f"{url}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    url, _ = launch(stack, "the router", command, is_ready=is_ready, start_s=START_S)
    return Router(url, folder / "router.sock")


def handoffs(engine: VllmServer) -> dict[str, float]:
    """Of a decode engine, by outcome."""
    found = dict[str, float]()
    for name, value in engine.metrics("disagg_handoffs").items():
        if name.startswith("disagg_handoffs_total"):
            outcome = name.partition("outcome=")[2].split(",")[0].rstrip("}")
            found[outcome] = found.get(outcome, 0) + value
    return found


def loads_more(engine: VllmServer) -> bool:
    """Whether it loads some more handed over prompts, in time."""
    before = handoffs(engine).get("loaded", 0)
    return eventually(lambda: handoffs(engine).get("loaded", 0) >= before + MOVED, WAIT_S)


def version_of(engine: VllmServer) -> str:
    version: str = client().get(f"{engine.url}/version", timeout=10).json()["version"]
    return version


@pytest.mark.timeout(900)
def test_engine_after_engine_is_upgraded_under_load(
    model: Path, forks: dict[str, ForkServer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    logs, temporary = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("tmp")
    temporary.chmod(0o700)

    def engine(version: str, name: str, role: str | None = None) -> VllmServer:
        # A secret that engines share, and a cache of vLLM's that versions do not.
        env = {"TMPDIR": str(temporary), "VLLM_CACHE_ROOT": str(temporary / version)}
        config = transfer(role) if role else None
        log = logs / f"{version} {name}.log"
        start = forks[version].start
        return VllmServer(f"{version} {name}", model, log, config, ARGS, env=env, start=start)

    single = engine("new", "single")
    prefill, new_prefill = (engine(version, "prefill", "kv_producer") for version in VERSIONS)
    first, new_first = (engine(version, "first decode", "kv_consumer") for version in VERSIONS)
    second, new_second = (engine(version, "second decode", "kv_consumer") for version in VERSIONS)
    upgraded = [new_prefill, new_first, new_second]
    with ExitStack() as stack:
        for one in upgraded:
            stack.callback(one.stop)
        stack.enter_context(running([single, first]))  # the first of each fills vLLM's cache
        stack.enter_context(running([prefill, second]))
        router = started(stack, temporary, prefill, [first, second])
        load = SteadyLoad(router.url, single, tokens=12)
        with load.clients(CLIENTS):
            assert loads_more(first)
            router.replace("decode", first, new_first)
            assert loads_more(new_first), "from the old version to the new one"
            router.replace("prefill", prefill, new_prefill)
            assert loads_more(second), "from the new version to the old one"
            assert version_of(second) != version_of(new_prefill)
            router.replace("decode", second, new_second)
            assert loads_more(new_second)
        assert {version_of(one) for one in upgraded} == {version_of(single)}
        assert {*router.engines().values()} == {one.url for one in upgraded}
        assert {*handoffs(new_first), *handoffs(new_second)} == {"loaded"}
    assert not load.errors
    assert load.counts["wrong"] == 0
    assert load.counts["right"] >= 4 * MOVED
