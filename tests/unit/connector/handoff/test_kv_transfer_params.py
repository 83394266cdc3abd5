"""The params between prefill and decode: what is read of them, and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from disagg.connector.handoff.kv_transfer_params import (
    INVITATION,
    STREAM,
    TICKET,
    Requested,
    answer,
    read,
)
from disagg.router.api import bodies
from disagg.transport.control.client import Endpoint
from disagg.transport.control.ticket import Handoff, Invitation, sign, verify_invitation

SECRET = b"0" * 32
HOSTS = [Endpoint("127.0.0.1", 4000, "life")]
HANDOFF = Handoff("prefill-0", 7, HOSTS, [2], 40, 16, bytes(24))
INVITED = Invitation("prefill-0", HOSTS, [2], 16)
NAME = "0123456789abcdef" * 2
RAW = bytes.fromhex(NAME)
ODD_NAMES = (None, 7, [NAME], "", NAME[1:], NAME + "0", NAME.upper(), NAME[1:] + "\n", "x" * 32)
TICKETED = {"do_remote_prefill": True, TICKET: sign(HANDOFF, SECRET)}
FOLLOWS = {
    "do_remote_prefill": True,
    INVITATION: {"ticket": sign(INVITED, SECRET), "step_tokens": 128},
    STREAM: NAME,
}


def test_an_answer_is_read_by_its_consumer() -> None:
    """It says how prompts of this engine can be followed, if they can."""
    alone = answer(HANDOFF, SECRET, "r", [[1, 2, 3]])
    assert read(alone, SECRET) == Requested(False, HANDOFF, None)
    assert INVITATION not in alone
    more = answer(HANDOFF, SECRET, "r", [[1, 2, 3]], step_tokens=128)
    assert read(json.loads(json.dumps(more)), SECRET) == Requested(False, HANDOFF, None)
    assert more[INVITATION]["step_tokens"] == 128
    assert verify_invitation(more.pop(INVITATION)["ticket"], SECRET) == INVITED
    assert more == alone


def test_the_router_writes_the_keys_that_are_read() -> None:
    written = bodies.PARAMS, bodies.TICKET, bodies.STREAM, bodies.INVITATION
    assert written == ("kv_transfer_params", TICKET, STREAM, INVITATION)


def test_both_legs_name_the_stream() -> None:
    assert read({"do_remote_decode": True, STREAM: NAME}, SECRET) == Requested(
        True, None, None, RAW
    )
    assert read(FOLLOWS, SECRET) == Requested(False, None, None, RAW, INVITED)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_other_names_are_none(name: object) -> None:
    assert read({"do_remote_decode": True, STREAM: name}, SECRET) == Requested(True, None, None)
    assert read({**FOLLOWS, STREAM: name}, SECRET) == Requested(False, None, "malformed")


def test_a_ticket_is_used_where_there_is_one() -> None:
    """A router may send the invitation along."""
    assert read({**FOLLOWS, **TICKETED}, SECRET) == Requested(False, HANDOFF, None)
    assert read({**FOLLOWS, TICKET: None}, SECRET) == Requested(False, None, "malformed")


@pytest.mark.parametrize(
    ("invitation", "problem"),
    [
        ({"ticket": sign(INVITED, b"other")}, "forged"),
        ({"ticket": sign(HANDOFF, SECRET)}, "forged"),
        ({"ticket": "%"}, "malformed"),
        ({}, "malformed"),
        (sign(INVITED, SECRET), "malformed"),
        (None, "malformed"),
    ],
)
def test_an_invitation_that_is_none(invitation: object, problem: str) -> None:
    assert read({**FOLLOWS, INVITATION: invitation}, SECRET) == Requested(False, None, problem)


def test_a_prefill_leg_fetches_what_a_neighbour_holds() -> None:
    """And may grow a lease of the whole prompt itself."""
    both = {"do_remote_decode": True, **TICKETED}
    assert read(both, SECRET) == Requested(True, HANDOFF, None)
    assert read({**both, STREAM: NAME}, SECRET) == Requested(True, HANDOFF, None, RAW)
    assert read({**both, TICKET: "%", STREAM: NAME}, SECRET) == Requested(
        True, None, "malformed", RAW
    )
    assert read({**both, **FOLLOWS, TICKET: None}, SECRET).handoff is None


def test_nobody_asks_for_anything() -> None:
    assert read(None, SECRET) == Requested(False, None, None)
    assert read({STREAM: NAME, INVITATION: FOLLOWS[INVITATION]}, SECRET) == Requested(
        False, None, None
    )
    for params in ([], "x", 7, [FOLLOWS]):
        assert read(params, SECRET) == Requested(False, None, "malformed")


def test_any_params() -> None:
    """None raises, and none but whole ones have a handoff or an invitation."""
    rng = random.Random(11)
    odd: tuple[Any, ...] = (*ODD_NAMES, {}, [], True, 1.5, NAME, FOLLOWS[INVITATION], TICKETED)
    keys = ("do_remote_decode", "do_remote_prefill", STREAM, INVITATION, TICKET)
    for _ in range(3000):
        params = {key: rng.choice(odd) for key in keys if rng.random() < 0.6}
        found = read(params, SECRET)
        assert found.handoff is None
        assert (found.invitation is None) or (
            params[INVITATION] is FOLLOWS[INVITATION] and params[STREAM] == NAME
        )
        assert found.prefill == bool(params.get("do_remote_decode"))
