"""Serves the app with uvicorn on a socket that was bound before anything else started."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from disagg.config import RouterSection
from disagg.errors import ConfigError
from disagg.router.app import create_app
from disagg.router.topology import EngineEndpoint

__all__ = ["RouterServer", "bind", "create_app", "run"]


def bind(host: str, port: int) -> socket.socket:
    """A socket on exactly this address; port 0 takes any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


class RouterServer:
    """A server inside somebody else's event loop; it installs no signal handlers."""

    def __init__(self, app: FastAPI, sock: socket.socket) -> None:
        self._server = _Quiet(_config(app))
        self._socket = sock
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Returns when requests are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the router's server ended while starting")
            await asyncio.sleep(0.01)

    async def ended(self) -> None:
        """Returns after an ordinary stop; raises RuntimeError if the server ends without one."""
        assert self._task is not None
        await asyncio.wait([self._task])
        if self._stopping:
            return
        error = None if self._task.cancelled() else self._task.exception()
        raise RuntimeError("the router's server ended by itself") from error

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, let streams run for `grace_s`, then cut them."""
        self._stopping = True
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Quiet(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever embeds us."""
        yield


def run(prefill: Sequence[str], decode: Sequence[str], host: str, port: int) -> int:
    """`disagg router`: serve in the foreground until a signal."""
    try:
        sock = bind(host, port)
    except OSError as error:
        raise ConfigError(
            f"--port: {host}:{port} cannot be had ({error.strerror}); choose another one"
        ) from error
    engines = [
        EngineEndpoint(f"prefill-{i}", "prefill", u.rstrip("/")) for i, u in enumerate(prefill)
    ]
    engines += [
        EngineEndpoint(f"decode-{i}", "decode", u.rstrip("/")) for i, u in enumerate(decode)
    ]
    app = create_app(RouterSection(host=host, port=port), engines)
    print(f"Ready: http://{host}:{sock.getsockname()[1]}/v1", flush=True)
    uvicorn.Server(_config(app)).run(sockets=[sock])
    return 0


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # nobody asks who the client is
        lifespan="on",
    )
