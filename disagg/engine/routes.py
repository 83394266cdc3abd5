"""What we add to an engine's own OpenAI server: routes beside vLLM's, and a key before all.

Both are for the router, never for clients; the server listens on loopback or on the
cluster's inner address. What the routes are given is trusted only as far as its signature goes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

from fastapi import APIRouter, Body, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.engine.args import KEY_ENV
from disagg.errors import TransferError
from disagg.identity.model import model_fields
from disagg.transport.control.secret import read_secret
from disagg.transport.control.ticket import verify
from disagg.transport.deadline import Deadline
from disagg.transport.fetch import release_everywhere

RELEASE_S = 5.0
# Asked by who watches engines. They tell of them, and compute nothing.
_OPEN = ("/health", "/metrics", "/metrics/")

router = APIRouter(prefix="/disagg")


def with_routes(app: FastAPI) -> ASGIApp:
    """vLLM's app with our routes, for those alone who have the engines' key."""
    app.include_router(router)
    return OnlyWithKey(app, os.environ[KEY_ENV])


class Routes:
    """ASGI middleware: the same routes in a vLLM that was started by itself, with `--middleware
    disagg.engine.routes.Routes`. vLLM's `--api-key` does not guard them: fingerprints are no
    secret, and a release needs a signed ticket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # once, before all requests
            scope["app"].include_router(router)
        await self._app(scope, receive, send)


class OnlyWithKey:
    """ASGI middleware: every path but the open ones asks for the key.

    vLLM's own middleware asks for it under `/v1` and a few more, and leaves the rest open, such
    as `/tokenize`, `/pooling` and our routes.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._digest = app, _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or scope["path"] in _OPEN
            or self._shown(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

    def _shown(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(_digest(key), self._digest) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@router.get("/fingerprint")
async def fingerprint(request: Request) -> dict[str, str]:
    """What must agree before a router pairs two engines (the workers compare more at hello), and
    what it must know of one to have it go on with an answer."""
    config = request.app.state.engine_client.vllm_config
    model, cache = config.model_config, config.cache_config
    is_cpu = config.device_config.device_type == "cpu"
    usual = request.app.state.openai_serving_completion.default_sampling_params
    state = request.app.state
    if not hasattr(state, "disagg_model"):
        state.disagg_model = await run_in_threadpool(model_fields, config)
    return {
        **state.disagg_model,
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": str(cache.block_size) if is_cpu else "any",
        "max_tokens": str(usual.get("max_tokens") or ""),
        "chats": "parsed" if _parses_chats(config) else "plain",
    }


def _parses_chats(config: Any) -> bool:
    """Whether what a chat's answer says is not all text: reasoning, or a format with channels."""
    parser = config.structured_outputs_config.reasoning_parser
    return bool(parser) or config.model_config.hf_config.model_type == "gpt_oss"


@router.get("/adapters")
async def adapters(request: Request) -> list[dict[str, Any]]:
    """The LoRA adapters that it was asked to load while it served, as it was asked."""
    models = request.app.state.openai_serving_models
    given = {lora.name: lora.path for lora in models.static_lora_modules or ()}
    return [
        {
            "lora_name": lora.lora_name,
            "lora_path": lora.lora_path,
            "is_3d_lora_weight": lora.is_3d_lora_weight,
            "load_inplace": lora.lora_name in given,  # else whoever has it given keeps that
        }
        for lora in models.lora_requests.values()
        if lora.lora_path != given.get(lora.lora_name)
    ]


@router.post("/release")
async def release(kv_transfer_params: dict[str, Any] = Body(embed=True)) -> dict[str, str]:  # noqa: B008
    """Let go of a lease that will not be fetched: its request was cancelled or refused."""
    secret = read_secret()
    try:
        handoff = verify(kv_transfer_params.get("disagg"), secret)
        deadline = Deadline.after(RELEASE_S)
        await run_in_threadpool(release_everywhere, handoff, secret, deadline)
    except TransferError as error:
        raise HTTPException(409, detail=f"not released ({error.reason})") from error
    return {"status": "released"}
