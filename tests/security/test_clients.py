"""Lines 7 and 9 of the threat model: clients' keys infer, operators' keys operate, and who has no
key sees nothing that an engine or a client wrote.

The routers are real processes. The engines are fakes that count the requests they get.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from unit.router.conftest import FakeEngine, Loop

from disagg.router.api import paths
from disagg.router.engines import broadcast

START_S, END_S = 90.0, 30.0
KEYS = {"CLIENTS": "ann=of-ann", "ADMINS": "eve=of-eve"}
ANN, EVE = ({"authorization": f"Bearer of-{name}"} for name in ("ann", "eve"))
CONFIG: dict[str, Any] = {
    "api_keys_env": "CLIENTS",
    "admin_keys_env": "ADMINS",
    "pairing": {"local_prefill_tokens": 0},
    "probe_interval_s": 3600,
}
BODY = {"model": "m", "prompt": "x"}
EVIL = "evil\x1b[31m\n"


@dataclass
class Engine(FakeEngine):
    """A fake engine that counts the requests of probes and scrapes. `text`: its whole metrics."""

    text: str | None = None
    probed: list[str] = field(default_factory=list)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.probed.append("/metrics")
        return (
            await super()._metrics(request) if self.text is None else web.Response(text=self.text)
        )

    async def _other(self, request: web.Request) -> web.Response:
        if request.path in ("/health", "/disagg/fingerprint", "/version"):
            self.probed.append(request.path)
            if request.path == "/disagg/fingerprint":
                return web.json_response({f"dtype{EVIL}": f"{self.role}{EVIL}"})
            return web.json_response({})
        return await super()._other(request)


@dataclass
class Router:
    process: subprocess.Popen[bytes]
    out: Path
    engines: list[Engine]

    @property
    def text(self) -> str:
        return self.out.read_text()

    @property
    def url(self) -> str:
        return re.findall(r"^Ready: (\S+)/v1$", self.text, re.MULTILINE)[0]

    @property
    def audits(self) -> list[dict[str, Any]]:
        lines = (line for line in self.text.splitlines() if line.startswith('{"audit"'))
        return [json.loads(line) for line in lines]

    @property
    def operated(self) -> list[str]:
        """What engines got beside probes and inference."""
        got = [path for engine in self.engines for path in engine.asked]
        return [path for path in got if not paths.is_for_clients(path.partition("?")[0])]

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=30)

    def raw(self, method: str, target: str, headers: dict[str, str]) -> int:
        """Send this target byte for byte. Returns the status."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = b"%s %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" % (
                method.encode(),
                target.encode(),
            )
            connection.sendall(head + f"content-length: 0\r\n{fields}\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        return int(answer.split()[1])


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def start(loop: Loop, tmp_path: Path) -> Iterator[Callable[..., Router]]:
    """Starts `disagg router` with these settings and options, in front of two engines."""
    routers: list[Router] = []

    def go(*options: str, **settings: Any) -> Router:
        engines = [Engine("prefill"), Engine("decode")]
        for engine in engines:
            loop.run(engine.start())
        config = tmp_path / f"{len(routers)}.yaml"
        config.write_text(json.dumps({**CONFIG, "port": 0, **settings}))
        words = ["--prefill", engines[0].url, "--decode", engines[1].url, "--config", str(config)]
        out = tmp_path / f"{len(routers)}.out"
        with out.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "disagg.cli", "router", *words, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | KEYS,
            )
        router = Router(process, out, engines)
        routers.append(router)
        until(lambda: "Ready: " in router.text or process.poll() is not None, START_S)
        assert process.poll() is None, router.text
        return router

    yield go
    for router in routers:
        router.process.terminate()
        router.process.wait(END_S)
        for engine in router.engines:
            loop.run(engine.stop())


def until(condition: Callable[[], object], timeout_s: float = END_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def complete(router: Router, **headers: str) -> httpx.Response:
    return httpx.post(f"{router.url}/v1/completions", json=BODY, headers=headers, timeout=30)


# ---- clients infer, operators operate ------------------------------------------------------

SPELLINGS = [
    "/sleep",
    "/sleep?level=1",
    "/%73leep",
    "/%2573leep",
    "//sleep",
    "/sleep/",
    "/./sleep",
    "/v1/../sleep",
    "/v1/models/../../sleep",
    "/v1/models%2f..%2f..%2fsleep",
    "/v1/responses/..%2f..%2fsleep",
    "/v1/responses/../../sleep",
    "/v1/responses/%2e%2e%2f%2e%2e%2fsleep/cancel",
    "/v1/responses/..",
    "/SLEEP",
    "/sleep;x",
    "/sleep%00",
    "/sleep%3f",
    "/sleep%23",
    "/tokenize/../sleep",
    "/v1/completions/../../sleep",
    "http://x/sleep",
    "/sleep/",
    "//sleep/",
    "/server_info/",
    "/server_info",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/get_world_size",
    "/weight_info",
    "/fault_tolerance/apply",
    "/kv_event_sources",
    "/docs/oauth2-redirect",
    "/a_route_of_a_later_vllm",
    "/v1/a_route_of_a_later_vllm",
    *sorted(broadcast.PATHS),
]


def test_a_clients_key_infers_and_does_not_operate(start: Callable[..., Router]) -> None:
    router = start()
    assert complete(router, **ANN).status_code == 200
    for path in ("/tokenize", "/v1/embeddings", "/v1/responses/resp_1/cancel", "/%76ersion"):
        assert router.raw("POST", path, ANN) == 200, path
    before = len(router.engines[0].asked) + len(router.engines[1].asked)
    for path in [*SPELLINGS, "/disagg/drain", "/%64isagg/drain"]:
        for method in ("POST", "GET"):
            assert router.raw(method, path, ANN) == 403, (method, path)
            assert router.raw(method, path, {}) == 401, (method, path)
            assert router.raw(method, path, {"x-api-key": "of-nobody"}) == 401, (method, path)
    assert len(router.engines[0].asked) + len(router.engines[1].asked) == before
    refused = router.get("/server_info", **ANN).json()["error"]
    assert refused["type"] == "PermissionDeniedError"
    assert "router.admin_keys_file" in refused["message"]
    assert router.audits == []

    for path in ("/sleep?level=1", "/%73leep", "/v1/load_lora_adapter", "/server_info"):
        assert router.raw("POST", path, EVE) == 200, path
    assert complete(router, **ANN).status_code == 200
    assert router.raw("POST", "/disagg/drain", EVE) == 200
    assert router.process.wait(END_S) == 0


def test_loopback_and_forwarding_headers_prove_nothing(start: Callable[..., Router]) -> None:
    router = start(api_keys_env=None, admin_keys_env=None)
    assert complete(router).status_code == 200
    for headers in ({}, EVE, {"x-forwarded-for": "127.0.0.1"}, {"x-api-key": "of-eve"}):
        for path in ("/disagg/drain", "/sleep", "/reset_prefix_cache", "/collective_rpc"):
            assert router.raw("POST", path, headers) == 403
    assert router.operated == []
    assert complete(router).status_code == 200


# ---- the router's own socket ---------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_the_socket_is_an_operators(
    start: Callable[..., Router], tmp_path: Path, processes: int
) -> None:
    at = tmp_path / "own" / "router.sock"
    router = start("--processes", str(processes), admin_socket=str(at), admin_keys_env=None)
    assert stat.S_IMODE(at.stat().st_mode) == 0o600
    assert stat.S_IMODE(at.parent.stat().st_mode) == 0o700
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(at)), base_url="http://x") as operator:
        assert operator.post("/sleep?level=1", timeout=30).status_code == 200
        assert operator.post("/v1/completions", json=BODY, timeout=30).status_code == 200
        assert router.raw("POST", "/sleep", ANN) == 403
        assert operator.post("/disagg/drain", timeout=30).json()["draining"]
    assert router.process.wait(END_S) == 0
    assert not at.exists()
    sleep, drain = router.audits
    assert {**sleep, "audit": 0} == {
        "audit": 0,
        "who": "socket",
        "pid": os.getpid(),
        "uid": os.getuid(),
        "method": "POST",
        "path": "/sleep?level=1",
        "status": 200,
    }
    assert {**drain, "audit": 0} == {**sleep, "audit": 0, "path": "/disagg/drain"}


@pytest.mark.parametrize("planted", ["mode", "symlink", "file"])
def test_a_socket_is_opened_nowhere_else(tmp_path: Path, planted: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755 if planted == "mode" else 0o700)
    at = folder / "router.sock"
    if planted == "symlink":
        (tmp_path / "link").symlink_to(folder)
        at = tmp_path / "link" / "router.sock"
    elif planted == "file":
        at.write_text("of somebody")
    words = ["--prefill", "http://a", "--decode", "http://b", "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "disagg.cli", "router", *words, "--admin-socket", str(at)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    named = at if planted == "file" else at.parent
    assert f"router.admin_socket: {str(named)!r}" in done.stderr
    assert planted != "file" or at.read_text() == "of somebody"


# ---- the audit -----------------------------------------------------------------------------


def test_each_call_of_an_operator_has_one_line(start: Callable[..., Router]) -> None:
    router = start(access_log=False)
    router.engines[0].refusing["/sleep"] = (400, {"error": {"message": EVIL}})
    target = '/sleep?"\\' + "x" * 5000
    assert router.raw("POST", target, EVE) == 400
    assert router.raw("GET", "/disagg/drain", EVE) == 200
    assert router.raw("POST", "/sleep", ANN) == 403
    until(lambda: len(router.audits) == 2)
    call, drain = router.audits
    assert (call["who"], call["method"], call["status"]) == ("eve", "POST", 400)
    assert call["path"].startswith('/sleep?"\\x')
    assert len(call["path"]) == 512
    assert (drain["who"], drain["path"], drain["status"]) == ("eve", "/disagg/drain", 200)
    assert router.out.read_bytes().isascii(), "escaped, so a terminal cannot take it for a command"


def test_log_lines_hold_no_byte_of_an_engine_that_a_terminal_interprets(
    start: Callable[..., Router],
) -> None:
    router = start()
    until(lambda: "are not paired" in router.text)
    complete(router, **ANN, **{"x-request-id": "a\x7f"})
    lines = router.out.read_bytes()
    assert b"\x1b" not in lines
    assert b"\x7f" not in lines
    assert [line for line in lines.splitlines() if line.startswith(b"evil")] == []


# ---- what is open --------------------------------------------------------------------------

HOSTILE = f"""# HELP disagg_leases_held evil words
# TYPE disagg_leases_held gauge
disagg_leases_held{{engine="0"}} 2.0
disagg_leases_held{{engine="0",evil="not\\nclosed"}} 2.0
disagg_leases_held{{engine="0",x="evil words of an engine"}} 2.0
disagg_leases_held{{engine="0"}} 2.0 evil
disagg_leases_held{{ evil
disagg_evil!{{}} 1
disagg_router_requests_total{{route="evil",status="200"}} 7.0
# TYPE disagg_router_requests_total counter
# TYPE disagg_evil evil
vllm:evil{{}} 1.0
disagg_handoffs_total{{outcome="loaded",transport="evil{EVIL}
disagg_handoffs_total{{outcome="evil",transport="tcp"}} x
disagg_handoffs_total
{EVIL}"""


def test_who_has_no_key_sees_no_word_of_an_engine_or_a_client(start: Callable[..., Router]) -> None:
    router = start()
    for engine in router.engines:
        engine.text = HOSTILE + "".join(
            f'disagg_leases_total{{outcome="n{n}"}} 1\n' for n in range(9000)
        )
        engine.status = 500
    answer = complete(router, **ANN, **{"x-request-id": "evil-id"})
    assert answer.status_code == 500
    time.sleep(1.1)
    pages = {path: router.get(path) for path in ("/ui/state", "/metrics", "/ready", "/health")}
    for path, page in pages.items():
        assert page.status_code in (200, 503), path
        assert "evil" not in page.text.lower(), path
    families = list(text_string_to_metric_families(pages["/metrics"].text))
    assert len({family.name for family in families}) == len(families)
    held = [family for family in families if family.name == "disagg_leases_held"]
    assert [len(family.samples) for family in held] == [2]
    assert sum(len(family.samples) for family in families) < 10_000
    (failure,) = json.loads(pages["/ui/state"].text)["failures"]
    assert failure["status"] == 500
    assert not {"id", "why"} & set(failure)

    for headers in (ANN, EVE):
        (failure,) = router.get("/ui/state", **headers).json()["failures"]
        assert failure["id"] == "evil-id"
        assert failure["why"]
    (failure,) = router.get("/ui/state", authorization="Bearer of-nobody").json()["failures"]
    assert "id" not in failure


def test_pages_of_the_api_are_the_routers_own(start: Callable[..., Router]) -> None:
    """An engine's pages would load scripts from elsewhere into the router's origin."""
    router = start()
    for path in ("/docs", "/redoc"):
        for headers in ({}, ANN, EVE):
            page = router.get(path, **headers)
            assert page.status_code == 404
            assert "openapi.json" in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not [path for engine in router.engines for path in engine.asked if "doc" in path]


@pytest.mark.parametrize("path", ["/ready", "/metrics", "/ui/state"])
def test_many_viewers_do_not_load_engines(start: Callable[..., Router], path: str) -> None:
    """301 requests for /ready became 3,636 requests to engines."""
    router = start()
    until(lambda: all("/version" in engine.probed for engine in router.engines))
    time.sleep(1.1)
    for engine in router.engines:
        engine.probed.clear()
    began = time.monotonic()
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: client.get(f"{router.url}{path}"), range(301)))
    seconds = time.monotonic() - began
    got = sum(len(engine.probed) for engine in router.engines)
    assert 0 < got <= 3 * (seconds + 2), f"{got} in {seconds:.1f} s"


# ---- bodies --------------------------------------------------------------------------------


def test_bodies_of_all_connections_together_are_bounded(start: Callable[..., Router]) -> None:
    mib, size, count = 1 << 20, 24 << 20, 24
    router = start(limits={"max_receiving_bytes": 64 * mib, "max_body_bytes": 32 * mib})
    assert complete(router, **ANN).status_code == 200
    process = psutil.Process(router.process.pid)
    idle = process.memory_info().rss
    host, _, port = router.url.removeprefix("http://").partition(":")
    fields = b"host: x\r\nauthorization: Bearer of-ann\r\ncontent-length: %d\r\n\r\n"
    connections = [socket.create_connection((host, int(port)), timeout=30) for _ in range(count)]
    answers = [b""] * count

    def send(number: int) -> None:
        path = (b"/v1/completions", b"/v1/embeddings")[number % 2]
        connection = connections[number]
        connection.sendall(b"POST %s HTTP/1.1\r\n" % path + fields % (size + 1))
        with contextlib.suppress(TimeoutError):
            connection.sendall(b"x" * size)  # all but the last byte
            connection.settimeout(3)
            answers[number] = connection.recv(65536)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(send, range(count)))
    grown = process.memory_info().rss - idle
    assert grown < 200 * mib, f"{grown / mib:.0f} MiB"
    refused = [answer for answer in answers if answer]
    assert len(refused) >= count - 3
    for answer in refused:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: " in answer
        assert b"router.limits.max_receiving_bytes" in answer
    assert complete(router, **ANN).status_code == 200, "small requests go on"
    until(lambda: '"status":503' in router.text)
    for connection in connections:
        connection.close()

    # All bytes are given back, however the requests have ended.
    large = json.dumps({**BODY, "prompt": "x" * (31 * mib)}).encode()
    for _ in range(3):
        done = httpx.post(f"{router.url}/v1/completions", content=large, headers=ANN, timeout=60)
        assert done.status_code == 200


@pytest.mark.parametrize("unit", [b"[],", b'"",', b"1,", b'{"":[]},'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_no_json_stops_the_other_requests(
    start: Callable[..., Router], unit: bytes, path: str
) -> None:
    router = start()
    pauses, done = list[float](), threading.Event()

    def watch() -> None:
        with httpx.Client(timeout=60) as client:
            while not done.is_set():
                began = time.monotonic()
                client.get(f"{router.url}/health")
                pauses.append(time.monotonic() - began)
                time.sleep(0.005)

    watching = threading.Thread(target=watch)
    watching.start()
    forged = b'{"kv_transfer_params":[' + unit * ((31 << 20) // len(unit)) + b"0]}"
    answer = httpx.post(f"{router.url}{path}", content=forged, headers=ANN, timeout=60)
    done.set()
    watching.join()
    assert answer.status_code == 413
    assert "router.limits.max_json_elements" in answer.text
    assert max(pauses) < 1, f"{max(pauses):.2f} s"


def test_a_long_text_is_no_large_json(start: Callable[..., Router]) -> None:
    router = start()
    prompt = '[{",\\' * 1_000_000
    body = {**BODY, "prompt": prompt}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=ANN, timeout=60)
    assert answer.status_code == 200
    assert router.engines[1].bodies[-1]["prompt"] == prompt
