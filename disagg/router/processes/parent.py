"""Starts, restarts and stops several router processes on one port.

Each child binds its own socket to the port (SO_REUSEPORT), and the kernel spreads new connections
over them. The parent holds the port without listening, and serves no requests. It talks to each
child over a socket pair. Settings and keys must only go that way, never on a command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter

from disagg.router.processes.rpc import ASK_S, Handlers, RpcChannel, RpcClosed, open_channel
from disagg.router.server.failures import Shown, merged
from disagg.router.server.history import History
from disagg.router.server.peer_processes import EngineCalls, called, merged_metrics
from disagg.router.server.sampler import Taken
from disagg.router.server.server import RouterPlan, RouterServer, bind
from disagg.router.topology import Away, EngineEndpoint

logger = logging.getLogger(__name__)

START_S = 60.0
END_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_SAMPLE_S = 5.0  # a silent engine alone takes 2 s
_STEADY_S = 30.0  # a child that lived longer did not fail to start
_FAILED = (RpcClosed, TimeoutError, RuntimeError)


def claim(host: str, port: int, processes: int) -> socket.socket:
    """Bind the port for a router of `processes` processes. Raises OSError if it is in use."""
    sock = bind(host, port)
    if processes > 1:
        # Only after the bind: before, it would allow sharing the port with another router.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


def open_server(
    plan: RouterPlan, sock: socket.socket, admin: socket.socket | None = None
) -> RouterServer | Processes:
    """A server for the plan on a socket of `claim`: in this process, or in child processes.

    `admin`: a listening socket for operators.
    """
    if plan.section.processes > 1:
        return Processes(plan, sock, admin)
    return plan.server(sock, admin)


class Processes:
    """The parent, in the caller's event loop. It has the methods of `RouterServer`."""

    def __init__(
        self, plan: RouterPlan, sock: socket.socket, admin: socket.socket | None = None
    ) -> None:
        self._plan, self._admin = plan, admin
        self._count, self._socket = plan.section.processes, sock
        self._channels: dict[int, RpcChannel] = {}
        """To the children that serve, by number."""
        self._open: set[RpcChannel] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._draining = False
        self.drain_requested = asyncio.Event()
        self._engine_calls: EngineCalls | None = None
        self._history = History()
        self._sampling = contextlib.AsyncExitStack()
        self._handlers: Handlers = {
            "drain": self._drain,
            "in_flight": self._in_flight,
            "figures": self._figures,
            "failures": self._failures,
            "history": self._since,
            "engines": self._engines,
            "gossip": self._gossip,
        }

    async def start(self) -> None:
        """Returns when all processes accept requests. Raises RuntimeError if one does not start."""
        ready = [asyncio.Event() for _ in range(self._count)]
        self._keepers = [asyncio.create_task(self._keep(n, e)) for n, e in enumerate(ready)]
        all_ready = asyncio.create_task(_wait_for_all(ready))
        await asyncio.wait([all_ready, *self._keepers], return_when="FIRST_COMPLETED")
        if not all_ready.done():
            all_ready.cancel()
            await self.stop(0)
            raise RuntimeError("a router process exited while starting; see its last log lines")
        await self._sampling.enter_async_context(self._history.running(self._sample))

    async def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Use these engines from now on, in later children too; see `Topology.replace`."""
        self._plan = replace(self._plan, engines=engines, down=down)
        await self._ask("replace", self._replace_argument())

    async def running(self) -> Mapping[str, int] | None:
        """How many requests of all processes need each engine, by name; None if one process does
        not answer."""
        asked = set(self._channels)
        answers = await self._ask("running")
        if asked - answers.keys() & self._channels.keys():
            return None
        return sum(map(Counter, answers.values()), Counter[str]())

    def manage(self, engines: EngineCalls) -> None:
        """Operators' calls about engines go there."""
        self._engine_calls = engines

    async def figures(self) -> bytes:
        """The router's own metrics, of all processes, in the text format of `/metrics`."""
        return merged_metrics(await self._ask("figures"))

    async def ended(self) -> None:
        """Returns after `stop`. Raises RuntimeError if the children are no longer restarted."""
        await asyncio.wait(self._keepers, return_when="FIRST_COMPLETED")
        if not self._stopping.is_set():
            raise RuntimeError("the router's processes are no longer restarted")

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let those in flight run for `grace_s`, cut the rest, end all."""
        self._stopping.set()
        await self._sampling.aclose()
        await self._ask("finish", grace_s, timeout_s=grace_s + ASK_S)
        # All at once: a client that follows a drain through one child sees the end of all.
        for channel in list(self._open):
            channel.close()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._socket.close()

    # ---- one child -------------------------------------------------------------------------

    async def _keep(self, number: int, ready: asyncio.Event) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            status = await self._run_child(number, ready)
            if self._stopping.is_set():
                return
            if not ready.is_set():
                raise RuntimeError(f"router process {number} exited while starting")
            failures = 0 if time.monotonic() - began > _STEADY_S else failures + 1
            self._history.note(f"router process {number}", "restarted", f"exit status {status}")
            pause = min(_PAUSE_S * 2 ** min(failures, 10), _LONGEST_PAUSE_S)
            logger.warning(
                "router process %d exited (status %d), restarting it in %.1f s",
                number,
                status,
                pause,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()

    async def _run_child(self, number: int, ready: asyncio.Event) -> int:
        """One child from its start to its end. Returns its exit status."""
        parent_sock, child_sock = socket.socketpair()
        process = _spawn(child_sock, self._admin)
        channel = await open_channel(parent_sock, self._handlers)
        self._open.add(channel)
        serving = asyncio.create_task(channel.serve())
        try:
            if not self._stopping.is_set():
                told = self._plan
                await channel.call("start", self._start_argument(), timeout_s=START_S)
                while told is not self._plan:  # they changed while it started
                    told = self._plan
                    await channel.call("replace", self._replace_argument(), timeout_s=START_S)
                self._channels[number] = channel
                ready.set()
                await serving
        except _FAILED as error:
            logger.warning("router process %d did not start: %s", number, error)
        finally:
            self._channels.pop(number, None)
            self._open.discard(channel)
            channel.close()
            await _reap(process)
        return process.returncode

    def _start_argument(self) -> dict[str, Any]:
        port = self._socket.getsockname()[1]
        # Only what is set: a model's own settings replace those of the router.
        data = TypeAdapter(RouterPlan).dump_json(self._plan, exclude_unset=True)
        return {"plan": data.decode(), "port": port, "draining": self._draining}

    def _replace_argument(self) -> dict[str, Any]:
        engines = [asdict(engine) for engine in self._plan.engines]
        return {"engines": engines, "down": dict(self._plan.down)}

    # ---- calls of a child, passed to all children ------------------------------------------

    async def _drain(self, on: bool) -> int:
        self._draining = on
        in_flight: int = sum((await self._ask("drain", on)).values())
        if on:
            self.drain_requested.set()
        return in_flight

    async def _in_flight(self, _: Any) -> int:
        in_flight: int = sum((await self._ask("in_flight")).values())
        return in_flight

    async def _figures(self, _: Any) -> dict[int, str]:
        return await self._ask("figures")

    async def _failures(self, _: Any) -> Shown:
        return merged((await self._ask("failures")).values())

    async def _since(self, at: float) -> str:
        return self._history.since(at)

    async def _sample(self) -> Taken | None:
        """A sample by one child. It stays the same child while that lives, as only it knows the
        sample before."""
        for _, channel in sorted(self._channels.items()):
            with contextlib.suppress(*_FAILED):
                taken: Taken = await channel.call("sample", timeout_s=_SAMPLE_S)
                return taken
        return None

    async def _engines(self, given: Any) -> dict[str, Any]:
        return await called(self._engine_calls, given["name"], given["given"])

    async def _gossip(self, message: str) -> None:
        """Its own process gets it too, and leaves it."""
        await self._ask("gossip", message)

    async def _ask(
        self, name: str, argument: Any = None, *, timeout_s: float = ASK_S / 2
    ) -> dict[int, Any]:
        """Call all children at once. Returns the answers, without the children that failed."""

        async def one(number: int, channel: RpcChannel) -> tuple[int, Any] | None:
            try:
                return number, await channel.call(name, argument, timeout_s=timeout_s)
            except _FAILED as error:
                logger.warning("router process %d did not answer %s: %s", number, name, error)
                return None

        answers = await asyncio.gather(*(one(*item) for item in self._channels.items()))
        return dict(answer for answer in answers if answer is not None)


async def _wait_for_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


def _spawn(child_sock: socket.socket, admin: socket.socket | None) -> subprocess.Popen[bytes]:
    with child_sock:
        given = [child_sock.fileno(), *([admin.fileno()] if admin is not None else [])]
        words = ["-P", "-m", "disagg.router.processes.child", *map(str, given)]
        return subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            pass_fds=given,
            # The import path of this process: it may have been extended at run time.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,  # Ctrl-C goes to the parent only, which stops the children
        )


async def _reap(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + END_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
        await asyncio.sleep(0.02)
