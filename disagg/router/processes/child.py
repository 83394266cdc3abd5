"""One of several router processes on one port:
`python -m disagg.router.processes.child FD [ADMIN_FD]`.

FD is a socket to the parent (`parent.py`), which sends the plan and stops the child. A child must
never outlive its parent: it exits when that socket closes. ADMIN_FD is the listening socket for
operators. All children accept connections from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvloop
from pydantic import TypeAdapter

from disagg.router.processes.rpc import ASK_S, RpcChannel, RpcClosed, open_channel
from disagg.router.server.failures import Shown, merged
from disagg.router.server.gossip import Gossip
from disagg.router.server.history import History
from disagg.router.server.peer_processes import SingleProcess, merged_metrics
from disagg.router.server.server import RouterPlan, RouterServer, bind, settle
from disagg.router.topology import Away, EngineEndpoint


class Child:
    """The server of this process, and the calls that the parent may make."""

    def __init__(self, admin: socket.socket | None) -> None:
        self._admin = admin
        self.channel: RpcChannel | None = None
        self.server: RouterServer | None = None
        self._grace_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "start": self._start,
            "replace": self._replace,
            "drain": lambda on: self._own.drain(on),
            "in_flight": lambda _: self._own.in_flight(),
            "figures": self._figures,
            "failures": lambda _: self._own.failures(),
            "sample": lambda _: self._server.app.state.take_sample(),
            "gossip": self._hear,
            "running": lambda _: self._server.running(),
            "finish": lambda grace_s: self._server.finish(grace_s),
        }

    def on_sigterm(self) -> None:
        """Drain, then exit; the parent starts another child."""
        self._in_background(self._drain_and_close())

    async def _start(self, given: Any) -> None:
        assert self.channel is not None
        plan = TypeAdapter(RouterPlan).validate_json(given["plan"])
        sock = bind(plan.section.host, given["port"], shared=True)
        self.server = server = plan.server(sock, self._admin)
        self._grace_s = plan.section.limits.drain_s
        self._own: SingleProcess = server.app.state.peer_processes
        server.app.state.peer_processes = ParentPeers(self.channel)
        if given["draining"]:
            await self._own.drain(True)
        await server.start()
        settle()
        self._in_background(self._close_when_ended())

    async def _replace(self, given: Any) -> None:
        engines = [EngineEndpoint(**engine) for engine in given["engines"]]
        down = {name: Away(*away) for name, away in given["down"].items()}
        await self._server.replace(engines, down)

    async def _figures(self, _: Any) -> str:
        return (await self._own.figures()).decode()

    async def _hear(self, message: str) -> None:
        gossip: Gossip = self._server.app.state.gossip
        gossip.hear(message.encode())

    async def _close_when_ended(self) -> None:
        try:
            await self._server.ended()
        finally:
            self._close()

    async def _drain_and_close(self) -> None:
        if self.server is not None:
            await self.server.finish(self._grace_s)
        self._close()

    def _close(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _server(self) -> RouterServer:
        assert self.server is not None
        return self.server


class ParentPeers:
    """All processes of the router, as a child reaches them: through its parent.

    If the parent is gone, all processes are exiting, and the answers are empty.
    """

    def __init__(self, parent: RpcChannel) -> None:
        self._parent = parent

    async def drain(self, on: bool) -> int:
        in_flight: int = await self._ask("drain", on) or 0
        return in_flight

    async def in_flight(self) -> int:
        in_flight: int = await self._ask("in_flight") or 0
        return in_flight

    async def figures(self) -> bytes:
        texts: dict[str, str] = await self._ask("figures") or {}
        return merged_metrics({int(number): text for number, text in texts.items()})

    async def failures(self) -> Shown:
        return await self._ask("failures") or merged(())

    async def history(self, since: float) -> str:
        text: str | None = await self._ask("history", since)
        return text or History().since(since)

    async def engines(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] | None = await self._ask("engines", {"name": name, "given": given})
        return answer or {"status": 503, "content": {"error": "the router is shutting down"}}

    async def gossip(self, message: str) -> None:
        with contextlib.suppress(RpcClosed, TimeoutError, RuntimeError):
            await self._parent.call("gossip", message, timeout_s=ASK_S)

    async def _ask(self, name: str, argument: Any = None) -> Any:
        with contextlib.suppress(RpcClosed):
            return await self._parent.call(name, argument, timeout_s=ASK_S)
        return None


async def _main(descriptor: int, admin: int | None = None) -> None:
    child = Child(None if admin is None else socket.socket(fileno=admin))
    channel = child.channel = await open_channel(socket.socket(fileno=descriptor), child.handlers)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent drains
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, child.on_sigterm)
    await channel.serve()
    if child.server is not None:
        await child.server.stop(0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_main(*map(int, sys.argv[1:])))
