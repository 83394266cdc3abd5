"""Params of a handoff as no prefill engine made them: cut, changed, forged, or of another engine.

The ticket is signed, so most changes make it void. Whoever has the secret can sign any ticket; of
those, only such are made here that no engine may believe: they name no lease of a living engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from disagg.transport.control.client import Endpoint
from disagg.transport.control.ticket import Handoff, sign, verify

Spoil = Callable[[dict[str, Any], bytes, random.Random], Any]


def spoiled(params: dict[str, Any], secret: bytes, rng: random.Random) -> tuple[str, Any]:
    """What was done to the params, and the result."""
    how = rng.choice(list(SPOILED))
    return how, SPOILED[how](dict(params), secret, rng)


def _flipped(params: dict[str, Any], secret: bytes, rng: random.Random) -> Any:
    ticket, at = params["disagg"], rng.randrange(len(params["disagg"]))
    other = "A" if ticket[at] != "A" else "B"
    return {**params, "disagg": ticket[:at] + other + ticket[at + 1 :]}


def _cut(params: dict[str, Any], secret: bytes, rng: random.Random) -> Any:
    return {**params, "disagg": params["disagg"][: rng.randrange(len(params["disagg"]))]}


def _no_object(params: dict[str, Any], secret: bytes, rng: random.Random) -> Any:
    return rng.choice(([1], "params", 7, [None], [params]))


def _outer_keys(params: dict[str, Any], secret: bytes, rng: random.Random) -> Any:
    """Only the ticket counts: this is a right handoff."""
    numbers = [rng.randrange(-(1 << 40), 1 << 40) for _ in range(rng.randrange(9))]
    return {**params, "remote_block_ids": [numbers], "remote_port": -1, "remote_num_tokens": 1.5}


def _resigned(change: Callable[[Handoff, random.Random], dict[str, Any]]) -> Spoil:
    def spoil(params: dict[str, Any], secret: bytes, rng: random.Random) -> Any:
        handoff = verify(params["disagg"], secret)
        changed = msgspec.structs.replace(handoff, **change(handoff, rng))
        return {**params, "disagg": sign(changed, secret)}

    return spoil


def _elsewhere(handoff: Handoff, rng: random.Random) -> dict[str, Any]:
    """A port where nobody listens."""
    (endpoint,) = handoff.endpoints
    return {"endpoints": [Endpoint(endpoint.host, 1, endpoint.generation)]}


def _earlier_life(handoff: Handoff, rng: random.Random) -> dict[str, Any]:
    (endpoint,) = handoff.endpoints
    return {"endpoints": [Endpoint(endpoint.host, endpoint.port, "0" * 16)]}


SPOILED: dict[str, Spoil] = {
    "a character changed": _flipped,
    "cut": _cut,
    "no ticket": lambda params, secret, rng: {**params, "disagg": rng.choice((None, 3, {}, ""))},
    "no object": _no_object,
    "signed with another secret": lambda params, secret, rng: {
        **params,
        "disagg": sign(verify(params["disagg"], secret), b"another secret of us"),
    },
    "other outer keys": _outer_keys,
    "a lease far ahead": _resigned(
        lambda one, rng: {"lease": one.lease + rng.choice((1 << 20, 1 << 40))}
    ),
    "a lease below 0": _resigned(lambda one, rng: {"lease": -1 - one.lease}),
    "a number that no lease has": _resigned(lambda one, rng: {"lease": (1 << 63) - 1}),
    "a port of nobody": _resigned(_elsewhere),
    "an earlier life": _resigned(_earlier_life),
    "other block size": _resigned(
        lambda one, rng: {"block_size": rng.choice((-32, 0, 16, 64, 1 << 40))}
    ),
    "other layers": _resigned(lambda one, rng: {"layers": rng.choice(([1], [3], [9]))}),
    "no digests": _resigned(lambda one, rng: {"digests": b""}),
}
