"""Real vLLM engines, started once for the whole session."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from disagg.config import RouterSection
from disagg.credentials import ApiKey
from disagg.router.main import RouterServer, bind, create_app
from disagg.router.topology import EngineEndpoint
from disagg.testing.checkpoint import make_model
from disagg.testing.forked_servers import ForkServer
from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer

# Short, so that tests can see leases end; long enough for the slowest prefill.
LEASE_S = 8.0

_LAYER = 2 * 128 * 2 * 64 * 4  # KV heads, tokens, K and V, head dim, float32
LAYERS, DEEP_LAYERS = 2, 4  # each makes a step 2 ms longer
BLOCK_BYTES, DEEP_BLOCK_BYTES = LAYERS * _LAYER, DEEP_LAYERS * _LAYER

SLOW = pytest.mark.slow

# Gives every consumer tiers as well, for a run by hand: host, directory or both.
TIERS = os.environ.get("DISAGG_TEST_TIERS", "")
_TIERS: dict[str, Callable[[pytest.TempPathFactory], dict[str, object]]] = {
    "host": lambda folders: {"host_bytes": 1 << 28},
    "directory": lambda folders: {"host_bytes": 1 << 24, "directory": str(folders.mktemp("tier"))},
    "both": lambda folders: {"host_bytes": 1 << 28, "directory": str(folders.mktemp("tier"))},
}


def lengths(*short: int, long: Sequence[int] = ()) -> pytest.MarkDecorator:
    """Parametrizes `length`, the tokens of a prompt. `make soak` alone tries the `long` ones."""
    return pytest.mark.parametrize("length", [*short, *(pytest.param(n, marks=SLOW) for n in long)])


@dataclass(frozen=True)
class Fleet:
    """producer, consumer: as the README's plain vLLM. single: no connector.

    tcp, files: consumers over TCP, over shared storage alone. strict: kv_both with `strict`, over
    TCP alone, and a cache so small that requests are preempted.
    """

    producer: VllmServer
    consumer: VllmServer
    tcp: VllmServer
    files: VllmServer
    single: VllmServer
    strict: VllmServer
    storage: Path
    paused: set[str] = field(default_factory=set)

    def servers(self) -> list[VllmServer]:
        return [one for one in vars(self).values() if isinstance(one, VllmServer)]

    def wake(self, *names: str) -> None:
        """Let these engines run and no others: idle ones poll, and a few of them fill two cores."""
        for server in self.servers():
            if server.process is None or server.process.poll() is not None:
                continue  # a test ended it
            if server.name in names and server.name in self.paused:
                server.resume()
                self.paused.discard(server.name)
            elif server.name not in names and server.name not in self.paused:
                server.pause()
                self.paused.add(server.name)


def transfer(role: str, **extra: object) -> dict[str, object]:
    """The `--kv-transfer-config` of the README; `extra` goes into the extra config."""
    return {
        "kv_connector": "DisaggConnector",
        "kv_connector_module_path": "disagg.connector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def tiers(**extra: object) -> dict[str, object]:
    """The same of docs/tiers.md."""
    return {
        "kv_connector": "DisaggOffloadConnector",
        "kv_connector_module_path": "disagg.connector.offload",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def beside(handoff: dict[str, object], tier: dict[str, object]) -> dict[str, object]:
    """Both in one engine."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": handoff["kv_role"],
        "kv_connector_extra_config": {"connectors": [handoff, tier]},
    }


@contextmanager
def running(servers: Sequence[VllmServer]) -> Iterator[None]:
    """Start these engines together; stop them at the end."""
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.stop()


class HasUrl(Protocol):
    """An engine, or what stands before it."""

    @property
    def url(self) -> str: ...


OPERATOR = ApiKey("op", "of-an-operator", is_admin=True)
AS_OPERATOR = {"authorization": f"Bearer {OPERATOR.value}"}


@contextmanager
def routed(prefills: Sequence[HasUrl], decodes: Sequence[HasUrl], **section: Any) -> Iterator[str]:
    """The URL of a router of ours in front of these; `section` as in the YAML, but leases are
    followed on this one host, too. Everybody may infer, and `OPERATOR` operates."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engines = [EngineEndpoint(f"prefill-{i}", "prefill", s.url) for i, s in enumerate(prefills)]
    engines += [EngineEndpoint(f"decode-{i}", "decode", s.url) for i, s in enumerate(decodes)]
    sock = bind("127.0.0.1", 0)
    pairing = {"follow": True, **section.pop("pairing", {})}
    settings = RouterSection.model_validate({"port": 0, "pairing": pairing, **section})
    server = RouterServer(create_app(settings, engines, api_keys=[OPERATOR]), sock)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(20)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(1), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def begun(url: str) -> float:
    """How many streams began with a token of prefill's."""
    name = "disagg_router_first_tokens_from_prefill_total "
    lines = client().get(f"{url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    # With most seeds, some JSON that the model is asked for never ends.
    make_model(path, layers=LAYERS, seed=19)
    return path


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what needs more layers than two."""
    path = tmp_path_factory.mktemp("model") / "deep"
    make_model(path, layers=DEEP_LAYERS)
    return path


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[Callable[..., VllmServer]]:
    """A `VllmServer` that starts in seconds."""
    fork_server = ForkServer()
    yield partial(VllmServer, start=fork_server.start)
    fork_server.stop()


@pytest.fixture(scope="session")
def fleet(
    model: Path, vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    logs = tmp_path_factory.mktemp("logs")
    # Secret and storage are the defaults: a folder of this user's in the temporary one.
    temporary = tmp_path_factory.mktemp("tmp")
    options: dict[str, object] = {"lease_s": LEASE_S}
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    routes = ("--middleware", "disagg.engine.routes.Routes")
    blocks = ("--num-gpu-blocks-override", "640")  # vLLM touches them all when it starts
    small = ("--num-gpu-blocks-override", "24", "--max-model-len", "2560")

    def consumer(**extra: object) -> dict[str, object]:
        plain = transfer("kv_consumer", **options, **extra)
        return beside(plain, tiers(**_TIERS[TIERS](tmp_path_factory))) if TIERS else plain

    def server(name: str, config: dict[str, object] | None, *args: str) -> VllmServer:
        env = {"TMPDIR": str(temporary)}
        return vllm_server(name, model, logs / f"{name}.log", config, args, env=env)

    fleet = Fleet(
        server("producer", transfer("kv_producer", **options), *tools, *blocks, *routes),
        server("consumer", consumer(), *tools, *blocks, *routes),
        server("tcp", consumer(transports=["tcp"]), *tools, *blocks),
        server("files", consumer(transports=["shared_storage"]), *tools, *blocks),
        server("single", None, *tools, *blocks),
        server("strict", transfer("kv_both", strict=True, transports=["tcp"], **options), *small),
        temporary / f"disagg-{os.getuid()}" / "handoffs",
    )
    with running(fleet.servers()):
        yield fleet


@pytest.fixture(autouse=True)
def awake(request: pytest.FixtureRequest) -> None:
    """Of the engines, those that the test's module names in ENGINES."""
    names = getattr(request.module, "ENGINES", ())
    if names:
        fleet: Fleet = request.getfixturevalue("fleet")
        fleet.wake(*names)


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Random token ids, never the same twice in a session and the same in every session."""
    generator = random.Random(request.node.nodeid)
    return lambda length: [generator.randrange(300, 1000) for _ in range(length)]
