"""Messages and secrets for the transports' own connections."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from disagg.errors import PeerRefused

T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode


def decode(body: bytes, kind: type[T]) -> T:
    """The message in `body`; raises `PeerRefused` for anything else."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise PeerRefused(f"{kind.__name__} not understood: {error}", reason="protocol") from error


def secret_for(purpose: bytes, secret: bytes) -> bytes:
    """The key for connections of one purpose; it does not open connections of another."""
    return hashlib.blake2b(purpose, key=hashlib.sha256(secret).digest()).digest()
