"""Waiting with a deadline."""

from __future__ import annotations

import time
from typing import Any

from disagg.testing.vllm_server import VllmServer


def eventually(condition: Any, timeout: float = 15.0) -> bool:
    """Whether the condition holds before the deadline."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


def reset_caches(engine: VllmServer, *, host: bool = False) -> None:
    """Its prefix cache, once no block is in use, and what its tiers keep in host memory. On a GPU
    a step may still be under way after the answer."""
    path = f"/reset_prefix_cache?reset_external={host}"
    assert eventually(lambda: engine.post(path, {}).json()["success"])
