"""Fake engines for `disagg bench router`: they answer at once and compute nothing.

Prefill answers with kv_transfer_params; decode with a fixed answer in vLLM's form, as 64 events,
each written by itself, or in one piece. A leg without the fields that the other leg provides is
refused, so that no router gains by leaving a leg out. They implement only the HTTP that routers
use, so that the fake engines do not dominate the measurement.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import uvloop

CHUNKS = 64
PROMPT_TOKENS = 150
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[*range(1, 11)]],
    "remote_engine_id": "prefill",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
_USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "completion_tokens": CHUNKS,
    "total_tokens": PROMPT_TOKENS + CHUNKS,
}
_HEAD = b"HTTP/1.1 %d Fake\r\ncontent-type: %b\r\n"
_BACKLOG = 1024


class _FakeEngine(asyncio.Protocol):
    """One connection of one engine."""

    def __init__(self, role: str, pace_s: float) -> None:
        self._role, self._pace_s, self._data = role, pace_s, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        fields = head.lower().split(b"content-length:")
        length = int(fields[1].split(b"\r\n")[0]) if len(fields) > 1 else 0
        if separator and len(rest) >= length:
            self._data = rest[length:]
            self._answer(head.split(b" ", 2)[1], rest[:length])

    def _answer(self, path: bytes, body: bytes) -> None:
        if path != b"/v1/completions":
            self._send(200 if path == b"/health" else 404, b"{}")
        elif self._role == "prefill":
            self._send(*_prefilled(b'"do_remote_decode":true' in _squeezed(body)))
        else:
            self._decode(_squeezed(body))

    def _decode(self, body: bytes) -> None:
        if b'"do_remote_prefill":true' not in body:
            self._send(400, b'{"error": "no kv_transfer_params: the prefill leg was left out"}')
        elif b'"stream":true' not in body:
            self._loop.call_later(self._pace_s * CHUNKS, self._send, 200, _whole())
        else:
            head = _HEAD % (200, b"text/event-stream; charset=utf-8")
            self._transport.write(head + b"transfer-encoding: chunked\r\n\r\n")
            ids, usage = b'"return_token_ids":true' in body, b'"include_usage":true' in body
            self._event(_events(ids, usage), 0)

    def _event(self, events: Sequence[bytes], number: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(events[number])
        if number + 1 == len(events):
            return
        if self._pace_s:
            self._loop.call_later(self._pace_s, self._event, events, number + 1)
        else:
            self._loop.call_soon(self._event, events, number + 1)

    def _send(self, status: int, body: bytes) -> None:
        head = _HEAD % (status, b"application/json")
        self._transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))


def _squeezed(body: bytes) -> bytes:
    """JSON without spaces, however its writer spaces it."""
    return body.replace(b" ", b"")


# ---- answers, in the form of vLLM 0.32 -----------------------------------------------------


@functools.cache
def _prefilled(asked: bool) -> tuple[int, bytes]:
    if not asked:
        return 400, b'{"error": "no do_remote_decode: not a prefill leg"}'
    return 200, _json(prefilled())


@functools.cache
def _whole() -> bytes:
    return _json(whole())


@functools.cache
def _events(ids: bool, usage: bool) -> Sequence[bytes]:
    """A stream as HTTP chunks; with token ids and usage if the request asks for them."""
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in stream(ids, usage)]
    return [*chunks[:-1], chunks[-1] + b"0\r\n\r\n"]


def prefilled() -> dict[str, Any]:
    """The content of a prefill leg's answer."""
    choice = {"index": 0, "text": " word", "finish_reason": "length"}
    return _content([choice]) | {"usage": _USAGE, "kv_transfer_params": PARAMS}


def whole() -> dict[str, Any]:
    """The content of an answer in one piece."""
    choice = {"index": 0, "text": " word" * CHUNKS, "finish_reason": "length"}
    return _content([choice]) | {"usage": _USAGE}


def stream(ids: bool, usage: bool) -> list[bytes]:
    """An answer as events; with token ids and usage if the request asks for them."""
    contents = []
    for number in range(CHUNKS):
        choice = {
            "index": 0,
            "text": " word",
            "logprobs": None,
            "finish_reason": "length" if number == CHUNKS - 1 else None,
            "stop_reason": None,
            "prompt_token_ids": [*range(PROMPT_TOKENS)] if ids and not number else None,
            "token_ids": [number] if ids else None,
        }
        contents.append(_content([choice]))
    if usage:
        contents.append(_content([]) | {"usage": _USAGE})
    return [b"data: " + _json(content) + b"\n\n" for content in contents] + [b"data: [DONE]\n\n"]


def _content(choices: list[dict[str, Any]]) -> dict[str, Any]:
    shape = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1_700_000_000}
    return {**shape, "model": "fake", "choices": choices}


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


async def _serve(role: str, port: int, pace_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _FakeEngine(role, pace_s), "127.0.0.1", port, backlog=_BACKLOG
    )
    await server.serve_forever()


if __name__ == "__main__":
    _role, _port, _pace_ms = sys.argv[1:]
    uvloop.run(_serve(_role, int(_port), float(_pace_ms) / 1000))
