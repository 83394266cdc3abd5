"""One router process: its plan, its socket and its uvicorn server."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from disagg import credentials
from disagg.config import ConnectorName, RouterSection
from disagg.credentials import ApiKey, TlsFiles
from disagg.router.server import http_limits
from disagg.router.server.app import create_app
from disagg.router.server.cors import Cors
from disagg.router.server.drain import Drain
from disagg.router.server.file_descriptors import FileDescriptors, raise_limit
from disagg.router.server.ingress import Ingress
from disagg.router.server.models import Models
from disagg.router.server.peer_processes import EngineCalls, PeerProcesses, SingleProcess
from disagg.router.server.proxies import TrustedProxies
from disagg.router.topology import Away, EngineEndpoint

_MOST_WAITING = 2048  # connections that the kernel accepts before the router does
# The time for cut answers to close their connections, in seconds.
_CLOSE_S = 1


@dataclass(frozen=True)
class RouterPlan:
    """Everything that defines a router, as plain data that can be sent to another process."""

    section: RouterSection
    engines: Sequence[EngineEndpoint]
    api_keys: Sequence[ApiKey] = ()
    engine_key: str | None = field(default=None, repr=False)
    connector: ConnectorName = "disagg"
    strict: bool = False
    down: Mapping[str, Away] = field(default_factory=dict)
    """The engines that are missing, by name."""

    def server(self, sock: socket.socket, admin: socket.socket | None = None) -> RouterServer:
        """A server for this plan on a bound socket, and on a listening socket for operators.
        Raises ConfigError for bad TLS files."""
        raise_limit()
        app = create_app(
            self.section,
            self.engines,
            down=self.down,
            api_keys=self.api_keys,
            engine_key=self.engine_key,
            connector=self.connector,
            strict=self.strict,
        )
        return RouterServer(app, sock, credentials.tls(self.section), admin)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket on exactly this address; port 0 takes any free one. Raises OSError.

    `shared`: other sockets of the same user may bind the same address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Of a socket without its protocol, asyncio does not turn off Nagle's delay.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
    """Tune the garbage collector of a process that only serves a router, once it is ready.

    A full collection of the objects that exist at the start takes 70 ms, in which no request is
    served: so they are frozen. Nearly all objects of a request are freed by reference counts: so
    collections are made rarer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def url_of(section: RouterSection, port: int) -> str:
    """The URL by which this machine reaches a router that listens on this port."""
    scheme = "http" if section.tls_cert_file is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(section.host, section.host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class RouterServer:
    """A server in the caller's event loop. It must never install signal handlers.

    `admin`: a listening Unix socket for operators, without TLS. It stays open until `stop`, so that
    operators can watch a drain.
    """

    def __init__(
        self,
        app: FastAPI,
        sock: socket.socket,
        tls: TlsFiles | None = None,
        admin: socket.socket | None = None,
    ) -> None:
        self.app = app
        self._admin = admin
        self._admin_server: asyncio.Server | None = None
        self._server = _Server(_config(app, tls))
        self._socket = sock
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        process: SingleProcess = app.state.peer_processes
        self.drain_requested = process.drain_requested
        """Set by a drain command."""

    async def start(self) -> None:
        """Returns when requests are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the router's server exited while starting")
            await asyncio.sleep(0.01)
        if self._admin is not None:
            loop = asyncio.get_running_loop()
            self._admin_server = await loop.create_unix_server(
                self._server.connection, sock=self._admin
            )

    async def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Use these engines from now on; see `Topology.replace`."""
        self.app.state.replace(engines, down)

    async def running(self) -> Mapping[str, int]:
        """How many requests need each engine, by name; without those that none needs."""
        models: Models = self.app.state.models
        return models.needed()

    def manage(self, engines: EngineCalls) -> None:
        """Operators' calls about engines go there."""
        process: SingleProcess = self.app.state.peer_processes
        process.engine_calls = engines

    async def figures(self) -> bytes:
        """The router's own metrics, in the text format of `/metrics`."""
        peer_processes: PeerProcesses = self.app.state.peer_processes
        return await peer_processes.figures()

    async def ended(self) -> None:
        """Returns after `stop` or `finish`. Raises RuntimeError if the server exits by itself."""
        assert self._task is not None
        await asyncio.wait([self._task])
        if self._stopping:
            return
        error = None if self._task.cancelled() else self._task.exception()
        raise RuntimeError("the router's server exited by itself") from error

    async def finish(self, grace_s: float) -> None:
        """Refuse new requests. Returns when no request is in flight; cuts the rest after `grace_s`.

        Open connections stay open meanwhile, and new requests on them get an error.
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
        """`finish`, then close all connections and the server."""
        await self.finish(grace_s)
        if self._admin_server is not None:
            self._admin_server.close()
        self._server.config.timeout_graceful_shutdown = _CLOSE_S
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install none: signals belong to the embedding program."""
        yield

    def connection(self) -> asyncio.Protocol:
        """The protocol of one connection, as uvicorn makes it."""
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def _config(app: FastAPI, tls: TlsFiles | None) -> uvicorn.Config:
    section: RouterSection = app.state.settings
    descriptors: FileDescriptors = app.state.descriptors
    cors = Cors(section.cors) if section.cors.allowed_origins else None
    proxies = TrustedProxies(section.proxies) if section.proxies.networks else None
    return uvicorn.Config(
        Ingress(app, app.state.direct, section.root_path, cors),
        interface="asgi3",
        loop="uvloop",
        http=http_limits.protocol_with(section.limits, descriptors, cors, proxies),
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # proxies.py reads them
        # All that wait are accepted at once, before the first of them is looked at.
        backlog=min(_MOST_WAITING, descriptors.reserve // 2),
        server_header=False,
        lifespan="on",
        ssl_certfile=tls.cert if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
