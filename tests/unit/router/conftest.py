"""A router over real sockets, in front of fake engines.

`FakeEngine` only loads and provokes the router. It is a real HTTP server that computes nothing,
records the requests it gets, and fails in the ways that a test sets.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from disagg.config import LimitsSection, Role, RouterSection
from disagg.credentials import ApiKey
from disagg.router.main import RouterServer, bind, create_app
from disagg.router.topology import EngineEndpoint

T = TypeVar("T")
OPERATOR = ApiKey("op", "of-an-operator", is_admin=True)
AS_OPERATOR = {"authorization": f"Bearer {OPERATOR.value}"}
PARAMS = {"do_remote_prefill": True, "remote_host": "p", "disagg": "ticket", "floats": 1.0}

LAST = {
    "/v1/responses": b'event: response.completed\ndata: {"type": "response.completed"}\n\n',
    "/v1/messages": b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
}


class Loop:
    """An event loop in a thread, for servers that synchronous tests talk to."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        self.run(self._end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()


@dataclass
class FakeEngine:
    """How it behaves, which a test may change at any time: status, first_byte_s, gate (it answers
    once set), chunks, chunk_s, padding (bytes of a comment with each chunk), cut_after,
    dies (instead of an answer), refusing
    (answers by path), adapters (that it reports as loaded), cached (tokens of each prompt that its
    caches had, as it says)."""

    role: Role
    status: int = 200
    first_byte_s: float = 0.0
    gate: threading.Event | None = None
    chunks: int = 3
    chunk_s: float = 0.0
    padding: int = 0
    cut_after: int | None = None
    dies: bool = False
    params: Any = field(default_factory=lambda: PARAMS)
    handoffs: dict[str, int] = field(default_factory=dict)
    url: str = ""
    model: str = "m"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    released: list[Any] = field(default_factory=list)
    adapters: list[dict[str, Any]] | None = None
    cached: int | None = None
    asked: list[str] = field(default_factory=list)
    refusing: dict[str, tuple[int, Any]] = field(default_factory=dict)
    left: threading.Event = field(default_factory=threading.Event)
    runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/responses", self._complete)
        app.router.add_post("/v1/messages", self._complete)
        app.router.add_post("/disagg/release", self._release)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/embeddings", self._respond)
        app.router.add_post("/v1/load_lora_adapter", self._respond)
        app.router.add_get("/v1/models", self._models, allow_head=True)
        app.router.add_get("/disagg/adapters", self._adapters)
        app.router.add_get("/gzip", self._gzip)
        app.router.add_get("/cut", self._cut)
        app.router.add_get("/empty", self._empty)
        app.router.add_route("*", "/{rest:.*}", self._other)
        self.runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False)
        await self.runner.setup()
        # Where it listened before, if it did.
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        site = web.TCPSite(self.runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        gate = self.gate  # another one may be set as soon as the body is seen
        self.takes(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        try:
            await asyncio.sleep(self.first_byte_s)
            if gate is not None:
                await asyncio.to_thread(gate.wait, 20)
            if self.dies:
                assert request.transport is not None
                request.transport.abort()
            if self.status != 200:
                return web.json_response({"error": {"message": "told to"}}, status=self.status)
            if not body.get("stream"):
                return web.json_response(self._whole(body))
            return await self._stream(request)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left.set()
            raise

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = {"role": self.role, "kv_transfer_params": self.params}
        if self.cached is not None:
            details = {"cached_tokens": self.cached}
            tokens = len(body["prompt"])
            whole["usage"] = {"prompt_tokens": tokens, "prompt_tokens_details": details}
        return whole

    def takes(self, body: dict[str, Any]) -> None:
        """A request has come."""
        self.bodies.append(body)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        if self.first_byte_s or self.gate is not None:
            return await self._complete(request)
        return await self._other(request)

    async def _gzip(self, request: web.Request) -> web.Response:
        """Compressed although the request did not accept it, with a header twice."""
        answer = web.Response(body=gzip.compress(b"packed"))
        answer.headers["content-encoding"] = "gzip"
        answer.headers["seen-cookie"] = request.headers.get("cookie", "")
        answer.headers.add("set-cookie", "a=1")
        answer.headers.add("set-cookie", "b=2")
        return answer

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        await answer.write(b'{"half": ')
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return answer

    async def _empty(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(self.chunks):
            if number == self.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return answer
            comment = b":" * self.padding + b"\n" if self.padding else b""
            await answer.write(comment + event(number))
            await asyncio.sleep(self.chunk_s)
        await answer.write(LAST.get(request.path, b"data: [DONE]\n\n"))
        return answer

    async def _release(self, request: web.Request) -> web.Response:
        self.released.append((await request.json())["kv_transfer_params"])
        return web.json_response({"status": "released"})

    async def _metrics(self, request: web.Request) -> web.Response:
        counts = "".join(
            f'disagg_handoffs_total{{outcome="{outcome}",transport="tcp"}} {count}\n'
            for outcome, count in self.handoffs.items()
        )
        return web.Response(
            text=f"# TYPE disagg_handoffs_total counter\n{counts}"
            "# HELP disagg_leases_held Held.\n# TYPE disagg_leases_held gauge\n"
            'disagg_leases_held{engine="0"} 2.0\n'
            "# HELP disagg_leases_total Ended.\n# TYPE disagg_leases_total counter\n"
            'disagg_leases_total{engine="0",outcome="fetched"} 5.0\n'
            "# HELP vllm:other Not ours.\n# TYPE vllm:other gauge\nvllm:other 1.0\n"
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
            'disagg_kv_load_failures_total{engine="0",reason="peer_lost"} 1.0\n'
            'disagg_kv_load_failures_total{engine="0",reason="deadline"} 0.0\n'
        )

    async def _adapters(self, request: web.Request) -> web.Response:
        if self.adapters is None:  # an engine without disagg's routes
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(self.adapters)

    async def _models(self, request: web.Request) -> web.Response:
        seen = {"path": request.path_qs, "method": request.method, "text": ""}
        return web.json_response({"data": [{"id": self.model}], **seen})

    async def _other(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        if request.path in self.refusing:
            status, content = self.refusing[request.path]
            return web.json_response(content, status=status)
        text = (await request.read()).decode(errors="replace")
        seen = {"path": request.path_qs, "method": request.method, "text": text}
        return web.json_response(seen, status=200 if request.path != "/v1/missing" else 404)


def event(number: int) -> bytes:
    return f"data: {json.dumps({'n': number, 'text': 'ä' * 10})}\n\n".encode()


@dataclass
class Setup:
    """A router's URL and the engines behind it."""

    url: str
    prefill: FakeEngine
    decode: FakeEngine
    loop: Loop
    server: RouterServer
    endpoints: list[EngineEndpoint]
    others: list[FakeEngine] = field(default_factory=list)

    def lose(self, engine: FakeEngine) -> None:
        """Stop an engine that the first probe has found well, so that requests find it gone."""
        assert wait_for(lambda: "/disagg/fingerprint" in engine.asked)
        self.loop.run(engine.stop())


def wait_for(condition: Callable[[], Any], timeout_s: float = 5.0) -> bool:
    """Whether the condition held once. It is not asked again: it may not hold for long."""
    deadline = time.monotonic() + timeout_s
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(held)


def leave(url: str, body: Any, once: Callable[[], Any]) -> None:
    """Send a request, and disconnect without an answer once the condition holds."""
    host, port = url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(f"{head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        assert wait_for(once, 10)


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key, as files."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    who = ["-subj", "/CN=router", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *kind, *who, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def make(loop: Loop) -> Iterator[Callable[..., Setup]]:
    """Starts a router with a prefill and a decode engine, and more engines of the roles `others`,
    all of one `model` and one `kind`. `options` go to `create_app`. Short prompts are handed off,
    unless `section` says otherwise. Without `api_keys`, everybody may infer, and `OPERATOR`
    operates."""
    undo: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def start(
        *,
        limits: dict[str, Any] | None = None,
        section: dict[str, Any] | None = None,
        others: Sequence[Role] = (),
        model: str = "m",
        kind: type[FakeEngine] = FakeEngine,
        **options: Any,
    ) -> Setup:
        fakes = [kind(role, model=model) for role in ("prefill", "decode", *others)]
        engines = []
        for number, engine in enumerate(fakes):
            loop.run(engine.start())
            undo.append(engine.stop)
            engines.append(EngineEndpoint(f"{engine.role}-{number // 2}", engine.role, engine.url))
        sock = bind("127.0.0.1", 0)
        settings = {"pairing": {"local_prefill_tokens": 0}, **(section or {})}
        options.setdefault("api_keys", [OPERATOR])
        router = RouterSection(port=0, limits=LimitsSection(**(limits or {})), **settings)
        server = RouterServer(create_app(router, engines, **options), sock)
        loop.run(server.start())
        undo.append(lambda: server.stop(1))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        return Setup(url, fakes[0], fakes[1], loop, server, engines, fakes[2:])

    yield start
    for stop in reversed(undo):
        loop.run(stop())


@pytest.fixture
def setup(make: Callable[..., Setup]) -> Setup:
    return make()
