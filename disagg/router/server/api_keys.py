"""Which clients may come in: the API keys, compared in constant time.

Knows keys by their digests alone, and must never say which of them a wrong one came close to.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from disagg.credentials import ApiKey
from disagg.router.api.errors import ApiError


class KeyRing:
    """The keys of one router; without any, everyone may come in."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(_digest(key.value), key.name) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def check(self, authorization: str) -> str | None:
        """The name of the key that this header shows, if it has one; `ApiError` 401 if none."""
        if not self._keys:
            return None
        scheme, _, given = authorization.partition(" ")
        shown = _digest(given.strip())
        # All are compared, so that the time taken tells nothing about which one came close.
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
