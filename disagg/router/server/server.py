"""One router process: what it serves, and the uvicorn server that does."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI

from disagg import credentials
from disagg.config import ConnectorName, RouterSection
from disagg.credentials import ApiKey, TlsFiles
from disagg.router.server import http_limits
from disagg.router.server.app import create_app
from disagg.router.server.drain import Drain
from disagg.router.server.endpoint import Front
from disagg.router.server.peer_processes import Alone, PeerProcesses
from disagg.router.topology import EngineEndpoint

# How long answers that were cut have to close their connections.
_CLOSE_S = 1


@dataclass(frozen=True)
class RouterPlan:
    """All that makes a router, as plain data: another process makes the same one of it."""

    section: RouterSection
    engines: Sequence[EngineEndpoint]
    api_keys: Sequence[ApiKey] = ()
    engine_key: str | None = field(default=None, repr=False)
    connector: ConnectorName = "disagg"
    strict: bool = False
    down: Mapping[str, str] = field(default_factory=dict)
    """Why other engines, by name, are not there at the moment."""

    def server(self, sock: socket.socket) -> RouterServer:
        """A server of it on a bound socket. Raises ConfigError if its TLS files are no good."""
        app = create_app(
            self.section,
            self.engines,
            down=self.down,
            api_keys=self.api_keys,
            engine_key=self.engine_key,
            connector=self.connector,
            strict=self.strict,
        )
        return RouterServer(app, sock, credentials.tls(self.section))


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket on exactly this address; port 0 takes any free one. Raises OSError.

    `shared`: other sockets of this user's may be bound to it as well.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def settle() -> None:
    """Once a process of a router alone serves: what is there stays, and the garbage collector
    need not look at it (all of it takes 70 ms, in which nobody is served). Nor at what requests
    make as often as it is wont to, every few of them: nearly all of that frees itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def url_of(section: RouterSection, port: int) -> str:
    """Where a router that listens on this port is reached from this machine."""
    scheme = "http" if section.tls_cert_file is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(section.host, section.host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class RouterServer:
    """A server inside somebody else's event loop; it installs no signal handlers."""

    def __init__(self, app: FastAPI, sock: socket.socket, tls: TlsFiles | None = None) -> None:
        self.app = app
        self._server = _Quiet(_config(app, tls))
        self._socket = sock
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        alone: Alone = app.state.peer_processes
        self.asked = alone.asked
        """Set when somebody asked for a drain by command."""

    async def start(self) -> None:
        """Returns when requests are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the router's server ended while starting")
            await asyncio.sleep(0.01)

    async def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, str]) -> None:
        """Other engines from now on; see `Topology.replace`."""
        self.app.state.replace(engines, down)

    async def figures(self) -> bytes:
        """The router's own metrics, as `/metrics` has them."""
        peer_processes: PeerProcesses = self.app.state.peer_processes
        return await peer_processes.figures()

    async def ended(self) -> None:
        """Returns after an ordinary stop; raises RuntimeError if the server ends without one."""
        assert self._task is not None
        await asyncio.wait([self._task])
        if self._stopping:
            return
        error = None if self._task.cancelled() else self._task.exception()
        raise RuntimeError("the router's server ended by itself") from error

    async def finish(self, grace_s: float) -> None:
        """Accept nothing new; returns when all is served, or was cut after `grace_s`.

        Connections that are open stay so meanwhile, and hear that new requests are refused.
        """
        self._stopping = True
        drain: Drain = self.app.state.drain
        drain.begin()
        if self._server.started:
            for server in self._server.servers:
                server.close()
            self._socket.close()
        await drain.finish(time.monotonic() + grace_s)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, let running requests go on for `grace_s`, cut them, close."""
        await self.finish(grace_s)
        self._server.config.timeout_graceful_shutdown = _CLOSE_S
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Quiet(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever embeds us."""
        yield


def _config(app: FastAPI, tls: TlsFiles | None) -> uvicorn.Config:
    return uvicorn.Config(
        Front(app, app.state.straight),
        interface="asgi3",
        loop="uvloop",
        http=http_limits.within(app.state.limits),
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # nobody asks who the client is
        server_header=False,  # nor what serves it
        lifespan="on",
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
