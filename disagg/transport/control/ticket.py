"""A ticket: the producer's signed description of one lease, for the consumer.

It travels through routers and clients as one opaque string: a msgpack `Handoff` behind a keyed
hash of the deployment's secret. It cannot be forged or changed, and a consumer connects only to
addresses from tickets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Annotated

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
    then `DIGEST` bytes for the tokens after the last full block.
    """

    engine: str
    lease: int
    endpoints: list[Endpoint]
    layers: list[int]
    num_tokens: Annotated[int, msgspec.Meta(ge=1)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    digests: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Handoff).decode


def sign(handoff: Handoff, secret: bytes) -> str:
    """The signed ticket."""
    body = _encode(handoff)
    return base64.b64encode(_mac(body, secret) + body).decode()


def verify(ticket: object, secret: bytes) -> Handoff:
    """The handoff of a ticket; raises `TransferError` with reason malformed or forged."""
    if not isinstance(ticket, str) or len(ticket) > _MAX_TICKET:
        raise TransferError("kv_transfer_params lack a disagg ticket", reason="malformed")
    try:
        raw = base64.b64decode(ticket, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TransferError(f"ticket is not base64: {error}", reason="malformed") from error
    mac, body = raw[:_MAC], raw[_MAC:]
    if not hmac.compare_digest(mac, _mac(body, secret)):
        raise TransferError("ticket not signed with this deployment's secret", reason="forged")
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise TransferError(
            f"ticket of another version: {foreign(error)}", reason="malformed"
        ) from error


def _mac(body: bytes, secret: bytes) -> bytes:
    key = hashlib.sha256(b"ticket" + secret).digest()
    return hashlib.blake2b(body, key=key, digest_size=_MAC).digest()
