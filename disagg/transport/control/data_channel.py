"""Messages for the transports' own connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from disagg.errors import PeerRefused
from disagg.safe_logging import foreign

T = TypeVar("T")

encode = msgspec.msgpack.Encoder().encode


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """A function that decodes messages of one kind. It raises `PeerRefused` for anything else.

    Make it at import: msgspec crashes if two threads are the first to decode a kind.
    """
    decode_one = msgspec.msgpack.Decoder(kind).decode

    def decode(body: bytes) -> T:
        try:
            return decode_one(body)
        except msgspec.DecodeError as error:
            raise PeerRefused(
                f"{kind.__name__} not understood: {foreign(error)}", reason="protocol"
            ) from error

    return decode
