"""Additions to vLLM's OpenAI server: our routes, and a key that almost every path requires.

Both are for the router, never for clients. The server listens on loopback or on the cluster's inner
address. A route trusts its input only as far as the input's signature goes.
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
from disagg.identity.model import kv_cache_dtype, model_fields
from disagg.transport.control.secret import read_secret
from disagg.transport.control.ticket import verify
from disagg.transport.deadline import Deadline
from disagg.transport.fetch import release_everywhere
from disagg.vllm_compat import versions

RELEASE_S = 5.0
# Paths without the key, for monitoring. They compute nothing.
_OPEN = ("/health", "/metrics", "/metrics/")

router = APIRouter(prefix="/disagg")


def with_routes(app: FastAPI) -> ASGIApp:
    """vLLM's app with our routes, behind the engines' key."""
    app.include_router(router)
    return OnlyWithKey(app, os.environ[KEY_ENV])


class Routes:
    """ASGI middleware: the same routes in a plain `vllm serve`, added with `--middleware
    disagg.engine.routes.Routes`.

    vLLM's `--api-key` does not protect these routes. It need not: a fingerprint is no secret, and a
    release needs a signed ticket.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # vLLM's server sends it once, before all requests
            scope["app"].include_router(router)
        await self._app(scope, receive, send)


class OnlyWithKey:
    """ASGI middleware: every path except those in `_OPEN` requires the key.

    vLLM's own middleware requires the key only under `/v1` and a few other paths. It leaves open
    for example `/tokenize`, `/pooling` and our routes.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._digest = app, _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or scope["path"] in _OPEN
            or self._has_key(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(_digest(key), self._digest) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@router.get("/fingerprint")
async def fingerprint(request: Request) -> dict[str, str]:
    """Fields that must be equal before a router pairs two engines, and fields that the router needs
    to continue an answer on this engine. Workers compare more fields at hello."""
    config = request.app.state.engine_client.vllm_config
    model, cache = config.model_config, config.cache_config
    is_cpu = config.device_config.device_type == "cpu"
    usual = request.app.state.openai_serving_completion.default_sampling_params
    state = request.app.state
    if not hasattr(state, "disagg_model"):
        state.disagg_model = await run_in_threadpool(model_fields, config)
    return {
        **state.disagg_model,
        "vllm": versions.blocks_of(),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_cache_dtype": kv_cache_dtype(config),
        "block_size": str(cache.block_size) if is_cpu else "any",
        "max_tokens": str(usual.get("max_tokens") or ""),
        "scheduling_policy": str(config.scheduler_config.policy),
        "chats": "parsed" if _parses_chats(config) else "plain",
    }


def _parses_chats(config: Any) -> bool:
    """Whether vLLM parses a chat's answer: reasoning, or a format with channels."""
    parser = config.structured_outputs_config.reasoning_parser
    return bool(parser) or config.model_config.hf_config.model_type == "gpt_oss"


@router.get("/adapters")
async def adapters(request: Request) -> list[dict[str, Any]]:
    """The LoRA adapters that were loaded by request while the engine served.

    Each is in the form of a request that loads it.
    """
    models = request.app.state.openai_serving_models
    given = {lora.name: lora.path for lora in models.static_lora_modules or ()}
    return [
        {
            "lora_name": lora.lora_name,
            "lora_path": lora.lora_path,
            "is_3d_lora_weight": lora.is_3d_lora_weight,
            # Without it, an engine that was started with this adapter keeps its own version.
            "load_inplace": lora.lora_name in given,
        }
        for lora in models.lora_requests.values()
        if lora.lora_path != given.get(lora.lora_name)
    ]


@router.post("/release")
async def release(kv_transfer_params: dict[str, Any] = Body(embed=True)) -> dict[str, str]:  # noqa: B008
    """Release a lease whose blocks will not be fetched: its request was cancelled or refused."""
    secret = read_secret()
    try:
        handoff = verify(kv_transfer_params.get("disagg"), secret)
        deadline = Deadline.after(RELEASE_S)
        await run_in_threadpool(release_everywhere, handoff, secret, deadline)
    except TransferError as error:
        raise HTTPException(409, detail=f"not released ({error.reason})") from error
    return {"status": "released"}
