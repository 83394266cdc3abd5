"""Tickets: what a producer signs for consumers.

A ticket travels through routers and clients as one opaque string: msgpack behind a keyed hash of
the deployment's secret. It cannot be forged or changed, and a consumer connects only to addresses
from tickets. A `Handoff` describes one lease. An `Invitation` describes the producer alone: with it
a consumer can follow a lease that grows, if it knows the name of its stream.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Annotated, Any, TypeVar

import msgspec

from disagg.errors import TransferError
from disagg.safe_logging import foreign
from disagg.transport.control.client import Endpoint

DIGEST = 8
_MAX_TICKET = 4 << 20
_MAC = 16


class Handoff(msgspec.Struct, frozen=True, array_like=True):
    """One lease, as the consumer sees it.

    endpoints: one per producer rank, one pipeline stage after the other. layers: how many regions
    each pipeline stage's cache has. digests: `DIGEST` bytes per full block of the prompt, chained,
    then `DIGEST` bytes for the tokens after the last full block. stream: of a lease that is
    followed while it grows; its consumer makes this object itself, and does not know the number.
    """

    engine: str
    lease: int
    endpoints: list[Endpoint]
    layers: list[int]
    num_tokens: Annotated[int, msgspec.Meta(ge=1)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    digests: bytes
    stream: bytes = b""

    def prompt(self) -> bytes:
        """A digest of the whole prompt."""
        return prompt_digest(self.digests)


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """A producer, as its consumers see it: the fields of a `Handoff` that all its leases share."""

    engine: str
    endpoints: list[Endpoint]
    layers: list[int]
    block_size: Annotated[int, msgspec.Meta(ge=1)]


_Signed = TypeVar("_Signed", Handoff, Invitation)
_PURPOSES: dict[type, bytes] = {Handoff: b"ticket", Invitation: b"invitation"}
_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in _PURPOSES
}


def prompt_digest(digests: bytes) -> bytes:
    """A digest of a whole prompt, from its `Handoff.digests`."""
    return hashlib.blake2b(digests, digest_size=_MAC).digest()


def sign(signed: Handoff | Invitation, secret: bytes) -> str:
    """The signed ticket."""
    body = _encode(signed)
    return base64.b64encode(_mac(body, secret, type(signed)) + body).decode()


def verify(ticket: object, secret: bytes) -> Handoff:
    """The handoff of a ticket; raises `TransferError` with reason malformed or forged."""
    return _verified(ticket, secret, Handoff)


def verify_invitation(ticket: object, secret: bytes) -> Invitation:
    """As `verify`, for an invitation."""
    return _verified(ticket, secret, Invitation)


def _verified(ticket: object, secret: bytes, kind: type[_Signed]) -> _Signed:
    if not isinstance(ticket, str) or len(ticket) > _MAX_TICKET:
        raise TransferError("kv_transfer_params lack a disagg ticket", reason="malformed")
    try:
        raw = base64.b64decode(ticket, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TransferError(f"ticket is not base64: {error}", reason="malformed") from error
    mac, body = raw[:_MAC], raw[_MAC:]
    if not hmac.compare_digest(mac, _mac(body, secret, kind)):
        raise TransferError("ticket not signed with this deployment's secret", reason="forged")
    try:
        decoded: _Signed = _decoders[kind].decode(body)
        return decoded
    except msgspec.DecodeError as error:
        raise TransferError(
            f"ticket of another version: {foreign(error)}", reason="malformed"
        ) from error


def _mac(body: bytes, secret: bytes, kind: type) -> bytes:
    key = hashlib.sha256(_PURPOSES[kind] + secret).digest()
    return hashlib.blake2b(body, key=key, digest_size=_MAC).digest()
