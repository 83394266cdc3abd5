"""Fake engines that fail on purpose, down to single bytes, for `disagg bench router-faults`.

They compute nothing. The header `x-fault` of each request names the faults
(`prefill=reset/once,decode=stall/always`), so the checker knows them too; `x-form` names the way to
write a stream (`stream_forms.py`). The engines count leases: granted, used, released.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from disagg.chaos.expected_answers import answer, compact, content, detokenized, events
from disagg.chaos.stream_forms import FORMS, USUAL

# hang: no answer. stall: half an answer, then silence. reset, die: no answer, half an answer, and
# the connection is reset. close, cut: the same, and the connection is closed. long, short: the
# content-length is wrong. chunks: broken chunked encoding. extra: another answer follows the right
# one.
Common = Literal[
    "right", "refuse", "hang", "stall", "reset", "die", "close", "cut", "500", "502", "503",
    "garbage", "header", "long", "short", "chunks", "extra",
]  # fmt: skip
COMMON: tuple[str, ...] = get_args(Common)
PREFILL: tuple[str, ...] = (*COMMON, "no-json", "no-params", "no-object")
# event: an error event of the engine. end: a stream that ends properly, but early.
DECODE: tuple[str, ...] = (*COMMON, "event", "end")
# Faults after half of a stream was sent.
MID_STREAM = {"stall", "die", "cut", "long", "short", "chunks", "event", "end"}

_EVENT_S = 0.001
# If the router closes a connection so soon after the answer, the lease was still on its way: the
# router cannot know it, and it ends by its deadline.
_UNREAD_S = 1.0
_REASONS = {200: b"OK", 404: b"Not Found", 500: b"Broken", 502: b"Bad", 503: b"Busy"}
_SAID = {
    "/disagg/fingerprint": b'{"chats":"plain"}',
}
_NOT_MINE = b'{"error":{"message":"no such model","type":"NotFoundError","param":null,"code":404}}'
_ERROR = b'{"error":{"message":"told to","type":"InternalServerError","param":null,"code":500}}'
_HTML = b"<html><body>bad gateway at http://127.0.0.1:1/</body></html>"


@dataclass
class State:
    """State of all engines of one process, which serve one model. `tries`: by request id."""

    role: str
    model: str
    granted: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    tries: Counter[str] = field(default_factory=Counter)
    names: Iterator[int] = field(default_factory=itertools.count)


@dataclass(frozen=True)
class Request:
    """One complete HTTP request."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    def events(self) -> Iterator[bytes]:
        """The right stream, in the form that the header `x-form` names."""
        write = FORMS[self.headers.get("x-form", USUAL)]
        return map(write, events(self.path, self.body))

    def fault(self, state: State) -> str:
        """The fault of this request at this engine."""
        wanted = dict(
            part.split("=") for part in self.headers.get("x-fault", "").split(",") if part
        )
        kind, _, lasting = wanted.get(state.role, "right").partition("/")
        state.tries[self.headers.get("x-request-id", "")] += 1
        again = state.tries[self.headers.get("x-request-id", "")] > 1
        # Engines that refuse have closed their listening sockets; this one has not.
        return "right" if kind == "refuse" or (again and lasting == "once") else kind


class FaultyEngine(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, engine: str, state: State, connections: set[FaultyEngine]) -> None:
        self._engine, self._state, self._connections = engine, state, connections
        self._data, self._last = b"", ("", -_UNREAD_S)
        self._gathered: bytearray | None = None
        self._requests = asyncio.Queue[Request]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._task = asyncio.create_task(self._serve_all())

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        lease, answered = self._last
        if time.monotonic() - answered < _UNREAD_S:
            self._state.released.add(lease)
        self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        self._data = rest[length:]
        method, path, _ = first.split(" ")
        body = json.loads(rest[:length]) if length else {}
        self._requests.put_nowait(Request(method, path, headers, body))

    def reset(self) -> None:
        """Close with RST."""
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    # ---- right answers ---------------------------------------------------------------------

    async def _serve_all(self) -> None:
        """Serve the requests of this connection in their order."""
        while True:
            await self._serve(await self._requests.get())

    async def _serve(self, request: Request) -> None:
        if request.path == "/disagg/release":
            lease = request.body["kv_transfer_params"]["lease"]
            if lease.startswith(self._engine + "/"):
                self._state.released.add(lease)
            self._whole(200, b"{}")
        elif request.path == "/detokenize":
            self._whole(200, compact({"prompt": detokenized(request.body["tokens"])}))
        elif request.path == "/v1/models":
            self._whole(200, compact({"data": [{"id": self._state.model, "max_model_len": 4096}]}))
        elif not request.path.endswith("completions"):
            self._whole(200, _SAID.get(request.path, b""))
        elif request.body["model"] != self._state.model:
            self._whole(404, _NOT_MINE)  # to a client, a wrong answer
        elif (fault := request.fault(self._state)) == "right":
            await self._right(request)
        else:
            await self._wrong(request, fault)

    async def _right(self, request: Request) -> None:
        if self._state.role == "prefill":
            return self._whole(200, self._prefilled(request, counts=True))
        self._use(request)
        if not request.body.get("stream"):
            return self._whole(200, answer(request.path, request.body))
        self._head(200, "text/event-stream", "transfer-encoding: chunked")
        for event in request.events():
            self._chunk(event)
            await asyncio.sleep(_EVENT_S)
        return self._write(b"0\r\n\r\n")

    def _prefilled(self, request: Request, *, counts: bool) -> bytes:
        asked = request.body
        if asked["max_tokens"] != 1 or asked["stream"] or not asked["kv_transfer_params"]:
            raise ValueError(f"no prefill leg: {asked}")
        lease = f"{self._engine}/{next(self._state.names)}"
        if counts:
            self._state.granted.add(lease)
            self._last = lease, time.monotonic()
        params = {"do_remote_prefill": True, "remote_engine_id": self._engine, "lease": lease}
        return compact({**content(request.path, asked), "kv_transfer_params": params})

    def _use(self, request: Request) -> None:
        params = request.body.get("kv_transfer_params")
        if params and "lease" in params:
            self._state.used.add(params["lease"])

    # ---- wrong ones ------------------------------------------------------------------------

    async def _wrong(self, request: Request, fault: str) -> None:
        write, body = self._write, self._body(request)
        match fault:
            case "hang":
                return
            case "reset":
                self.reset()
            case "close":
                self._transport.close()
            case "garbage":
                write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            case "header":
                self._head(200, "application/json", "x-huge: " + "x" * 100_000)
            case "500":
                self._whole(500, _ERROR)
            case "502":
                self._whole(502, _HTML, "text/html")
            case "503":
                self._whole(503, b"")
            case "no-json":
                self._whole(200, b'{"kv_transfer_params": {"do_remote_')
            case "no-params":
                self._whole(200, b'{"choices": [], "kv_transfer_params": null}')
            case "no-object":
                self._whole(200, b'[{"kv_transfer_params": 7}]')
            case "extra":
                # In one write: bytes that arrive after the next request was sent would be its
                # answer by the rules of HTTP.
                self._gathered = bytearray()
                await self._right(request)
                self._whole(200, b'{"stray": true}')
                gathered, self._gathered = self._gathered, None
                write(gathered)
            case _ if request.body.get("stream"):
                await self._half_a_stream(request, fault)
            case "end" | "event":  # of streams only
                await self._right(request)
            case "chunks":
                self._use(request)
                self._head(200, "application/json", "transfer-encoding: chunked")
                write(b"%x\r\n%b\r\nnot a size\r\n" % (len(body), body))
            case "short" if self._state.role == "prefill":
                self._head(200, "application/json", f"content-length: {len(body) // 2}")
                write(body)
            case _:
                # Half of a JSON text with a fitting content-length is valid HTTP: decode is never
                # `short` here, but `long`, as the other faults are.
                self._use(request)
                self._head(200, "application/json", f"content-length: {len(body)}")
                write(body[: len(body) // 2])
                await self._break(fault)

    def _body(self, request: Request) -> bytes:
        if self._state.role == "prefill":
            return self._prefilled(request, counts=False)
        return answer(request.path, request.body)

    async def _half_a_stream(self, request: Request, fault: str) -> None:
        self._use(request)
        whole = list(request.events())
        if fault in ("long", "short"):
            text = b"".join(whole)
            half = len(text) // 2
            size = half if fault == "short" else len(text) + 100
            self._head(200, "text/event-stream", f"content-length: {size}")
            self._write(text[:half])
            await asyncio.sleep(_EVENT_S)
            self._write(text[half:])
            return await self._break(fault)
        self._head(200, "text/event-stream", "transfer-encoding: chunked")
        for event in whole[: len(whole) // 2]:
            self._chunk(event)
            await asyncio.sleep(_EVENT_S)
        match fault:
            case "chunks":
                return self._write(b"not a size\r\n")
            case "event":
                self._chunk(b"data: %b\n\n" % _ERROR)
                self._chunk(b"data: [DONE]\n\n")
                return self._write(b"0\r\n\r\n")
            case "end":
                return self._write(b"0\r\n\r\n")
        return await self._break(fault)

    async def _break(self, fault: str) -> None:
        await asyncio.sleep(_EVENT_S)  # lets the written bytes leave
        if fault == "die":
            self.reset()
        elif fault in ("cut", "long", "short"):
            self._transport.close()

    # ---- bytes -----------------------------------------------------------------------------

    def _write(self, data: bytes | bytearray) -> None:
        if self._gathered is None:
            self._transport.write(data)
        else:
            self._gathered += data

    def _head(self, status: int, kind: str, *more: str) -> None:
        lines = "".join(f"{line}\r\n" for line in (f"content-type: {kind}", *more))
        first = b"HTTP/1.1 %d %b\r\n" % (status, _REASONS[status])
        self._write(first + lines.encode() + b"\r\n")

    def _whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self._head(status, kind, f"content-length: {len(body)}")
        self._write(body)

    def _chunk(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
