"""Routes of ours on an engine's own OpenAI server, beside vLLM's.

They are for the router, never for clients; the server listens on loopback or on the
cluster's inner address. What they are given is trusted only as far as its signature goes.
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter, Body, FastAPI, HTTPException
from fastapi.concurrency import run_in_threadpool

from disagg.engine.args import SECRET_ENV
from disagg.errors import TransferError
from disagg.transport.base import Deadline
from disagg.transport.handoff import release_everywhere
from disagg.transport.ticket import verify

RELEASE_S = 5.0

router = APIRouter(prefix="/disagg")


def add_routes(app: FastAPI) -> None:
    """Mount our routes; `app.state.engine_client` is vLLM's engine."""
    app.include_router(router)


@router.post("/release")
async def release(kv_transfer_params: dict[str, Any] = Body(embed=True)) -> dict[str, str]:  # noqa: B008
    """Let go of a lease that will not be fetched: its request was cancelled or refused."""
    secret = os.environ[SECRET_ENV].encode()
    try:
        handoff = verify(kv_transfer_params.get("disagg"), secret)
        deadline = Deadline.after(RELEASE_S)
        await run_in_threadpool(release_everywhere, handoff, secret, deadline)
    except TransferError as error:
        raise HTTPException(409, detail=f"not released ({error.reason})") from error
    return {"status": "released"}
