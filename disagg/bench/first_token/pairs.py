"""The connectors whose first tokens are measured, each as the settings of two engines."""

from __future__ import annotations

import importlib.util
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.bench.transfer import nixl as nixl_peer
from disagg.errors import ConfigError
from disagg.transport.names import TransportName

SOCKETS = "sockets"
SHOWN = {
    "ours": "disagg",
    "example": "ExampleConnector",
    "nixl": "NixlConnector",
    "nixl-push": "NixlPushConnector",
    SOCKETS: "plain sockets",
}


@dataclass(frozen=True)
class Pair:
    """Two engines and the connector between them. `hands_params`: NIXL's pull contract. same_id:
    both legs also need the same request id."""

    name: str
    config: dict[str, Any]
    roles: tuple[str, str] = ("kv_both", "kv_both")
    hands_params: bool = True
    same_id: bool = False
    env: dict[str, str] = field(default_factory=dict)


def ours(transport: TransportName, folder: Path) -> Pair:
    """DisaggConnector. folder: for the files of shared_storage."""
    extra = {"storage_path": str(folder / "ours"), "transports": [transport]}
    config = {
        "kv_connector": "DisaggConnector",
        "kv_connector_module_path": "disagg.connector",
        "kv_connector_extra_config": extra,
    }
    secret = {"DISAGG_SECRET": "the secret of this bench"}
    return Pair("ours", config, ("kv_producer", "kv_consumer"), env=secret)


def example(folder: Path) -> Pair:
    """vLLM's ExampleConnector, with its files in that folder."""
    extra = {"shared_storage_path": str(folder / "example")}
    config = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}
    return Pair("example", config, hands_params=False)


def nixl(buffers: str, ucx_tls: str, *, push: bool = False) -> Pair:
    """vLLM's NixlConnector, or NixlPushConnector. buffers: the device of its own. ucx_tls: unless
    the environment has another UCX_TLS. Raises ConfigError if NIXL is not installed."""
    name = "nixl-push" if push else "nixl"
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError(f"--peers: {name} — not installed; {nixl_peer.INSTALL}")
    config = {"kv_connector": SHOWN[name], "kv_buffer_device": buffers}
    env = {"UCX_TLS": os.environ.get("UCX_TLS", ucx_tls)}
    return Pair(name, config, same_id=push, env=env)


def random_prompt(generator: random.Random, length: int) -> list[int]:
    """Token ids of a prompt that no cache knows."""
    return [generator.randrange(300, 1000) for _ in range(length)]
