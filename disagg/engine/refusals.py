"""ASGI middleware: vLLM's refusals in the words of whoever wrote the deployment's YAML.

vLLM names options of its command line, where the YAML has `engine.args`. A path that this model
does not serve gets OpenAI's error shape, not FastAPI's. Only refusals are touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MOST_BYTES = 64 << 10
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
# By FastAPI's `detail`, if that is all that a refusal says.
_UNSERVED: Mapping[int, tuple[str, str]] = {
    HTTPStatus.NOT_FOUND: ("Not Found", "NotFoundError"),
    HTTPStatus.METHOD_NOT_ALLOWED: ("Method Not Allowed", "BadRequestError"),
}


class Refusals:
    """Around vLLM's app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Reworder(scope, send) if scope["type"] == "http" else send
        await self._app(scope, receive, sender)


class _Reworder:
    """Sends one answer. A refusal waits for its whole body, unless that is large."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_refusal(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            more = message.get("more_body", False)
            if not more or len(self._body) > _MOST_BYTES:
                await self._flush(self._start, message, whole=not more)

    async def _flush(self, start: Message, last: Message, *, whole: bool) -> None:
        body, self._start, self._body = self._body, None, b""
        if whole:
            body = _reworded(self._scope, start["status"], body)
            fields = [(n, v) for n, v in start["headers"] if n.lower() != b"content-length"]
            start = {**start, "headers": [*fields, (b"content-length", b"%d" % len(body))]}
        await self._send(start)
        await self._send({**last, "body": body})


def _is_refusal(start: Message) -> bool:
    kinds = [value for name, value in start["headers"] if name.lower() == b"content-type"]
    return start["status"] >= 400 and any(b"json" in kind for kind in kinds)


def _reworded(scope: Scope, status: int, body: bytes) -> bytes:
    """The body, or what stands in its place."""
    try:
        said: Any = json.loads(body)
    except ValueError:
        return body
    if not isinstance(said, dict):
        return body
    detail, kind = _UNSERVED.get(status, (None, ""))
    if detail is not None and said == {"detail": detail}:
        words = f"{scope['method']} {scope['path']}: not served with this model by its engines"
        return _encoded({"error": {"message": words, "type": kind, "param": None, "code": status}})
    error = said.get("error")
    if not isinstance(error, dict):
        return body
    message = error.get("message")
    if not isinstance(message, str) or not _OPTION.search(message):
        return body
    worded = _OPTION.sub(lambda option: f"engine.args.{option[1].replace('-', '_')}", message)
    return _encoded(said | {"error": error | {"message": worded}})


def _encoded(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
