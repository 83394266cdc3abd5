"""Engines forget what they have cached."""

from __future__ import annotations

from disagg.testing.vllm_server import VllmServer
from disagg.testing.waiting import eventually


def reset_caches(engine: VllmServer, *, host: bool = False) -> None:
    """Its prefix cache, once no block is in use, and what its tiers keep in host memory. On a GPU
    a step may still be under way after the answer."""
    path = f"/reset_prefix_cache?reset_external={host}"
    assert eventually(lambda: engine.post(path, {}).json()["success"])
