"""`kv_transfer_params`: the message from a prefill to a decode engine, through any router.

The outer keys follow NIXL's pull contract, so that existing routers pass them on. We write them,
but never read them. What we read is one signed string under `disagg`, the ticket
(`transport/control/ticket.py`); so routers that turn integers into floats do no harm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from disagg.errors import TransferError
from disagg.transport.control.ticket import Handoff, sign, verify

TICKET = "disagg"


class Requested(NamedTuple):
    """A request's params, parsed. prefill: keep the blocks afterwards. problem: why there is no
    handoff although the params ask for one, as a metric label."""

    prefill: bool
    handoff: Handoff | None
    problem: str | None


def answer(
    handoff: Handoff, secret: bytes, request_id: str, block_ids: list[list[int]]
) -> dict[str, Any]:
    """The params that a finished prefill returns."""
    first = handoff.endpoints[0]
    return {
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
    if params.get("do_remote_decode"):
        return Requested(True, None, None)
    if not params.get("do_remote_prefill"):
        return Requested(False, None, None)
    try:
        return Requested(False, verify(params.get(TICKET), secret), None)
    except TransferError as error:
        return Requested(False, None, error.reason)
