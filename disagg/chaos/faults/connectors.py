"""The connectors under test: how each is configured, and how a router speaks with it.

A handoff is two requests. The prefill leg's answer, or the router itself, makes the params of the
decode leg. Every connector runs between two engines that may both prefill and decode.
"""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from disagg.engine.vllm_patches.patching import vllm_version
from disagg.router.api.bodies import REMOTE_DECODE
from disagg.testing.http import client
from disagg.testing.vllm_server import free_port

LEASE_S = 6
Params = dict[str, Any]


@dataclass(frozen=True)
class Connector:
    """One connector.

    config: of vLLM's `--kv-transfer-config`, for one engine; the argument is a folder that both
    engines share. env: of each engine. prefill: the params of the prefill leg. decode: those of the
    decode leg, of the prefill engine's environment, the prefill leg's params and its answer's;
    None: this connector takes no params, so that references cannot go wrong.
    """

    name: str
    distribution: str
    config: Callable[[Path], dict[str, Any]]
    env: Callable[[], dict[str, str]]
    prefill: Callable[[], Params]
    decode: Callable[[Mapping[str, str], Params, Any], Params | None]
    module: str = "vllm"

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


def _remote_decode() -> Params:
    return dict(REMOTE_DECODE)


def _ours(folder: Path) -> dict[str, Any]:
    (folder / "ours").mkdir(mode=0o700, exist_ok=True)
    extra = {
        "storage_path": str(folder / "ours"),
        "transports": ["process_memory", "tcp"],
        "lease_s": float(LEASE_S),
        "load_deadline_s": 10.0,
    }
    return {
        "kv_connector": "DisaggConnector",
        "kv_connector_module_path": "disagg.connector",
        "kv_connector_extra_config": extra,
    }


def _ours_env() -> dict[str, str]:
    return {"DISAGG_SECRET": "the secret of this bench"}


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


def _example(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder / "example")}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}


def _mooncake(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeConnector",
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


CONNECTORS = (
    Connector("disagg", "disagg", _ours, _ours_env, _remote_decode, _answered, "disagg"),
    Connector(
        "NixlConnector",
        "nixl",
        _nixl("NixlConnector"),
        _nixl_env,
        _remote_decode,
        _answered,
        "nixl",
    ),
    Connector(
        "ExampleConnector",
        "vllm",
        _example,
        dict,
        dict,
        lambda env, asked, answered: None,
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
)
