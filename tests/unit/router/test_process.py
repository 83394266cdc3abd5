"""`disagg router` as a user runs it: real processes, TLS, keys, signals, and drains.

The engines behind it are fakes, which only load the router.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from unit.router.conftest import FakeEngine, Loop, certificate

from disagg.testing.http import client

START_S, END_S, POLL_S = 60.0, 30.0, 0.02
STREAM = {"model": "m", "prompt": "x", "stream": True}


@dataclass
class Router:
    """One `disagg router` and what it writes."""

    process: subprocess.Popen[str]
    out: Path
    prefill: FakeEngine
    decode: FakeEngine
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def url(self) -> str:
        return next(
            line.removeprefix("Ready: ").removesuffix("/v1")
            for line in self.text.splitlines()
            if line.startswith("Ready: ")
        )

    @property
    def text(self) -> str:
        return self.out.read_text()

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines() if line.startswith("{")]

    def children(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children()
        self.seen |= set(found)
        return found

    def ended(self) -> int:
        """Its exit status; nothing of it may be left."""
        status = self.process.wait(END_S)
        until(lambda: not [p for p in self.seen if p.is_running() and p.status() != "zombie"])
        return status


def until(condition: Callable[[], object], timeout_s: float = END_S, words: str = "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, words or "it did not happen in time"
        time.sleep(POLL_S)


def disagg(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "disagg.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | env,
    )


@pytest.fixture
def start(loop: Loop, tmp_path: Path) -> Iterator[Callable[..., Router]]:
    """Starts a router with these options, and with a configuration if `config` is given."""
    routers: list[Router] = []

    def go(*options: str, config: str = "", env: dict[str, str] | None = None) -> Router:
        engines = FakeEngine("prefill"), FakeEngine("decode")
        for engine in engines:
            loop.run(engine.start())
        words = ["--prefill", engines[0].url, "--decode", engines[1].url, "--port", "0", *options]
        if config:
            (tmp_path / "router.yaml").write_text(config)
            words += ["--config", str(tmp_path / "router.yaml")]
        out = tmp_path / f"{len(routers)}.out"
        with out.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "disagg.cli", "router", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | (env or {}),
            )
        router = Router(process, out, *engines)
        routers.append(router)
        until(lambda: "Ready: " in router.text or process.poll() is not None, START_S)
        assert process.poll() is None, router.text
        return router

    yield go
    for router in routers:
        if router.process.poll() is None:
            router.children()
            router.process.kill()
        router.ended()
        for engine in (router.prefill, router.decode):
            loop.run(engine.stop())


def complete(url: str, through: httpx.Client | None = None, **options: Any) -> httpx.Response:
    return (through or client()).post(
        f"{url}/v1/completions", json={**STREAM, "stream": False}, timeout=20, **options
    )


class Stream:
    """A client that reads a stream in a thread, and what became of it. Slow until `go_on`."""

    def __init__(self, router: Router) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self._router = router
        router.decode.chunks, router.decode.chunk_s = 600, 0.05
        self._thread = threading.Thread(target=self._read, args=(router.url,), daemon=True)
        self._thread.start()
        until(lambda: self.lines or self.error, words="no first byte")

    def _read(self, url: str) -> None:
        try:
            with client().stream(
                "POST", f"{url}/v1/completions", json=STREAM, timeout=20
            ) as answer:
                for line in answer.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.error = error

    def go_on(self) -> None:
        """Have all streams of the router come to their end."""
        self._router.decode.chunk_s = 0
        self.end()

    def end(self) -> None:
        self._thread.join(END_S)
        assert not self._thread.is_alive()

    @property
    def whole(self) -> bool:
        return self.error is None and "data: [DONE]" in self.lines


def is_refused(url: str) -> bool:
    """Whether new connections are. (Never a request: it might be taken.)"""
    host, _, port = url.rpartition("/")[2].partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        return False  # it came just when the socket was closed
    return False


# ---- TLS and keys --------------------------------------------------------------------------


def test_tls_and_keys(start: Callable[..., Router], tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "own")
    (tmp_path / "keys").write_text("# who\nann=of-ann\n\nof-nobody  # no name\n")
    router = start(
        *("--tls-cert", cert, "--tls-key", key, "--engine-key-env", "INNER"),
        config=f"api_keys_file: {tmp_path / 'keys'}\npairing: {{local_prefill_tokens: 0}}\n",
        env={"INNER": "of-the-engines"},
    )
    assert router.url.startswith("https://127.0.0.1:")
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=cert))
    assert complete(router.url, trusting).status_code == 401
    ann = {"authorization": "Bearer of-ann", "x-request-id": "1"}
    assert complete(router.url, trusting, headers=ann).status_code == 200
    for engine in (router.prefill, router.decode):
        assert [sent["authorization"] for sent in engine.headers] == ["Bearer of-the-engines"]
    until(lambda: len(router.log) == 2)
    assert [line.get("key") for line in router.log] == [None, "ann"]
    with pytest.raises(httpx.ConnectError):
        complete(router.url)  # who does not trust the certificate
    with pytest.raises(httpx.HTTPError):
        complete(router.url.replace("https:", "http:"))

    # A drain by command needs a key where there are any, from this machine too.
    assert "missing or wrong API key" in disagg("drain", router.url, "--ca", cert).stderr
    done = disagg("drain", router.url, "--ca", cert, "--key-env", "K", "--wait", K="of-ann")
    assert (done.returncode, done.stdout) == (0, "draining, 0 in flight\ndrained\n")
    assert router.ended() == 0
    for secret in ("of-ann", "of-nobody", "of-the-engines"):
        assert secret not in router.text


# ---- several processes ---------------------------------------------------------------------


def served_by(url: str) -> set[str]:
    """The processes that have counted a completion so far."""
    text = client().get(f"{url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("disagg_router_requests_total{")]
    return {line.partition('process="')[2].partition('"')[0] for line in lines}


def test_two_processes_serve_and_one_that_dies_is_replaced(start: Callable[..., Router]) -> None:
    router = start("--processes", "2")
    first = router.children()
    assert len(first) == 2

    def both() -> bool:
        assert complete(router.url).status_code == 200
        return served_by(router.url) == {"0", "1"}

    until(both)
    first[0].kill()
    until(lambda: "restarting it" in router.text)
    assert complete(router.url).status_code == 200
    until(lambda: len(router.children()) == 2)
    until(both)  # the new one counts from zero
    assert len(set(router.children()) - set(first)) == 1

    # Somebody else's router may not share the port.
    port = router.url.rpartition(":")[2]
    legs = ("--prefill", "http://a", "--decode", "http://b", "--processes", "2")
    clash = disagg("router", *legs, "--port", port)
    assert clash.returncode == 2
    assert "is not available" in clash.stderr

    # And none goes on without the parent.
    router.process.kill()
    assert router.ended() == -signal.SIGKILL
    assert is_refused(router.url)


# ---- drain ---------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sigterm_lets_a_stream_end_and_takes_nothing_new(
    start: Callable[..., Router], processes: str
) -> None:
    router = start("--processes", processes)
    router.children()
    stream = Stream(router)
    with httpx.Client(base_url=router.url, timeout=20) as kept:
        assert kept.get("/health").status_code == 200
        router.process.send_signal(signal.SIGTERM)
        until(lambda: is_refused(router.url))
        assert kept.get("/health").status_code == 200
        ready = kept.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "draining": True})
        refused = kept.post("/v1/completions", json=STREAM)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) > 0
    assert router.process.poll() is None
    assert not stream.whole
    stream.go_on()
    assert stream.whole
    assert router.ended() == 0


def test_what_is_not_done_in_time_is_cut(start: Callable[..., Router]) -> None:
    router = start(config="limits: {drain_s: 0.5}\n")
    stream = Stream(router)
    router.decode.gate = threading.Event()
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(complete(router.url)), daemon=True)
    asking.start()
    until(lambda: len(router.decode.bodies) == 2)
    began = time.monotonic()
    router.process.send_signal(signal.SIGINT)
    assert router.ended() == 0
    assert time.monotonic() - began >= 0.5
    # A begun answer ends with an error, and one that had not begun is one.
    stream.end()
    assert stream.error is None
    last = [line for line in stream.lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
    asking.join(END_S)
    router.decode.gate.set()
    assert [answer.status_code for answer in answers] == [503]
    assert answers[0].json()["error"]["type"] == "ServiceUnavailableError"
    until(router.decode.left.is_set, words="the engine was not told")


def test_a_second_signal_ends_at_once(start: Callable[..., Router]) -> None:
    router = start()
    stream = Stream(router)
    router.process.send_signal(signal.SIGTERM)
    until(lambda: is_refused(router.url))
    router.process.send_signal(signal.SIGTERM)
    assert router.ended() == 128 + signal.SIGTERM
    stream.end()
    assert not stream.whole


def test_a_drain_by_command_waits_for_all_processes(start: Callable[..., Router]) -> None:
    router = start("--processes", "2")
    router.children()
    streams = [Stream(router) for _ in range(4)]
    command = [sys.executable, "-m", "disagg.cli", "drain", router.url, "--wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        until(lambda: is_refused(router.url))
        assert waiting.poll() is None
        streams[0].go_on()
        for stream in streams:
            stream.end()
            assert stream.whole
        assert waiting.wait(END_S) == 0
        assert waiting.stdout is not None
        assert waiting.stdout.read() == "draining, 4 in flight\ndrained\n"
    assert router.ended() == 0
