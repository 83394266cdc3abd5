"""Makes our connectors known to vLLM by their names alone.

vLLM loads a connector by module path, but finds those inside its MultiConnector by name when it
reads their statistics.
"""

from __future__ import annotations

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register(name: str, module: str) -> None:
    """A connector class and where it is; again is no matter."""
    with contextlib.suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(name, module, name)
