"""Which prefill and which decode engine a request gets.

A policy sees the request and the engines of one role, and names one of them. It keeps its own
state and never does I/O.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from typing import Protocol

import xxhash

from disagg.config import PairingSection, PolicyName, Role
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.pairing.cache_aware import CacheAware
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.other_routers import MemoryName
from disagg.router.pairing.prefix_memory import PrefixMemory
from disagg.router.pairing.request_info import Choice, RequestInfo
from disagg.router.pairing.sharing import Sharing
from disagg.router.topology import EngineEndpoint, Topology

# How much busier the engine that knows a prefix may be, at least, before another one gets the
# request: to leave it costs the next turns of a conversation, too.
_WORTH_WAITING_TOKENS = 2048
_MOST_SHOWN = 8  # engines in a message


class Policy(Protocol):
    """Chooses among engines of one role."""

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> Choice:
        """One of `engines`, which is not empty."""


class RoundRobin:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> Choice:
        return Choice(engines[next(self._turns) % len(engines)], request.tokens)


class LeastLoaded:
    """The less busy of two drawn at random, so that several routers do not all choose the same."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._random = random.Random()

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> Choice:
        two = engines if len(engines) == 1 else self._random.sample(engines, 2)
        return Choice(min(two, key=self._in_flight.cost), request.tokens)


class PrefixAffinity:
    """The engine that last had the longest prefix of this prompt, unless it is clearly busier: by
    more work than the prefix spares it.

    Then any engine: the others that had the prefix would soon have more than their caches hold.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight, self._otherwise = in_flight, LeastLoaded(in_flight)
        self.memory = PrefixMemory()

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> Choice:
        chosen = self._knows(request, engines) or self._otherwise.choose(request, engines)
        self.memory.sent(request.prefixes.keys, chosen.engine.name)
        return chosen

    def _knows(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> Choice | None:
        by_name = {engine.name: engine for engine in engines}
        cost, prefixes = self._in_flight.cost, request.prefixes
        for count in range(len(prefixes.keys), 0, -1):
            names = self.memory.engines(prefixes.keys[count - 1])
            engine = next((by_name[name] for name in names if name in by_name), None)
            if engine is not None:
                known = round(request.tokens * prefixes.known(count))
                worth = max(known, _WORTH_WAITING_TOKENS)
                if cost(engine) > worth + min(map(cost, engines)):
                    return None
                return Choice(engine, request.tokens - known)
        return None


class SessionAffinity:
    """One engine for all requests with the same value of a header (rendezvous hashing).

    Without any memory: all routers agree, and when an engine goes only its sessions move.
    """

    def __init__(self, header: str, in_flight: InFlight) -> None:
        self._header, self._otherwise = header.lower(), LeastLoaded(in_flight)

    def choose(self, request: RequestInfo, engines: Sequence[EngineEndpoint]) -> Choice:
        session = request.headers.get(self._header)
        if not session:
            return self._otherwise.choose(request, engines)
        return Choice(max(engines, key=lambda e: _rank(session, e)), request.tokens)


def _rank(session: str, engine: EngineEndpoint) -> int:
    return xxhash.xxh3_64_intdigest(f"{session}\0{engine.name}".encode(errors="replace"))


def make_policy(
    name: PolicyName,
    settings: PairingSection,
    in_flight: InFlight,
    caches: EngineCaches,
    sharing: Sharing | None = None,
) -> Policy:
    """The policy of this name."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded(in_flight)
        case "prefix_affinity":
            return PrefixAffinity(in_flight)
        case "session_affinity":
            return SessionAffinity(settings.session_header, in_flight)
        case "cache_aware":
            return CacheAware(in_flight, caches, PrefixAffinity(in_flight), sharing)


class Pairer:
    """One policy per role, among the engines that are worth a try and have room."""

    def __init__(
        self,
        topology: Topology,
        settings: PairingSection,
        in_flight: InFlight,
        health: Health,
        compatibility: Compatibility,
        caches: EngineCaches | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._topology, self._in_flight, self._health = topology, in_flight, health
        self._compatibility = compatibility
        caches = caches or EngineCaches()
        self._policies: dict[Role, Policy] = {
            "prefill": make_policy(settings.prefill, settings, in_flight, caches, sharing),
            "decode": make_policy(settings.decode, settings, in_flight, caches, sharing),
        }

    def memories(self) -> dict[MemoryName, PrefixMemory]:
        """Who was sent which prompts, of the roles whose policy asks for it."""
        return {
            role: policy.memory
            for role, policy in self._policies.items()
            if isinstance(policy, PrefixAffinity | CacheAware)
        }

    def serves(
        self,
        role: Role,
        tried: Collection[EngineEndpoint] = (),
        partner: EngineEndpoint | None = None,
    ) -> bool:
        """Whether an engine of this role that is not among `tried` may get a request now."""
        return bool(self._candidates(role, tried, partner))

    def awaits(
        self,
        role: Role,
        tried: Collection[EngineEndpoint] = (),
        partner: EngineEndpoint | None = None,
    ) -> bool:
        """Whether it is worth a wait for an engine of this role that is not among `tried`. Decode
        engines may be down for a while; without prefill there is still decode."""
        if self.serves(role, tried, partner):
            return True
        is_known = bool(self._known(role, tried, partner) or self._topology.returning(role))
        return role == "decode" and is_known

    def absence(self, role: Role) -> tuple[str, float | None]:
        """Which engines of this role are away, for a message, and about how many seconds until the
        first of them is back."""
        away = self._topology.returning(role)
        words = [f"{name} {one.why}" for name, one in away.items()]
        words += [f"{engine.name} is down" for engine in self._topology.of(role)]
        if len(words) > _MOST_SHOWN:
            words[_MOST_SHOWN:] = [f"{len(words) - _MOST_SHOWN} more"]
        times = [one.back_s for one in away.values() if one.back_s is not None]
        return ", ".join(words), min(times, default=None)

    def wait_s(self, role: Role) -> float:
        """About how long the least busy engine of this role reads before it; 0 without one."""
        waits = (self._in_flight.reading_s(engine) for engine in self._candidates(role))
        return min(waits, default=0.0)

    def choose(
        self,
        role: Role,
        request: RequestInfo,
        tried: Collection[EngineEndpoint] = (),
        partner: EngineEndpoint | None = None,
        *,
        room: int | None = None,
    ) -> Choice | None:
        """An engine of this role that is not among `tried`, fits `partner` (the engine at the other
        end of the handoff), and has less than `room` requests; None if there is none."""
        engines = [
            engine
            for engine in self._candidates(role, tried, partner)
            if room is None or self._in_flight.requests(engine) < room
        ]
        if not engines:
            return None
        chosen = self._policies[role].choose(request, engines)
        self._health.trying(chosen.engine)
        return chosen

    def _candidates(
        self,
        role: Role,
        tried: Collection[EngineEndpoint] = (),
        partner: EngineEndpoint | None = None,
    ) -> Sequence[EngineEndpoint]:
        engines = self._known(role, tried, partner)
        usable = self._health.usable(engines)
        # Without prefill there is still decode. Of decode, trying is better than waiting, unless
        # requests have just failed.
        return usable or (self._health.unpaused(engines) if role == "decode" else ())

    def _known(
        self, role: Role, tried: Collection[EngineEndpoint], partner: EngineEndpoint | None
    ) -> Sequence[EngineEndpoint]:
        engines = self._topology.of(role)
        if tried:
            engines = [engine for engine in engines if engine not in tried]
        if partner is not None:
            engines = [engine for engine in engines if self._compatibility.fit(engine, partner)]
        return engines
