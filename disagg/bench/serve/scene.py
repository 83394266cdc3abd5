"""The engines of `disagg bench serve`, and a router in front of those that are measured.

All engines live for the whole run. Engines that are not being measured are stopped (SIGSTOP). Each
run has a new router, which has never seen a stopped engine. More than one pair of engines are forks
of one process, for else their start would take longer than the load.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from disagg.bench.first_token.handoff import MODEL
from disagg.bench.serve import conversations, load, parts, ray_serve, trace
from disagg.bench.serve.load import Batch
from disagg.bench.serve.plan import ServeLoad, ServePlan
from disagg.bench.serve.score import Run
from disagg.bench.serve.ways import WAYS, Way
from disagg.config import Role
from disagg.errors import StartupError
from disagg.testing.forked_servers import ForkServer
from disagg.testing.http import client
from disagg.testing.launch import launch
from disagg.testing.ports import free_port
from disagg.testing.vllm_server import Started, VllmServer, spawn

BLOCK = 128
"""Tokens of the engines' blocks."""
_OURS = {"kv_connector": "DisaggConnector", "kv_connector_module_path": "disagg.connector"}
_SECRET = {"DISAGG_SECRET": "the secret of this bench"}
# Ray Serve starts in a minute on few cores.
_ROUTER_STARTS_S = 180.0
_KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Scene:
    """See the module. `stack` ends the engines. `folder`: for the router's settings."""

    def __init__(self, plan: ServePlan, stack: ExitStack, console: Console, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._events: dict[str, dict[str, str]] = {}
        """By the engine's URL: where it publishes its KV events."""
        ways = [WAYS[name] for name in plan.ways]
        self._start: Callable[[Sequence[str], dict[str, str], Path], Started] = spawn
        if plan.pairs > 1:
            forks = ForkServer()
            stack.callback(forks.stop)
            self._start = forks.start
        self._plain, self._prefill, self._decode = (list[VllmServer]() for _ in range(3))
        if any(not way.is_apart for way in ways):
            hears = any(way.hears for way in ways if not way.is_apart)
            self._plain = [
                self._engine(stack, f"plain {n}", None, hears=hears) for n in range(2 * plan.pairs)
            ]
        if any(way.is_apart for way in ways):
            hears = any(way.hears for way in ways if way.is_apart)
            for n in range(plan.pairs):
                self._prefill.append(self._engine(stack, f"prefill {n}", "prefill", hears=hears))
                self._decode.append(self._engine(stack, f"decode {n}", "decode", hears=hears))
        servers = [*self._plain, *self._prefill, *self._decode]
        console.print(f"starting {len(servers)} engines, which takes minutes on few cores")
        began = time.monotonic()
        for server in servers:
            server.wait_ready()
            console.print(f"{server.name} ready after {time.monotonic() - began:.0f} s")
        for server in servers:
            server.pause()

    def _engine(self, stack: ExitStack, name: str, role: Role | None, *, hears: bool) -> VllmServer:
        """`role`: None of a plain engine. `hears`: it publishes KV events."""
        most, args, env = self._plan.batched_tokens, list[str](), dict[str, str]()
        if role == "decode":
            most = self._plan.decode_batched_tokens or most
        if most is not None:
            args += ["--max-num-batched-tokens", str(most)]
        if role == "prefill" and self._plan.prefill_seqs is not None:
            args += ["--max-num-seqs", str(self._plan.prefill_seqs)]
        config: dict[str, Any] | None = None
        if role is not None:
            shares = any(WAYS[name].shares for name in self._plan.ways)
            config = {**_OURS, "kv_role": "kv_both" if shares else _KV_ROLES[role]}
            env = _SECRET
        addresses = dict[str, str]()
        if hears:
            names = ("endpoint", "replay_endpoint")
            ports = {one: free_port() for one in names}
            addresses = {one: f"tcp://127.0.0.1:{port}" for one, port in ports.items()}
            # vLLM connects to an address that names a host, and binds one that does not.
            bound = {one: f"tcp://*:{port}" for one, port in ports.items()}
            events = {"enable_kv_cache_events": True, "publisher": "zmq", **bound}
            args += ["--kv-events-config", json.dumps(events)]
        server = VllmServer(
            name, MODEL.absolute(), None, config, args, env=env, block_size=BLOCK, start=self._start
        )
        stack.enter_context(server)
        if addresses:
            self._events[server.url] = addresses
        return server

    def run(self, name: str, asked: ServeLoad, key: str) -> Run:
        """Run the load on one way to serve. `key`: seed of the prompts; none may come twice."""
        servers = [*self._prefill, *self._decode] if WAYS[name].is_apart else self._plain
        for server in servers:
            server.resume()
        try:
            return self._run(name, asked, key, servers)
        finally:
            for server in servers:
                with suppress(ProcessLookupError):  # it ended
                    server.pause()

    def _run(self, name: str, asked: ServeLoad, key: str, servers: Sequence[VllmServer]) -> Run:
        way = WAYS[name]
        loaded, before = _loaded(servers), _samples(servers)
        times_before = self._times() if way.is_apart else None
        with ExitStack() as stack:
            command = self._router(way)
            url, _ = launch(stack, f"the router of {name}", command, start_s=_ROUTER_STARTS_S)
            batch = self._send(url, asked, key)
            router = None if way.peer else parts.sums([_exposition(url)], parts.ROUTER)
        first_token = None
        if times_before is not None and router is not None:
            grown = map(parts.growth, times_before, self._times())
            first_token = parts.parts(router, *grown)
        for server in servers:
            if server.process is not None and server.process.poll() is not None:
                raise StartupError(f"{server.name} ended under the load of {name}", server.tail())
        tokens = None
        if asked.talk is not None:
            tokens = conversations.counted(before, _samples(servers), batch.exchanges, BLOCK)
        handed_over = _loaded(servers) - loaded
        return Run(name, asked.rate, asked.offered, batch, handed_over, tokens, first_token)

    def _times(self) -> tuple[parts.Sums, parts.Sums]:
        """Sums of times of the prefill engines and of the decode engines, which must run."""
        prefill, decode = (
            [_exposition(server.url) for server in servers]
            for servers in (self._prefill, self._decode)
        )
        return parts.sums(prefill, parts.OF_PREFILL), parts.sums(decode, parts.OF_DECODE)

    def _send(self, url: str, asked: ServeLoad, key: str) -> Batch:
        if asked.talk is None:
            return load.run(url, asked.asks, trace.prompts(asked.asks, key))
        assert asked.rate is not None
        talks = conversations.conversations(asked.talk, asked.rate, self._plan.seed, key)
        return load.converse(url, talks)

    def _router(self, way: Way) -> list[str]:
        if way.peer is None:
            return self._ours(way)
        if way.peer == "ray-serve":
            return self._ray_serve()
        if way.is_apart:
            return vllm_router(prefill=_urls(self._prefill), decode=_urls(self._decode))
        return vllm_router(plain=_urls(self._plain))

    def _ray_serve(self) -> list[str]:
        if not ray_serve.is_installed():
            raise StartupError(f"Ray Serve is not installed; install it with: {ray_serve.INSTALL}")
        words = [sys.executable, "-m", ray_serve.__name__, "--port", "{port}", "--engines"]
        return [*words, *_urls(self._plain)]

    def _ours(self, way: Way) -> list[str]:
        ours = [sys.executable, "-m", "disagg.cli", "router", "--host", "127.0.0.1"]
        ours += ["--port", "{port}", "--decode-policy", way.policy]
        if way.hears:
            file = self._folder / "router.yaml"
            section: dict[str, Any] = {"engines": {"kv_events": self._events}}
            if way.shares:
                policies = {"prefill": way.policy, "decode": way.policy}
                section["pairing"] = {**policies, "share_caches": "always"}
            file.write_text(json.dumps(section))  # is YAML too
            ours += ["--config", str(file)]
        if not way.is_apart:
            return [*ours, *_options("--decode", _urls(self._plain))]
        plan = self._plan
        ours += ["--prefill-policy", way.policy]
        ours += ["--local-prefill-tokens", str(plan.local_prefill_tokens if way.local else 0)]
        ours += ["--follow" if way.follow else "--no-follow"]
        if way.local and plan.prefill_wait_share is not None:
            ours += ["--prefill-wait-share", str(plan.prefill_wait_share)]
        if way.local:
            ours += ["--first-token", plan.first_token]
            ours += ["--first-token-hold-s", str(plan.first_token_hold_s)]
        ours += _options("--prefill", _urls(self._prefill))
        return ours + _options("--decode", _urls(self._decode))


def vllm_router(
    *, plain: Sequence[str] = (), prefill: Sequence[str] = (), decode: Sequence[str] = ()
) -> list[str]:
    """vllm-router's command for `launch`, with its own defaults, in front of these URLs."""
    command = str(Path(sys.executable).with_name("vllm-router"))
    words = [command, "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning"]
    words += ["--prometheus-port", str(free_port())]
    if plain:
        return [*words, "--worker-urls", *plain]
    words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    return [*words, *_options("--prefill", prefill), *_options("--decode", decode)]


def _exposition(url: str) -> str:
    return client().get(f"{url}/metrics", timeout=10).text


def _urls(servers: Sequence[VllmServer]) -> list[str]:
    return [server.url for server in servers]


def _options(name: str, urls: Sequence[str]) -> list[str]:
    return [word for url in urls for word in (name, url)]


def _samples(servers: Sequence[VllmServer]) -> list[dict[str, float]]:
    return [server.metrics(conversations.SOURCES) for server in servers]


def _loaded(servers: Sequence[VllmServer]) -> int:
    """Handoffs that arrived, by the engines' own count."""
    loaded = "disagg_handoffs_total{outcome=loaded"
    found = [server.metrics("disagg_handoffs") for server in servers]
    return round(sum(v for counts in found for k, v in counts.items() if k.startswith(loaded)))
