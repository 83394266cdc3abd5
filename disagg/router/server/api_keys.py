"""Checks clients' API keys, in constant time.

It keeps only digests of the keys. It must never reveal which key a wrong one resembles.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from disagg.credentials import ApiKey
from disagg.router.api.errors import ApiError


class KeyRing:
    """The keys of one router. Without keys, every client is let in."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(_digest(key.value), key.name) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def check(self, authorization: str) -> str | None:
        """The name of the key in this header, if it has one. A wrong key raises `ApiError` 401."""
        if not self._keys:
            return None
        scheme, _, given = authorization.partition(" ")
        shown = _digest(given.strip())
        # All keys are compared, so that the time taken reveals nothing about any of them.
        names = [name for digest, name in self._keys if hmac.compare_digest(digest, shown)]
        if scheme.lower() != "bearer" or not names:
            raise ApiError(
                401,
                "missing or wrong API key: send Authorization: Bearer <key>, or x-api-key",
                {"WWW-Authenticate": "Bearer"},
            )
        return names[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
