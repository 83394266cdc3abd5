"""Requests that change an engine's state. The router sends them to all engines of both roles.

They change adapters, caches or weights. If only one engine changed, the others would compute with
the old state, and hand off KV that does not match. Such a request must never go to one engine only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec
from starlette.responses import Response
from yarl import URL

from disagg.router.api.errors import ApiError
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import client as upstream

# Of vLLM 0.32. Most exist only in its development mode.
PATHS = frozenset(
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/collective_rpc",
        "/sleep",
        "/wake_up",
        "/release_kv_cache_memory",
        "/pause",
        "/resume",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_checker",
        "/start_profile",
        "/stop_profile",
    ]
)
_LONGEST_MESSAGE = 300


async def ask(
    client: aiohttp.ClientSession,
    engines: Sequence[EngineEndpoint],
    target: str,
    data: bytes,
    headers: Sequence[tuple[str, str]],
    limit_s: float,
) -> Response:
    """POST to all engines at once. If all accept, returns the answer of one. Else raises `ApiError`
    with the errors of those that refused: then some engines may have changed and others not, and
    the client should send the request again.

    `target`: raw path and query. `limit_s`: time limit for each engine's head, and for its body.
    """
    if not engines:
        raise ApiError(503, "no engine is known", {"Retry-After": "1"})
    answers = await asyncio.gather(
        *(ask_one(client, engine, target, data, headers, limit_s) for engine in engines)
    )
    refused = {
        engine.name: answer
        for engine, answer in zip(engines, answers, strict=True)
        if answer.status_code >= 400
    }
    if not refused:
        # With status 200 an engine may still report failure: blocks are in use, try again.
        return next((one for one in answers if _reports_failure(bytes(one.body))), answers[-1])
    status = max(answer.status_code for answer in refused.values())
    done = len(engines) - len(refused)
    raise ApiError(status, f"{_listed(refused)}; {done} of {len(engines)} engines did it")


async def ask_one(
    client: aiohttp.ClientSession,
    engine: EngineEndpoint,
    target: str,
    data: bytes,
    headers: Sequence[tuple[str, str]],
    limit_s: float,
) -> Response:
    """POST to this engine. Returns its answer, or an error response if it gave none."""
    url = URL(f"{engine.url}{target}", encoded=True)
    try:
        # A redirect could lead to a path that the caller may not use.
        sent = [*headers, *engine.headers.items()]
        call = client.post(url, data=data or None, headers=sent, allow_redirects=False)
        answer = await upstream.head(call, limit_s, engine.role)
        async with asyncio.timeout(limit_s):
            content = await answer.read()
    except ApiError as error:
        return error.response()
    except (aiohttp.ClientError, TimeoutError):
        return ApiError(502, "its answer broke off").response()
    return Response(content, answer.status, media_type=answer.headers.get("content-type"))


def _reports_failure(body: bytes) -> bool:
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return False
    return isinstance(content, dict) and content.get("success") is False


def _listed(refused: Mapping[str, Response]) -> str:
    return ", ".join(
        f"{name} answered {answer.status_code}: {error_message(bytes(answer.body))}"
        for name, answer in refused.items()
    )


def error_message(body: bytes) -> str:
    """The error message in an engine's answer."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return body.decode(errors="replace")[:_LONGEST_MESSAGE] or "nothing"
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message if message is not None else content)[:_LONGEST_MESSAGE]
