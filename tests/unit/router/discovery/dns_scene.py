"""Runs in its own user, mount and network namespace: a DNS server on port 53, engines on addresses
of the loopback network, and `disagg router` in front of a name. Prints as JSON which addresses
answered requests in each step."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx

PORT = 8123
KEEP_S = 1.0


class Names(asyncio.DatagramProtocol):
    """A DNS server (RFC 1035) that knows one name. `addresses`: None for SERVFAIL."""

    addresses: ClassVar[list[str] | None] = []
    asked: ClassVar[int] = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, client: tuple[str, int]) -> None:
        Names.asked += 1
        end = 12
        while data[end]:
            end += data[end] + 1
        question, (kind,) = data[12 : end + 5], struct.unpack(">H", data[end + 1 : end + 3])
        known = Names.addresses
        is_name = data[12:end].lower() == b"\7engines\4test"
        code = 2 if known is None else 0 if is_name and known else 3
        found = [a for a in known or () if is_name and kind == 1]
        head = data[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(found), 0, 0)
        records = [
            b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 3600, 4) + bytes(map(int, a.split(".")))
            for a in found
        ]
        self._transport.sendto(head + question + b"".join(records), client)


class Engine(BaseHTTPRequestHandler):
    """Counts the completions by the address that they came to."""

    protocol_version = "HTTP/1.1"
    served: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        self._answer(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        Engine.served[self.connection.getsockname()[0]] += 1
        self._answer(b'{"choices":[]}')

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        resolv = Path(folder) / "resolv.conf"
        resolv.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        subprocess.run(["mount", "--bind", str(resolv), "/etc/resolv.conf"], check=True)
        loop = asyncio.new_event_loop()
        listening = loop.create_datagram_endpoint(Names, ("127.0.0.1", 53))
        loop.run_until_complete(listening)
        threading.Thread(target=loop.run_forever, daemon=True).start()
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            server = ThreadingHTTPServer((host, PORT), Engine)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        config = Path(folder) / "router.yaml"
        config.write_text(f"engines: {{refresh_s: 0.1, dns_keep_s: {KEEP_S}}}\nport: 8124\n")
        Names.addresses = ["127.0.0.2", "127.0.0.3"]
        words = ["router", "--config", str(config), "--decode", f"dns://engines.test:{PORT}"]
        router = subprocess.Popen(
            [sys.executable, "-m", "disagg.cli", *words], stdout=subprocess.DEVNULL, env=os.environ
        )
        try:
            print(json.dumps(steps("http://127.0.0.1:8124")))
        finally:
            router.terminate()
            router.wait(60)


def steps(url: str) -> dict[str, list[str]]:
    def engines() -> set[str]:
        try:
            return {n for n, s in httpx.get(f"{url}/ready").json()["engines"].items() if s == "up"}
        except httpx.TransportError:
            return set()

    def asked() -> list[str]:
        Engine.served.clear()
        for _ in range(24):
            body = {"model": "m", "prompt": "x"}
            httpx.post(f"{url}/v1/completions", json=body, timeout=20).raise_for_status()
        return sorted(Engine.served)

    seen = {}
    until(lambda: engines() == {"decode-0", "decode-1"})
    seen["start"] = asked()
    Names.addresses = ["127.0.0.3"]
    until(lambda: engines() == {"decode-1"})
    seen["one went"] = asked()
    Names.addresses = None
    before = Names.asked
    until(lambda: Names.asked > before + 10)
    time.sleep(KEEP_S)
    seen["server fails"] = asked()
    Names.addresses = ["127.0.0.3", "127.0.0.4"]
    until(lambda: engines() == {"decode-1", "decode-2"})
    seen["another came"] = asked()
    return seen


if __name__ == "__main__":
    main()
