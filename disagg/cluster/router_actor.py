"""The Ray actor around the router.

It binds its port before the engines start, so that a port in use is known at once. It serves only
when the engines are ready. It runs on the node of `disagg serve`, because the YAML's `router.host`
is an address of that node. A restart of this actor must never affect the engines.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from disagg.config import RouterSection
from disagg.credentials import ApiKey
from disagg.engine.ray_metrics import RayMetrics
from disagg.router.processes.parent import Processes, claim, open_server
from disagg.router.server.admin_socket import AdminSocket, open_admin_socket
from disagg.router.server.server import RouterPlan, RouterServer, settle
from disagg.router.topology import Away, EngineEndpoint


class RouterActor:
    """Hosts the router from `bind` to `stop`."""

    def __init__(self, deployment: str, section: RouterSection) -> None:
        self._section = section
        # The metrics of several deployments have this label already.
        self._metrics = RayMetrics({"deployment": deployment} if deployment else {})
        self._publishing: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._socket: socket.socket | None = None
        self._admin: AdminSocket | None = None
        self._server: RouterServer | Processes | None = None

    async def bind(self) -> int | str:
        """Bind the port and the operators' socket. Returns the port, or a message with the problem
        of the port. Raises ConfigError for the socket."""
        try:
            self._socket = claim(self._section.host, self._section.port, self._section.processes)
        except OSError as error:
            return f"{self._section.host}:{self._section.port}: {error.strerror}"
        port: int = self._socket.getsockname()[1]
        if self._section.admin_socket is not None:
            self._admin = open_admin_socket(self._section.admin_socket, port)
        return port

    async def start(
        self,
        engines: Sequence[EngineEndpoint],
        down: Mapping[str, Away],
        api_keys: Sequence[ApiKey],
        engine_key: str,
        strict: bool,
    ) -> None:
        """Serve. Returns when requests are accepted."""
        assert self._socket is not None
        plan = RouterPlan(
            self._section,
            engines,
            api_keys=api_keys,
            engine_key=engine_key,
            strict=strict,
            down=down,
        )
        admin = self._admin.socket if self._admin is not None else None
        self._server = open_server(plan, self._socket, admin)
        await self._server.start()
        settle()
        self._publishing = asyncio.create_task(self._metrics.publish(self._families, self._stopped))

    async def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Replace the engines. `down`: the state of each engine that does not serve, by name."""
        assert self._server is not None
        await self._server.replace(engines, down)

    async def ended(self) -> None:
        """Never returns while the actor lives. Raises what ended the router.

        Call it after `start`. `stop` is no failure: its caller also ends the actor.
        """
        assert self._server is not None
        await self._server.ended()
        await asyncio.Event().wait()

    async def stop(self, grace_s: float) -> None:
        """Accept no new requests, let streams run for `grace_s`, then close."""
        self._stopped.set()
        if self._server is not None:
            await self._server.stop(grace_s)
        elif self._socket is not None:
            self._socket.close()
        if self._admin is not None:
            self._admin.remove()

    async def _families(self) -> Iterable[Metric]:
        assert self._server is not None
        return text_string_to_metric_families((await self._server.figures()).decode())
