"""A fake engine whose answers have the forms of the OpenAI and Anthropic APIs, for their SDKs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from unit.router.server.conftest import Engine

MESSAGES = "/v1/messages"
WORDS = ("one ", "two ", "thrée")
TEXT = "".join(WORDS)
_USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
_EVENT_S = 0.01


@dataclass
class ApiEngine(Engine):
    """`endless`: a whole answer does not come, and a stream does not end."""

    endless: bool = False

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        if self.role == "prefill":
            params = {"kv_transfer_params": self.params}
            return web.json_response(whole(request.path, self.model) | params)
        try:
            if body.get("stream"):
                return await self._events(request)
            if self.endless:
                await asyncio.Event().wait()
        except (asyncio.CancelledError, ConnectionResetError):
            self.left.set()
            raise
        return web.json_response(whole(request.path, self.model))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        first, words, last = stream(request.path, self.model)
        await answer.write(first)
        while True:
            for word in words:
                await answer.write(word)
                await asyncio.sleep(_EVENT_S)
            if not self.endless:
                break
        await answer.write(last)
        return answer


def whole(path: str, model: str) -> dict[str, Any]:
    """An answer in one piece."""
    if path == MESSAGES:
        return _message(model, [{"type": "text", "text": TEXT}], "end_turn")
    choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "logprobs": None}
    return _chat(model, choice | {"finish_reason": "stop"}) | {
        "object": "chat.completion",
        "usage": _USAGE,
    }


def stream(path: str, model: str) -> tuple[bytes, list[bytes], bytes]:
    """An answer as events: those before the words, one for each word, and those after."""
    parts = _message_events(model) if path == MESSAGES else _chat_events(model)
    first, words, last = map(list, parts)
    return b"".join(first), words, b"".join(last)


def _chat_events(model: str) -> Iterator[Iterator[bytes]]:
    def event(delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _data(_chat(model, choice) | {"object": "chat.completion.chunk"})

    yield iter([event({"role": "assistant", "content": ""})])
    yield (event({"content": word}) for word in WORDS)
    yield iter([event({}, "stop"), b"data: [DONE]\n\n"])


def _message_events(model: str) -> Iterator[Iterator[bytes]]:
    def event(kind: str, **content: Any) -> bytes:
        return f"event: {kind}\n".encode() + _data({"type": kind, **content})

    block, ended = {"type": "text", "text": ""}, {"stop_reason": "end_turn", "stop_sequence": None}
    yield iter([
        event("message_start", message=_message(model, [], None)),
        event("content_block_start", index=0, content_block=block),
    ])  # fmt: skip
    deltas = ({"type": "text_delta", "text": word} for word in WORDS)
    yield (event("content_block_delta", index=0, delta=delta) for delta in deltas)
    yield iter([
        event("content_block_stop", index=0),
        event("message_delta", delta=ended, usage={"output_tokens": 3}),
        event("message_stop"),
    ])  # fmt: skip


def _chat(model: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "created": 1_700_000_000, "model": model, "choices": [choice]}


def _message(model: str, content: list[dict[str, str]], reason: str | None) -> dict[str, Any]:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": model}
    usage = {"input_tokens": 5, "output_tokens": 3 if content else 0}
    return {
        **head,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": usage,
    }


def _data(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()
