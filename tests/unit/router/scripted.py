"""Engines that answer exactly the bytes that a test says, and routers for them, over sockets."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from unit.router.conftest import OPERATOR, Loop

from disagg.chaos.expected_answers import answer, compact, content, detokenized
from disagg.config import LimitsSection, Role, RouterSection
from disagg.router.main import RouterServer, bind, create_app
from disagg.router.topology import EngineEndpoint

Body = dict[str, Any]
Stream = Callable[[str, Body], Sequence[bytes | float | None]]
"""The pieces of a stream for a request, each a chunk of its own; a number: a pause in seconds;
None: the connection breaks. Or a status, and a pause before it."""


@dataclass
class Script:
    """What the engines of a router do, in the order of their requests; shared by its engines."""

    streams: list[Stream] = field(default_factory=list)
    """One for each stream that is asked of decode."""
    gate: asyncio.Event | None = None
    """Prefill answers once it is set."""
    metrics: bytes = b""
    metrics_type: bytes = b"text/plain"
    prefix: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list)
    """The path and the authorization of each request."""
    asked: list[Body] = field(default_factory=list)


@dataclass
class ScriptedEngine:
    """An engine of one role that follows a script."""

    role: Role
    script: Script
    tls: ssl.SSLContext | None = None
    port: int = 0
    left: int = 0
    """How many connections were closed in mid-answer."""

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().rstrip().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines)
                own = dict(line.split(": ", 1) for line in lines)
                authorization = {k.lower(): v for k, v in own.items()}.get("authorization", "")
                data = await reader.readexactly(int(headers.get("content-length", "0")))
                path = first.split(" ")[1]
                self.script.seen.append((path, authorization))
                if not path.startswith(self.script.prefix):
                    writer.write(_whole(b"{}", 404))
                    continue
                path = path.removeprefix(self.script.prefix)
                await self._answer(path, json.loads(data) if data else {}, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
        finally:
            writer.close()

    async def _answer(self, path: str, body: Body, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            writer.write(_whole(self.script.metrics, kind=self.script.metrics_type))
        elif path == "/v1/models":
            writer.write(_whole(b'{"data":[{"id":"m","max_model_len":4096}]}'))
        elif path == "/disagg/fingerprint":
            writer.write(_whole(b'{"chats":"plain"}'))
        elif path == "/detokenize":
            writer.write(_whole(compact({"prompt": detokenized(body["tokens"])})))
        elif not path.endswith(("completions", "messages", "responses")):
            writer.write(_whole(b"{}"))
        elif self.role == "prefill":
            if self.script.gate is not None:
                await self.script.gate.wait()
            params = {"kv_transfer_params": {"do_remote_prefill": True, "lease": "x"}}
            writer.write(_whole(compact({**content(path, body), **params})))
        else:
            self.script.asked.append(body)
            if not body.get("stream"):
                return writer.write(_whole(answer(path, body)))
            await _stream(self.script.streams.pop(0)(path, body), writer)
        return None


async def _stream(pieces: Sequence[bytes | float | None], writer: asyncio.StreamWriter) -> None:
    if isinstance(pieces[0], int):  # a status, perhaps after a pause
        await asyncio.sleep(sum(map(float, pieces[1:])))
        return writer.write(_whole(b'{"error":{"message":"told to","code":1}}', pieces[0]))
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    writer.write(b"transfer-encoding: chunked\r\n\r\n")
    for piece in pieces:
        await writer.drain()
        if piece is None:
            await asyncio.sleep(0.02)
            return writer.transport.abort()
        if isinstance(piece, bytes):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await asyncio.sleep(piece if isinstance(piece, float) else 0.01)
    return writer.write(b"0\r\n\r\n")


def _whole(body: bytes, status: int = 200, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 %d Said\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


@contextmanager
def routed(
    loop: Loop,
    engines: Sequence[ScriptedEngine],
    endpoint: Callable[[ScriptedEngine, str], EngineEndpoint] | None = None,
    **settings: Any,
) -> Iterator[str]:
    """The URL of a router in front of these engines. `settings`: of its section."""
    undo: list[Coroutine[Any, Any, None]] = []
    endpoints = []
    for number, engine in enumerate(engines):
        loop.run(engine.start())
        undo.append(engine.stop())
        name = f"{engine.role}-{number}"
        plain = EngineEndpoint(name, engine.role, f"http://127.0.0.1:{engine.port}")
        endpoints.append(plain if endpoint is None else endpoint(engine, name))
    settings.setdefault("pairing", {"local_prefill_tokens": 0})
    settings.setdefault("limits", LimitsSection())
    section = RouterSection(port=0, access_log=False, probe_interval_s=0.2, **settings)
    sock = bind("127.0.0.1", 0)
    server = RouterServer(create_app(section, endpoints, api_keys=[OPERATOR]), sock)
    try:
        loop.run(server.start())
        undo.append(server.stop(1))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        for work in reversed(undo):
            loop.run(work)
