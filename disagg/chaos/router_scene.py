"""The processes of `disagg bench router-faults`: a real router, and the fake engines behind it.

The router knows two clients by their keys, with shares of unlike weight. Engines leave it and come
back while it serves. Each process ends when its standard input ends, so none outlives the command.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import IO, Any, get_args

import aiohttp
import psutil
import uvloop

from disagg.chaos.expected_answers import MODELS
from disagg.chaos.faulty_engine import FaultyEngine, State
from disagg.config import (
    EngineListSection,
    LimitsSection,
    ModelRouteSection,
    PairingSection,
    Role,
    RouterSection,
    ShareSection,
)
from disagg.credentials import ApiKey
from disagg.errors import StartupError
from disagg.router.server.app import create_app
from disagg.router.server.models import endpoints
from disagg.router.server.server import RouterServer, bind

ENGINES = 3  # of each role and model
TIMEOUT_S = 0.4
QUEUE_S = 2.0  # for which requests wait while all decode engines refuse
# Two prefill and two decode attempts, head and body each, and slack for a busy machine.
DEADLINE_S = 8.0
START_S, SETTLE_S = 60.0, 6.0
_PIPE_BYTES = 1 << 24
CLIENTS = {"batch": ShareSection(), "people": ShareSection(weight=4.0)}
_OPERATOR = ApiKey("operator", "of-the-operator", is_admin=True)


def key_of(client: str) -> str:
    """The API key of one of `CLIENTS`."""
    return f"of-{client}"


class Scene:
    """The router, the engines behind it, and their counts and metrics."""

    def __init__(
        self, url: str, client: aiohttp.ClientSession, router: Process, log: IO[bytes]
    ) -> None:
        self.url, self.client, self._router, self._log = url, client, router, log
        self._engines: list[tuple[Role, Process]] = []
        self.moves = 0
        self._granted, self._ended = set[str](), set[str]()

    @staticmethod
    async def open(stack: AsyncExitStack, first_token: Role = "decode") -> Scene:
        """Start everything; the stack ends it. `first_token`: as in `router.pairing`."""
        engines: list[tuple[Role, Process]] = []
        urls: dict[str, dict[str, list[str]]] = {model: {} for model in MODELS}
        for model, role in itertools.product(MODELS, get_args(Role)):
            words = ["engines", role, model, str(ENGINES)]
            process, ports = await _launch(stack, words, None)
            engines.append((role, process))
            urls[model][role] = [f"http://127.0.0.1:{port}" for port in ports]
        log = tempfile.TemporaryFile()  # noqa: SIM115
        stack.callback(log.close)
        words = ["router", json.dumps(urls), first_token]
        router, url = await _launch(stack, words, log)
        client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        scene = Scene(url, await stack.enter_async_context(client), router, log)
        scene._engines = engines
        return scene

    async def refuse(self, refusing: tuple[int, int]) -> None:
        """From now on this many prefill and decode engines of each model refuse connections."""
        for role, process in self._engines:
            await self._tell(process, refusing[role == "decode"])

    async def settled(self) -> list[str]:
        """Waits until nothing is in flight and no lease is held; returns a line if that fails."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            for _, process in self._engines:
                await self._tell(process, None)
            held, in_flight = self._granted - self._ended, await self._in_flight()
            if not held and not any(in_flight.values()):
                return []
            if time.monotonic() > deadline:
                self._ended |= held
                return [f"still held: {len(held)} leases {sorted(held)[:5]}; {in_flight}"]
            await asyncio.sleep(0.05)

    async def move(self, away: Sequence[str]) -> None:
        """From now on the router does not know the engines of these names, and knows all others.
        Requests in flight to them go on."""
        assert self._router.stdin is not None
        self._router.stdin.write(json.dumps(list(away)).encode() + b"\n")
        await _line(self._router)
        self.moves += 1

    def rss_mib(self) -> float:
        """The router's resident memory."""
        return float(psutil.Process(self._router.pid).memory_info().rss) / (1 << 20)

    def logged_traces(self) -> list[str]:
        """The first stack trace in the router's log, if any."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        at = text.find("Traceback")
        return [] if at < 0 else [f"the router logged: {text[max(0, at - 200) : at + 3000]}"]

    async def _tell(self, process: Process, refusing: int | None) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(refusing).encode() + b"\n")
        granted, used, released = await _line(process)
        self._granted.update(granted)
        self._ended.update(used, released)

    async def figure(self, prefix: str) -> float:
        """The sum of the router's counters with this prefix."""
        figures = await self._figures(prefix)
        named = ((name.partition("{")[0], value) for name, value in figures.items())
        return sum(value for name, value in named if name.endswith("_total"))

    async def _in_flight(self) -> dict[str, float]:
        return await self._figures("disagg_router_in_flight")

    async def _figures(self, prefix: str) -> dict[str, float]:
        async with (
            asyncio.timeout(DEADLINE_S),
            self.client.get(
                f"{self.url}/metrics", headers={"authorization": f"Bearer {_OPERATOR.value}"}
            ) as answer,
        ):
            lines = (await answer.text()).splitlines()
        shown = [line.rpartition(" ") for line in lines if line.startswith(prefix)]
        return {name: float(value) for name, _, value in shown}


async def _launch(
    stack: AsyncExitStack, words: Sequence[str], log: IO[Any] | None
) -> tuple[Process, Any]:
    """Start this module as a process; returns it and the first line that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __spec__.name,
        *words,
        stdin=PIPE,
        stdout=PIPE,
        stderr=log,
        limit=_PIPE_BYTES,
    )
    stack.push_async_callback(_end, process)
    try:
        return process, await _line(process)
    except StartupError as error:
        if log is not None:
            log.seek(0)
            raise StartupError(f"{error}: {log.read()[-2000:].decode()}") from error
        raise


async def _line(process: Process) -> Any:
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        line = await process.stdout.readline()
    if not line:
        raise StartupError("a process of the scene ended")
    return json.loads(line)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _serve_engines(role: str, model: str, count: int) -> None:
    """Serve until standard input ends. First prints the ports. Each input line is the number of
    engines that refuse (null: no change); the answer is the leases counted since the last line."""
    loop, state = asyncio.get_running_loop(), State(role, model)
    names, connections = [f"{model}-{role}-{i}" for i in range(count)], set[FaultyEngine]()
    ports = [0] * count
    servers: list[asyncio.Server | None] = [None] * count

    async def listen(refusing: int) -> None:
        """The first `refusing` engines refuse connections, the others accept them."""
        for number, name in enumerate(names):
            server = servers[number]
            if number < refusing and server is not None:
                server.close()
                servers[number] = None
            elif number >= refusing and server is None:
                engine = partial(FaultyEngine, name, state, connections)
                opened = await loop.create_server(engine, "127.0.0.1", ports[number])
                servers[number], ports[number] = opened, opened.sockets[0].getsockname()[1]
        for connection in list(connections) if refusing else ():
            connection.reset()

    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await listen(0)
    print(json.dumps(ports), flush=True)
    while line := await lines.readline():
        if (refusing := json.loads(line)) is not None:
            await listen(refusing)
        counted = (state.granted, state.used, state.released)
        print(json.dumps([sorted(leases) for leases in counted]), flush=True)
        for leases in counted:
            leases.clear()


async def _serve_router(urls: dict[str, dict[str, list[str]]], first_token: Role) -> None:
    """Serve until standard input ends. First prints the URL. Each input line names the engines that
    are away; the answer is how many the router knows."""
    # The hold is about as long as a fake engine takes, so that either token may come first.
    hold_s = 0.005 if first_token == "prefill" else 0.0
    settings = RouterSection(
        port=0,
        access_log=False,
        probe_interval_s=0.2,
        models=[
            ModelRouteSection(name=model, engines=EngineListSection.model_validate(engines))
            for model, engines in urls.items()
        ],
        pairing=PairingSection(
            local_prefill_tokens=0, first_token=first_token, first_token_hold_s=hold_s
        ),
        limits=LimitsSection(
            queue_timeout_s=QUEUE_S,
            connect_timeout_s=TIMEOUT_S,
            prefill_timeout_s=TIMEOUT_S,
            first_byte_timeout_s=TIMEOUT_S,
            between_bytes_timeout_s=TIMEOUT_S,
        ),
        shares=CLIENTS,
    )
    sock, engines = bind("127.0.0.1", 0), endpoints(settings.models)
    keys = [_OPERATOR, *(ApiKey(client, key_of(client)) for client in CLIENTS)]
    app = create_app(settings, engines, api_keys=keys)
    await RouterServer(app, sock).start()
    print(json.dumps(f"http://127.0.0.1:{sock.getsockname()[1]}"), flush=True)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        away = set(json.loads(line))
        here = [engine for engine in engines if engine.name not in away]
        app.state.replace(here, {})
        print(len(here), flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engines", role, model, count]:
            uvloop.run(_serve_engines(role, model, int(count)))
        case ["router", urls, "prefill" | "decode" as first_token]:
            uvloop.run(_serve_router(json.loads(urls), first_token))
