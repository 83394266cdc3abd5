"""`kv_transfer_params`: the message from a prefill to a decode engine, through any router.

The outer keys follow NIXL's pull contract, so that existing routers pass them on. We write them,
but never read them. What we read is one signed string under `disagg`, the ticket
(`transport/control/ticket.py`); so routers that turn integers into floats do no harm.

A router may also send both legs at once. It names the stream in both, by a random number, and gives
decode the invitation that an earlier answer of the prefill engine had. Decode then follows the
lease while prefill computes the prompt. Nobody can guess the number, and a stream serves no other
prompt than its own.

A prefill leg may have a ticket too: of an engine whose cache holds a prefix of the prompt. It
fetches that, computes the rest, and grants a lease of the whole.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from disagg.errors import TransferError
from disagg.transport.control.ticket import (
    Handoff,
    Invitation,
    sign,
    verify,
    verify_invitation,
)

TICKET, STREAM, INVITATION = "disagg", "disagg_stream", "disagg_invitation"
_STREAM = re.compile("[0-9a-f]{32}")


class Requested(NamedTuple):
    """A request's params, parsed. prefill: keep the blocks afterwards. problem: why there is no
    handoff although the params ask for one, as a metric label. stream: this request's lease, while
    it grows. invitation: to follow that lease."""

    prefill: bool
    handoff: Handoff | None
    problem: str | None
    stream: bytes = b""
    invitation: Invitation | None = None


def answer(
    handoff: Handoff,
    secret: bytes,
    request_id: str,
    block_ids: list[list[int]],
    step_tokens: int | None = None,
) -> dict[str, Any]:
    """The params that a finished prefill returns. step_tokens: how many tokens it computes in one
    step at most, if its leases may be followed."""
    first = handoff.endpoints[0]
    more = {}
    if step_tokens is not None:
        invitation = Invitation(
            handoff.engine, handoff.endpoints, handoff.layers, handoff.block_size
        )
        more[INVITATION] = {"ticket": sign(invitation, secret), "step_tokens": step_tokens}
    return more | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": handoff.engine,
        "remote_request_id": request_id,
        "remote_block_ids": block_ids,
        "remote_host": first.host,
        "remote_port": first.port,
        "remote_num_tokens": handoff.num_tokens,
        "remote_block_size": handoff.block_size,
        "remote_blocks_expiry_time": None,
        "tp_size": len(handoff.endpoints) // len(handoff.layers),
        "dcp_size": 1,
        "pp_size": len(handoff.layers),
        "transfer_mode": "pull",
        TICKET: sign(handoff, secret),
    }


def read(params: object, secret: bytes) -> Requested:
    """Parse params of any shape. Never raises."""
    if not isinstance(params, dict):
        return Requested(False, None, None if params is None else "malformed")
    stream = _stream(params.get(STREAM))
    prefill = bool(params.get("do_remote_decode"))
    if not params.get("do_remote_prefill"):
        return Requested(prefill, None, None, stream if prefill else b"")
    try:
        invited = params.get(INVITATION)
        if not prefill and stream and TICKET not in params and isinstance(invited, dict):
            invitation = verify_invitation(invited.get("ticket"), secret)
            return Requested(False, None, None, stream, invitation)
        handoff = verify(params.get(TICKET), secret)
        return Requested(prefill, handoff, None, stream if prefill else b"")
    except TransferError as error:
        return Requested(prefill, None, error.reason, stream if prefill else b"")


def _stream(name: object) -> bytes:
    """The stream's name; empty if it is none."""
    if not isinstance(name, str) or not _STREAM.fullmatch(name):
        return b""
    return bytes.fromhex(name)
