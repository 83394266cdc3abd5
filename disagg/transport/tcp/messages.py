"""The messages between the two ends of the tcp transport, and the key of its connections.

`TcpOffer`, `Request` and `Staged` travel over the control channel; `HELLO`, `TcpPull` and `Sending`
are frames on a data connection, where `Sending` is followed by the bytes themselves and a frame
with their checksum. Nothing here opens or waits.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from disagg.transport.control.data_channel import decoder, encode
from disagg.transport.control.secret import secret_for

__all__ = [
    "HELLO",
    "MAX_STREAMS",
    "Request",
    "Sending",
    "Staged",
    "TcpOffer",
    "TcpPull",
    "data_secret",
    "decode_offer",
    "decode_pull",
    "decode_request",
    "decode_sending",
    "decode_staged",
    "encode",
]

HELLO = b"disagg-tcp/1"

# Per fetch. More than any network card needs; it bounds what a peer may request.
MAX_STREAMS = 16


class TcpOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where the producer listens for data connections."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """How many streams the consumer requests."""

    streams: int


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """A fetch that the consumer can request. size: bytes over all streams."""

    at: TcpOffer
    key: bytes
    size: int
    streams: int


class TcpPull(msgspec.Struct, frozen=True, array_like=True):
    """Request one stream of a fetch."""

    key: bytes
    stream: int


class Sending(msgspec.Struct, frozen=True, array_like=True):
    """size: bytes that follow, before their checksum; None if the stream does not exist."""

    size: int | None


decode_offer = decoder(TcpOffer)
decode_request = decoder(Request)
decode_staged = decoder(Staged)
decode_pull = decoder(TcpPull)
decode_sending = decoder(Sending)


def data_secret(secret: bytes) -> bytes:
    """The key of data connections; it does not open a control channel."""
    return secret_for(b"disagg tcp data", secret)
