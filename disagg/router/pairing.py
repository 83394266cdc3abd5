"""Which prefill and which decode engine a request gets.

A policy sees the request and the engines of one role, and names one of them. It keeps its own
state and never does I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from disagg.router.topology import EngineEndpoint, Topology


class RequestInfo(NamedTuple):
    """What policies may look at: the endpoint's path and the client's body."""

    path: str
    body: dict[str, Any]


class Policy(Protocol):
    """Chooses among engines of one role."""

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> EngineEndpoint:
        """One of `engines`, which is not empty."""


class RoundRobin:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> EngineEndpoint:
        return engines[next(self._turns) % len(engines)]


class Pairing(NamedTuple):
    """The engines of one request."""

    prefill: EngineEndpoint | None
    decode: EngineEndpoint


class Pairer:
    """One policy per role."""

    def __init__(self, topology: Topology, prefill: Policy, decode: Policy) -> None:
        self._topology = topology
        self._prefill, self._decode = prefill, decode

    def pair(self, request: RequestInfo) -> Pairing | None:
        """The pairing; without a prefill engine decode works alone; None without decode."""
        decode = self.decode(request)
        if decode is None:
            return None
        prefills = self._topology.of("prefill")
        return Pairing(self._prefill.choose(request, prefills) if prefills else None, decode)

    def decode(self, request: RequestInfo) -> EngineEndpoint | None:
        """A decode engine for what needs no prefill leg."""
        engines = self._topology.of("decode")
        return self._decode.choose(request, engines) if engines else None
