"""What the two ends of the tcp transport say to each other, and with which secret.

`TcpOffer`, `Request` and `Staged` travel over the control channel; `HELLO`, `TcpPull` and `Sending`
are frames on a data connection, where `Sending` is followed by the bytes themselves and a frame
with their checksum. Nothing here opens or waits.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from disagg.transport.control.data_channel import decode, encode, secret_for

__all__ = [
    "HELLO",
    "MAX_STREAMS",
    "Request",
    "Sending",
    "Staged",
    "TcpOffer",
    "TcpPull",
    "data_secret",
    "decode",
    "encode",
]

HELLO = b"disagg-tcp/1"

# Of one fetch. More than any network card needs; a bound for what a peer may ask for.
MAX_STREAMS = 16


class TcpOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where data connections are taken."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """How many streams the consumer would like."""

    streams: int


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """What waits for the consumer: `size` bytes over all streams."""

    at: TcpOffer
    key: bytes
    size: int
    streams: int


class TcpPull(msgspec.Struct, frozen=True, array_like=True):
    """Send this stream of that fetch."""

    key: bytes
    stream: int


class Sending(msgspec.Struct, frozen=True, array_like=True):
    """So many bytes follow, then their checksum; None if there is no such stream (any more)."""

    size: int | None


def data_secret(secret: bytes) -> bytes:
    """What data connections are signed with, so that none passes for a control channel."""
    return secret_for(b"disagg tcp data", secret)
