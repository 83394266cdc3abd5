"""The connectors under test: how each is configured, and how a router speaks with it.

A handoff is two requests. The prefill leg's answer, or the router itself, makes the params of the
decode leg. Every connector runs between two engines that may both prefill and decode.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from disagg.errors import StartupError
from disagg.router.api.bodies import REMOTE_DECODE
from disagg.testing import followed_legs
from disagg.testing.http import client
from disagg.testing.ports import free_port
from disagg.testing.vllm_server import START_S
from disagg.vllm_compat.versions import installed as vllm_version

LEASE_S = 6
REQUEST_ID = "X-Request-Id"
"""A param of this name is sent as the header."""
Params = dict[str, Any]


def _nothing(folder: Path) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Connector:
    """One connector.

    config: of vLLM's `--kv-transfer-config`, for one engine; the argument is a folder that both
    engines share. env: of each engine. prefill: the params of the prefill leg. decode: those of the
    decode leg, of the prefill engine's environment, the prefill leg's params and its answer's;
    None: this connector takes no params, so that references cannot go wrong. beside: what has to
    run besides the engines; the argument is the folder. follow: the params of both legs if they are
    sent at once, of what an earlier prefill leg answered; None: decode's leg waits for that answer.
    """

    name: str
    distribution: str
    config: Callable[[Path], dict[str, Any]]
    env: Callable[[], dict[str, str]]
    prefill: Callable[[], Params]
    decode: Callable[[Mapping[str, str], Params, Any], Params | None]
    module: str = "vllm"
    beside: Callable[[Path], contextlib.AbstractContextManager[None]] = _nothing
    follow: Callable[[Params], tuple[Params, Params]] | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot run here; None if it may."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.distribution} is not installed"
        return None

    @property
    def version(self) -> str:
        """Of the package that moves its bytes."""
        known = vllm_version() if self.module == "vllm" else version(self.distribution)
        return f"{self.distribution} {known}"


def _answered(env: Mapping[str, str], asked: Params, answered: Any) -> Params | None:
    return dict(answered) if isinstance(answered, dict) else None


def _no_params(env: Mapping[str, str], asked: Params, answered: Any) -> None:
    return None


def _remote_decode() -> Params:
    return dict(REMOTE_DECODE)


def _ours(folder: Path) -> dict[str, Any]:
    (folder / "ours").mkdir(mode=0o700, exist_ok=True)
    extra = {
        "storage_path": str(folder / "ours"),
        "transports": ["process_memory", "tcp"],
        "lease_s": float(LEASE_S),
        "load_deadline_s": 10.0,
        "lease_limit_s": 20.0,
    }
    return {
        "kv_connector": "DisaggConnector",
        "kv_connector_module_path": "disagg.connector",
        "kv_connector_extra_config": extra,
    }


def _ours_env() -> dict[str, str]:
    return {"DISAGG_SECRET": "the secret of this bench"}


def _ours_at_once(answered: Params) -> tuple[Params, Params]:
    stream, invited = secrets.token_hex(16), answered[followed_legs.INVITATION]
    return followed_legs.prefill_params(stream), followed_legs.decode_params(invited, stream)


def _nixl(name: str) -> Callable[[Path], dict[str, Any]]:
    extra = {"kv_lease_duration": LEASE_S}
    return lambda folder: {
        "kv_connector": name,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _nixl_env() -> dict[str, str]:
    # UCX's default transports do not start everywhere.
    tls = os.environ.get("UCX_TLS", "sm,self,tcp")
    return {"UCX_TLS": tls, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}


def _push(folder: Path) -> dict[str, Any]:
    config = _nixl("NixlPushConnector")(folder)
    more = {"push_registration_timeout": LEASE_S}
    return {**config, "kv_connector_extra_config": config["kv_connector_extra_config"] | more}


def _same_id() -> Params:
    return {**REMOTE_DECODE, REQUEST_ID: uuid.uuid4().hex}


def _registered(env: Mapping[str, str], asked: Params, answered: Any) -> Params | None:
    """The decode engine names its blocks to the prefill engine, which pairs both legs by their
    request id."""
    params = _answered(env, asked, answered)
    return None if params is None else {**params, REQUEST_ID: asked[REQUEST_ID]}


def _example(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder / "example")}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}


def _mooncake(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeConnector",
        "kv_connector_module_path": "disagg.testing.mooncake_on_cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }


def _mooncake_env() -> dict[str, str]:
    return {
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port()),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE_S),
    }


def _named() -> Params:
    return {**REMOTE_DECODE, "transfer_id": f"xfer-{uuid.uuid4().hex}"}


def _bootstrapped(env: Mapping[str, str], asked: Params, answered: Any) -> Params | None:
    """Mooncake's router asks the prefill engine's bootstrap server for the engine's id."""
    address = f"http://127.0.0.1:{env['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"
    try:
        known = client().get(f"{address}/query", timeout=5).json()
    except (httpx.HTTPError, ValueError):
        known = {}
    engine = next((one["engine_id"] for one in known.values()), str(uuid.uuid4()))
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": engine,
        "remote_bootstrap_addr": address,
        "transfer_id": asked["transfer_id"],
    }


def _lmcache(folder: Path) -> dict[str, Any]:
    extra = {
        "lmcache.mp.host": "tcp://localhost",
        "lmcache.mp.port": _lmcache_port(folder),
        "lmcache.mp.mq_timeout": 20.0,
    }
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "disagg.testing.lmcache_on_fork",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _lmcache_env() -> dict[str, str]:
    return {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


@cache
def _lmcache_port(folder: Path) -> int:
    return free_port()


@contextlib.contextmanager
def _lmcache_server(folder: Path) -> Iterator[None]:
    """The cache, a process that both engines use. Its chunks are blocks of the engines."""
    args = {
        "port": _lmcache_port(folder),
        "http-port": free_port(),
        "l1-size-gb": 1,
        "eviction-policy": "LRU",
        "chunk-size": 32,
        "supported-transfer-mode": "engine_driven",
    }
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--disable-observability"]
    command += [part for name, value in args.items() for part in (f"--{name}", str(value))]
    env = os.environ | _lmcache_env()
    with (folder / "lmcache-server.log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for_port(_lmcache_port(folder), server)
        yield
    finally:
        server.kill()
        server.wait()


def _wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise StartupError("LMCache's server does not listen")


CONNECTORS = (
    Connector(
        "disagg",
        "disagg",
        _ours,
        _ours_env,
        _remote_decode,
        _answered,
        "disagg",
        follow=_ours_at_once,
    ),
    Connector(
        "NixlConnector",
        "nixl",
        _nixl("NixlConnector"),
        _nixl_env,
        _remote_decode,
        _answered,
        "nixl",
    ),
    Connector("NixlPushConnector", "nixl", _push, _nixl_env, _same_id, _registered, "nixl"),
    Connector(
        "ExampleConnector",
        "vllm",
        _example,
        dict,
        dict,
        _no_params,
    ),
    Connector(
        "MooncakeConnector",
        "mooncake-transfer-engine-non-cuda",
        _mooncake,
        _mooncake_env,
        _named,
        _bootstrapped,
        "mooncake",
    ),
    Connector(
        "LMCacheMPConnector",
        "lmcache",
        _lmcache,
        _lmcache_env,
        dict,
        _no_params,
        "lmcache",
        _lmcache_server,
    ),
)
