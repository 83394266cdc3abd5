"""`disagg bench router`: what a router costs, ours and vllm-router, against no router at all.

The engines are fake and compute nothing: prefill answers kv_transfer_params at once, decode 64
events, each written by itself. So all that is measured is the routers' own work. Engines, router
and load generator are processes of their own; each round visits every target, so that drift of
the machine falls on all alike. Router CPU is what its processes used, per request.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import aiohttp
import httpx
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from disagg.bench.vllm_server import free_port
from disagg.errors import StartupError

CHUNKS = 64
CLIENTS = (1, 16, 64)
ROUNDS = 4
START_S = 60.0
BATCH_S = 60.0
BODY = {"model": "fake", "prompt": "hello " * 100, "max_tokens": CHUNKS, "stream": True}
PEER = "vllm-router"
_EVENT = b'data: {"id": "cmpl-1", "choices": [{"index": 0, "text": " word"}]}\n\n'
_PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2, 3]]}
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: "
Targets = dict[str, tuple[str, psutil.Process | None]]
Batches = dict[tuple[int, str], list["Batch"]]
Batch = dict[str, Any]  # seconds: of each request; wall, chunks, cpu: of all


def run(requests: int, pace_ms: float, *, json_path: Path | None) -> int:
    """Measure and print. `requests`: per target and round. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        urls = {role: _engine(stack, role, pace_ms) for role in ("prefill", "decode")}
        targets: Targets = {"direct": (urls["decode"], None)}
        targets["ours"] = _router(stack, "ours", _ours(urls))
        if _peer_binary():
            targets[PEER] = _router(stack, PEER, _peer(urls))
        else:
            console.print(f"{PEER} is not installed (pip install {PEER}): left out")
        batches = _measure(targets, requests, console)
    rows = [_row(batches, clients, name) for clients in CLIENTS for name in targets]
    for row in rows:
        _compare(row, rows)
    Console(width=max(console.width, 130), highlight=False).print(_table(rows))
    if json_path is not None:
        json_path.write_text(json.dumps({"pace_ms": pace_ms, "rows": rows}, indent=2))
    return 0


# ---- processes -----------------------------------------------------------------------------


def _ours(urls: dict[str, str]) -> list[str]:
    command = [sys.executable, "-m", "disagg.bench.router", "router"]
    return [*command, urls["prefill"], urls["decode"], "{port}"]


def _peer_binary() -> str | None:
    return shutil.which(PEER, path=str(Path(sys.executable).parent)) or shutil.which(PEER)


def _peer(urls: dict[str, str]) -> list[str]:
    command = [str(_peer_binary()), "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--log-level", "warning"]
    command += ["--prefill", urls["prefill"], "--decode", urls["decode"]]
    return [*command, "--prometheus-port", str(free_port())]


def _engine(stack: ExitStack, role: str, pace_ms: float) -> str:
    command = [sys.executable, "-m", "disagg.bench.router", "engine", role, "{port}", str(pace_ms)]
    return _launch(stack, f"fake {role}", command)[0]


def _router(stack: ExitStack, name: str, command: list[str]) -> tuple[str, psutil.Process]:
    url, process = _launch(stack, name, command)
    return url, psutil.Process(process.pid)


def _launch(
    stack: ExitStack, name: str, command: Sequence[str]
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server and wait until its /health answers."""
    port = free_port()
    log = tempfile.TemporaryFile()  # noqa: SIM115
    stack.callback(log.close)
    words = [word.replace("{port}", str(port)) for word in command]
    process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(_end, process)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while not _healthy(url):
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            tail = log.read()[-2000:].decode(errors="replace")
            raise StartupError(f"{name} did not start:\n{tail}")
        time.sleep(0.05)
    return url, process


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- measuring -----------------------------------------------------------------------------


def _measure(targets: Targets, requests: int, console: Console) -> Batches:
    batches: Batches = defaultdict(list)
    generator = random.Random(1)
    for clients in CLIENTS:
        for number in range(ROUNDS + 1):
            order = generator.sample(list(targets), len(targets))
            for name in order:
                url, process = targets[name]
                before = _cpu(process)
                batch = _batch(url, clients, max(requests, 2 * clients))
                batch["cpu"] = _cpu(process) - before
                if number:  # the first round warms connections and caches
                    batches[clients, name].append(batch)
        rates = (f"{name} {_row(batches, clients, name)['requests/s']:g}" for name in targets)
        console.print(f"{clients} clients, requests/s: " + ", ".join(rates))
    return batches


def _cpu(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def _batch(url: str, clients: int, requests: int) -> Batch:
    command = [sys.executable, "-m", "disagg.bench.router", "load", url, str(clients)]
    done = subprocess.run(
        [*command, str(requests)], capture_output=True, text=True, timeout=BATCH_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the load on {url} failed:\n{done.stderr[-2000:]}")
    batch: Batch = json.loads(done.stdout)
    return batch


def _row(batches: Batches, clients: int, name: str) -> dict[str, Any]:
    mine = batches[clients, name]
    seconds = sorted(second for batch in mine for second in batch["seconds"])
    wall = sum(batch["wall"] for batch in mine)
    return {
        "clients": clients,
        "target": name,
        "requests": len(seconds),
        "requests/s": round(len(seconds) / wall, 1),
        "chunks/s": round(sum(batch["chunks"] for batch in mine) / wall),
        "p50 ms": round(statistics.median(seconds) * 1e3, 2),
        "p99 ms": round(seconds[int(len(seconds) * 0.99)] * 1e3, 2),
        "router CPU ms": round(sum(batch["cpu"] for batch in mine) / len(seconds) * 1e3, 2),
    }


def _compare(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    peers = {r["target"]: r for r in rows if r["clients"] == row["clients"]}
    row["added p50 ms"] = round(row["p50 ms"] - peers["direct"]["p50 ms"], 2)
    if row["target"] == "ours" and PEER in peers:
        for column in ("requests/s", "p50 ms", "p99 ms", "router CPU ms"):
            row[f"{column}, ours/peer"] = round(row[column] / (peers[PEER][column] or 1e-9), 2)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"Routers in front of fake engines, {CHUNKS} events an answer")
    columns = ["clients", "target", "requests", "requests/s", "chunks/s", "p50 ms", "p99 ms"]
    columns += ["added p50 ms", "router CPU ms"]
    ratios = ["requests/s", "p50 ms", "p99 ms", "router CPU ms"]
    columns += [f"{ratio}, ours/peer" for ratio in ratios]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    return table


# ---- what runs in the processes ------------------------------------------------------------


async def _load(url: str, clients: int, requests: int) -> Batch:
    left, seconds, chunks = iter(range(requests)), [], 0
    data, headers = json.dumps(BODY).encode(), {"content-type": "application/json"}

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal chunks
        for _ in left:
            began = time.perf_counter()
            async with session.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
                content = await answer.read()
            seconds.append(time.perf_counter() - began)
            if answer.status != 200 or content.count(_EVENT) != CHUNKS:
                raise RuntimeError(f"{answer.status}: {content[:500]!r}")
            chunks += CHUNKS

    timeout = aiohttp.ClientTimeout(total=BATCH_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        wall = time.perf_counter() - began
    return {"seconds": seconds, "wall": wall, "chunks": chunks}


class _FakeEngine(asyncio.Protocol):
    """As much of HTTP as the routers need, for little CPU: it must not be what is measured."""

    def __init__(self, role: str, pace_s: float) -> None:
        self._prefill, self._pace_s, self._data = role == "prefill", pace_s, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        fields = head.lower().split(b"content-length:")
        length = int(fields[1].split(b"\r\n")[0]) if len(fields) > 1 else 0
        if separator and len(rest) >= length:
            self._data = rest[length:]
            self._answer(head.startswith(b"POST"))

    def _answer(self, completion: bool) -> None:
        if completion and not self._prefill:
            self._transport.write(_OK + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            self._event(CHUNKS)
            return
        answer = {"id": "1", "choices": [], "kv_transfer_params": _PARAMS} if completion else {}
        body = json.dumps(answer).encode()
        head = _OK + b"application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _event(self, left: int) -> None:
        if left:
            self._transport.write(b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT))
            asyncio.get_running_loop().call_later(self._pace_s, self._event, left - 1)
        else:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def _serve_engine(role: str, port: int, pace_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _FakeEngine(role, pace_s), "127.0.0.1", port)
    await server.serve_forever()


def _process(words: Sequence[str]) -> None:
    match words:
        case ["engine", role, port, pace_ms]:
            uvloop.run(_serve_engine(role, int(port), float(pace_ms) / 1000))
        case ["router", prefill, decode, port]:
            from disagg.router.main import run as serve

            serve([prefill], [decode], "127.0.0.1", int(port))
        case ["load", url, clients, requests]:
            sys.stdout.write(json.dumps(uvloop.run(_load(url, int(clients), int(requests)))))


if __name__ == "__main__":
    _process(sys.argv[1:])
