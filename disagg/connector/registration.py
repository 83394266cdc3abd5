"""Registers our connectors with vLLM by name.

vLLM loads a connector by its module path; but when it reads statistics of connectors inside a
MultiConnector, it finds them by name.
"""

from __future__ import annotations

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register(name: str, module: str) -> None:
    """Register a connector class; does nothing if it is registered."""
    with contextlib.suppress(ValueError):  # registered already
        KVConnectorFactory.register_connector(name, module, name)
