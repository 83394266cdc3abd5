"""A router whose engines' caches serve each other, in front of fake engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unit.router.conftest import PARAMS, Setup
from unit.router.pairing.test_cache_aware import SIZE, holds

from disagg.router.caches.engine_caches import EngineCaches

PROMPT = list(range(2000, 2000 + 20 * SIZE + 5))
HELD = 15 * SIZE
"""How many of the prompt's tokens the holder's cache has."""
OF_DECODE, OF_PREFILL = (
    {**PARAMS, "disagg": ticket} for ticket in ("decode's ticket", "prefill's ticket")
)


def start(
    make: Callable[..., Setup],
    holder: str,
    pairing: dict[str, Any] | None = None,
    **options: Any,
) -> Setup:
    """The router. The engine of the name `holder` holds the prompt's beginning, and no other one
    does. `options`: of `make`."""
    pairing = {"prefill": "cache_aware", "local_prefill_tokens": 0, **(pairing or {})}
    setup = make(section={"pairing": {"share_caches": "always", **pairing}}, **options)
    setup.decode.params, setup.prefill.params = OF_DECODE, OF_PREFILL
    caches: EngineCaches = setup.server.app.state.models.only._caches
    for engine in setup.endpoints:
        caches.join(engine.name)
        holds(caches, engine, [1] * SIZE)
    holds(caches, next(one for one in setup.endpoints if one.name == holder), PROMPT[:HELD])
    return setup
