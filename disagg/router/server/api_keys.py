"""Finds out who sends a request: anyone, a client or an operator. Keys are compared in constant
time.

It keeps only digests of the keys. It must never reveal which key a wrong one resembles, and must
never take an address, such as loopback, for an identity.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Scope

from disagg.credentials import ApiKey
from disagg.router.api.errors import ApiError

PEER = "disagg.peer"
"""The key of a `SocketPeer` in the state of the scope of a request at the router's own socket."""


@dataclass(frozen=True)
class SocketPeer:
    """The process that connected to the router's own socket, as the kernel reports it."""

    pid: int
    uid: int


@dataclass(frozen=True)
class Caller:
    """Who sent a request. name: of the key, for the log. has_key: a configured key, or the router's
    own socket."""

    name: str | None = None
    has_key: bool = False
    is_operator: bool = False
    peer: SocketPeer | None = None


_ANYONE = Caller()


class KeyRing:
    """The keys of one router. Without clients' keys, every client may infer."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._callers = [
            (_digest(key.value), Caller(_name(key, number), True, key.is_admin))
            for number, key in enumerate(keys, start=1)
        ]
        self._needs_key = not all(key.is_admin for key in keys)
        self.has_admin_keys = any(key.is_admin for key in keys)

    def check(self, scope: Scope) -> Caller:
        """Who sent this request. `ApiError` 401 if clients need a key and it has none."""
        caller = self.find(scope)
        if caller is _ANYONE and self._needs_key:
            raise ApiError(
                401,
                "missing or wrong API key: send Authorization: Bearer <key>, or x-api-key",
                {"WWW-Authenticate": "Bearer"},
            )
        return caller

    def find(self, scope: Scope) -> Caller:
        """Who sent this request, also if it has no right key."""
        peer: SocketPeer | None = scope["state"].get(PEER)
        if peer is not None:
            return Caller("socket", True, True, peer)
        if not self._callers:
            return _ANYONE
        scheme, _, given = _authorization(scope).partition(" ")
        shown = _digest(given.strip())
        # All keys are compared, so that the time taken reveals nothing about any of them.
        found = [one for digest, one in self._callers if hmac.compare_digest(digest, shown)]
        return found[0] if found and scheme.lower() == "bearer" else _ANYONE


def header(scope: Scope, name: bytes) -> str | None:
    """A header's first value."""
    for key, value in scope["headers"]:
        if key == name:
            field: str = value.decode("latin-1")
            return field
    return None


def _authorization(scope: Scope) -> str:
    """The key sent: OpenAI's clients send `authorization`, Anthropic's `x-api-key`."""
    given = header(scope, b"authorization")
    if given:
        return given
    key = header(scope, b"x-api-key")
    return f"Bearer {key}" if key else ""


def _name(key: ApiKey, number: int) -> str | None:
    # An audit line must name its operator.
    return key.name or (f"admin-key-{number}" if key.is_admin else None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
