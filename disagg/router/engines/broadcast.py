"""What changes an engine rather than asking it something: sent to all of them, of both roles.

Adapters, caches, weights: changed at one engine alone, others would go on with the old ones, and
hand over what they computed with them.
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

# Of vLLM 0.32; most of them are there in its development mode alone.
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
_LONGEST_REASON = 300


async def ask(
    client: aiohttp.ClientSession,
    engines: Sequence[EngineEndpoint],
    target: str,
    data: bytes,
    headers: Sequence[tuple[str, str]],
    limit_s: float,
) -> Response:
    """POST to all at once; the answer of one if all agree to it. Raises `ApiError` with what the
    others said: then some engines may have done it, and it should be asked again.

    `target`: raw path and query. `limit_s`: of each engine's whole answer.
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
        # Some say with status 200 that they could not: blocks are held, ask again.
        return next((one for one in answers if _failed(bytes(one.body))), answers[-1])
    status = max(answer.status_code for answer in refused.values())
    done = len(engines) - len(refused)
    raise ApiError(status, f"{_told(refused)}; {done} of {len(engines)} engines did it")


async def ask_one(
    client: aiohttp.ClientSession,
    engine: EngineEndpoint,
    target: str,
    data: bytes,
    headers: Sequence[tuple[str, str]],
    limit_s: float,
) -> Response:
    """POST to this engine; its answer, or ours of its failure."""
    url = URL(f"{engine.url}{target}", encoded=True)
    try:
        call = client.post(url, data=data or None, headers=headers)
        answer = await upstream.head(call, limit_s, engine.role)
        async with asyncio.timeout(limit_s):
            content = await answer.read()
    except ApiError as error:
        return error.response()
    except (aiohttp.ClientError, TimeoutError):
        return ApiError(502, "its answer broke off").response()
    return Response(content, answer.status, media_type=answer.headers.get("content-type"))


def _failed(body: bytes) -> bool:
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return False
    return isinstance(content, dict) and content.get("success") is False


def _told(refused: Mapping[str, Response]) -> str:
    return ", ".join(
        f"{name} answered {answer.status_code}: {reason(bytes(answer.body))}"
        for name, answer in refused.items()
    )


def reason(body: bytes) -> str:
    """What an answer that refuses says, for people to read."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return body.decode(errors="replace")[:_LONGEST_REASON] or "nothing"
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return str(said if said is not None else content)[:_LONGEST_REASON]
