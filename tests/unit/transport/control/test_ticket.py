"""Tickets: nothing in one can be made up or changed."""

from __future__ import annotations

import base64

import msgspec
import pytest

from disagg.errors import TransferError
from disagg.transport.control.client import Endpoint
from disagg.transport.control.ticket import (
    Handoff,
    Invitation,
    prompt_digest,
    sign,
    verify,
    verify_invitation,
)

HANDOFF = Handoff("prefill-0", 7, [Endpoint("127.0.0.1", 4000, "life")], [32], 300, 128, bytes(24))

INVITATION = Invitation("prefill-0", HANDOFF.endpoints, [32], 128)


def test_round_trip() -> None:
    assert verify(sign(HANDOFF, b"secret"), b"secret") == HANDOFF


def test_every_byte_counts() -> None:
    raw = base64.b64decode(sign(HANDOFF, b"secret"))
    for at in range(len(raw)):
        changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(TransferError) as error:
            verify(base64.b64encode(changed).decode(), b"secret")
        assert error.value.reason == "forged"


@pytest.mark.parametrize("ticket", [None, 5, ["x"], {"a": 1}, "%", "ä", "A" * (5 << 20)])
def test_not_a_ticket(ticket: object) -> None:
    with pytest.raises(TransferError) as error:
        verify(ticket, b"secret")
    assert error.value.reason == "malformed"


def test_signed_but_of_another_version() -> None:
    from disagg.transport.control import ticket

    body = msgspec.msgpack.encode(["too", "short"])
    token = base64.b64encode(ticket._mac(body, b"secret", ticket.Handoff) + body).decode()
    with pytest.raises(TransferError) as error:
        verify(token, b"secret")
    assert error.value.reason == "malformed"


@pytest.mark.parametrize(
    "changed",
    [
        {"block_size": 0},
        {"block_size": -32},
        {"num_tokens": 0},
        {"endpoints": [Endpoint("127.0.0.1", 0, "life")]},
        {"endpoints": [Endpoint("127.0.0.1", 1 << 16, "life")]},
    ],
)
def test_signed_with_numbers_that_cannot_be(changed: dict[str, object]) -> None:
    """An engine would divide by them, or connect to them."""
    ticket = sign(msgspec.structs.replace(HANDOFF, **changed), b"secret")
    with pytest.raises(TransferError) as error:
        verify(ticket, b"secret")
    assert error.value.reason == "malformed"


def test_other_deployment() -> None:
    with pytest.raises(TransferError) as error:
        verify(sign(HANDOFF, b"secret"), b"other")
    assert error.value.reason == "forged"


def test_an_invitation_is_signed_as_a_ticket_is() -> None:
    token = sign(INVITATION, b"secret")
    assert verify_invitation(token, b"secret") == INVITATION
    raw = base64.b64decode(token)
    for at in range(len(raw)):
        changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        with pytest.raises(TransferError) as error:
            verify_invitation(base64.b64encode(changed).decode(), b"secret")
        assert error.value.reason == "forged"
    with pytest.raises(TransferError) as error:
        verify_invitation(token, b"other")
    assert error.value.reason == "forged"


def test_a_ticket_is_no_invitation_and_an_invitation_no_ticket() -> None:
    """Either is signed for its own purpose."""
    for check, token in (
        (verify, sign(INVITATION, b"secret")),
        (verify_invitation, sign(HANDOFF, b"secret")),
    ):
        with pytest.raises(TransferError) as error:
            check(token, b"secret")
        assert error.value.reason == "forged"


@pytest.mark.parametrize("ticket", [None, 5, ["x"], {"a": 1}, "%", "\u00e4", "A" * (5 << 20)])
def test_not_an_invitation(ticket: object) -> None:
    with pytest.raises(TransferError) as error:
        verify_invitation(ticket, b"secret")
    assert error.value.reason == "malformed"


@pytest.mark.parametrize(
    "changed", [{"block_size": 0}, {"endpoints": [Endpoint("127.0.0.1", 0, "life")]}]
)
def test_an_invitation_with_numbers_that_cannot_be(changed: dict[str, object]) -> None:
    token = sign(msgspec.structs.replace(INVITATION, **changed), b"secret")
    with pytest.raises(TransferError) as error:
        verify_invitation(token, b"secret")
    assert error.value.reason == "malformed"


def test_a_prompts_digest_is_of_all_its_digests() -> None:
    assert HANDOFF.prompt() == prompt_digest(HANDOFF.digests)
    found = {prompt_digest(bytes(24)[:at] + b"x" + bytes(23 - at)) for at in range(24)}
    assert len(found | {prompt_digest(b""), HANDOFF.prompt()}) == 26
    assert {len(one) for one in found} == {16}
