"""`disagg router` as a user runs it: real processes, TLS, keys, signals, and drains.

The engines are fakes that only load the router.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from unit.router.conftest import FakeEngine, Loop, certificate
from unit.router.test_fuzz import head, posting, refused
from unit.router.test_fuzz import status as status_of

from disagg.testing.http import client

START_S, END_S, POLL_S = 240.0, 60.0, 0.02
STREAM = {"model": "m", "prompt": "x", "stream": True}


@dataclass
class Router:
    """One `disagg router` and its output."""

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
        """Wait for its end; no child may be left. Returns its exit status."""
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
    """Starts a router with these options, and with a configuration file if `config` is given.
    `through`: words before the command."""
    routers: list[Router] = []

    def go(
        *options: str,
        config: str = "",
        env: dict[str, str] | None = None,
        through: Sequence[str] = (),
    ) -> Router:
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
                [*through, sys.executable, "-m", "disagg.cli", "router", *words],
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
    """A client that reads a stream in a thread. The stream is slow until `go_on`."""

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
        """Let all streams of the router finish."""
        self._router.decode.chunk_s = 0
        self.end()

    def end(self) -> None:
        self._thread.join(END_S)
        assert not self._thread.is_alive()

    @property
    def whole(self) -> bool:
        return self.error is None and "data: [DONE]" in self.lines


def is_refused(url: str) -> bool:
    """Whether new connections are refused. Sends no request, which might be accepted."""
    host, _, port = url.rpartition("/")[2].partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        return False  # it was accepted just before the socket closed
    return False


# ---- TLS and keys --------------------------------------------------------------------------


def test_tls_and_keys(start: Callable[..., Router], tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "own")
    (tmp_path / "keys").write_text("# who\nann=of-ann\n\nof-nobody  # no name\n")
    (tmp_path / "keys").chmod(0o600)
    router = start(
        *("--tls-cert", cert, "--tls-key", key, "--engine-key-env", "INNER"),
        config=f"api_keys_file: {tmp_path / 'keys'}\npairing: {{local_prefill_tokens: 0}}\n"
        "admin_keys_env: ADMINS\n",
        env={"INNER": "of-the-engines", "ADMINS": "eve=of-eve"},
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
    trusting.close()
    with pytest.raises(httpx.ConnectError):
        complete(router.url)  # a client that does not trust the certificate
    with pytest.raises(httpx.HTTPError):
        complete(router.url.replace("https:", "http:"))

    # A drain command needs an admin key, from this machine too.
    for key_of in ((), ("--key-env", "K")):
        said = disagg("drain", router.url, "--ca", cert, *key_of, K="of-ann").stderr
        assert "send an admin key" in said
    done = disagg("drain", router.url, "--ca", cert, "--key-env", "K", "--wait", K="of-eve")
    assert (done.returncode, done.stdout) == (0, "draining, 0 in flight\ndrained\n")
    assert router.ended() == 0
    for secret in ("of-ann", "of-nobody", "of-eve", "of-the-engines"):
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

    # Another router may not share the port.
    port = router.url.rpartition(":")[2]
    legs = ("--prefill", "http://a", "--decode", "http://b", "--processes", "2")
    clash = disagg("router", *legs, "--port", port)
    assert clash.returncode == 2
    assert "is not available" in clash.stderr

    # Children exit with their parent.
    router.process.kill()
    assert router.ended() == -signal.SIGKILL
    assert is_refused(router.url)


# ---- drain ---------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sigterm_lets_a_stream_finish_and_refuses_new_requests(
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


def test_requests_that_do_not_finish_in_time_are_cut(start: Callable[..., Router]) -> None:
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
    # A stream ends with an error event; a request without an answer gets an error.
    stream.end()
    assert stream.error is None
    last = [line for line in stream.lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
    asking.join(END_S)
    router.decode.gate.set()
    assert [answer.status_code for answer in answers] == [503]
    assert answers[0].json()["error"]["type"] == "ServiceUnavailableError"
    until(router.decode.left.is_set, words="the engine was not told")


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_lost_terminal_drains(start: Callable[..., Router], processes: str) -> None:
    router = start("--processes", processes)
    children = router.children()
    stream = Stream(router)
    for process in [psutil.Process(router.process.pid), *children] * 2:  # a shell sends two
        process.send_signal(signal.SIGHUP)
    until(lambda: is_refused(router.url))
    stream.go_on()
    assert stream.whole
    assert router.ended() == 0
    assert "restarting it" not in router.text


def test_nohup(start: Callable[..., Router]) -> None:
    router = start(through=["nohup"])
    router.process.send_signal(signal.SIGHUP)
    assert complete(router.url).status_code == 200
    router.process.send_signal(signal.SIGTERM)
    assert router.ended() == 0


def test_a_second_signal_exits_at_once(start: Callable[..., Router]) -> None:
    router = start()
    stream = Stream(router)
    router.process.send_signal(signal.SIGTERM)
    until(lambda: is_refused(router.url))
    router.process.send_signal(signal.SIGTERM)
    assert router.ended() == 128 + signal.SIGTERM
    stream.end()
    assert not stream.whole


def test_a_drain_command_waits_for_all_processes(
    start: Callable[..., Router], tmp_path: Path
) -> None:
    at = tmp_path / "own" / "router.sock"
    router = start("--processes", "2", "--admin-socket", str(at))
    router.children()
    streams = [Stream(router) for _ in range(4)]
    command = [sys.executable, "-m", "disagg.cli", "drain", str(at), "--wait"]
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
    assert not at.exists()


# ---- file descriptors ----------------------------------------------------------------------

LIMIT, CLIENTS = 128, 200


def knock(router: Router, request: bytes) -> socket.socket:
    host, port = router.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(request)
    return connection


def open_in(router: Router) -> int:
    return psutil.Process(router.process.pid).num_fds()


def test_the_soft_limit_of_descriptors_is_raised(start: Callable[..., Router]) -> None:
    router = start(through=["prlimit", "--nofile=200:4000"])
    limits = psutil.Process(router.process.pid).rlimit(resource.RLIMIT_NOFILE)
    assert limits == (4000, 4000)


def test_idle_connections_give_way_to_new_ones(start: Callable[..., Router]) -> None:
    router = start(through=["prlimit", f"--nofile={LIMIT}"])
    health = head("GET /health HTTP/1.1")
    kept = []
    for _ in range(CLIENTS):
        kept.append(knock(router, health))
        assert status_of(kept[-1].recv(4096)) == 200
    assert open_in(router) < LIMIT
    assert kept[0].recv(1) == b""  # the oldest was closed in order
    kept[-1].sendall(health)
    assert status_of(kept[-1].recv(4096)) == 200
    for connection in kept:
        connection.close()
    assert "file descriptors are in use" not in router.text


@pytest.mark.parametrize(
    "at_once",
    [pytest.param(False, id="in turn"), pytest.param(True, marks=pytest.mark.slow, id="at once")],
)
def test_short_of_descriptors_requests_get_503(start: Callable[..., Router], at_once: bool) -> None:
    router = start(
        through=["prlimit", f"--nofile={LIMIT}"], config="pairing: {local_prefill_tokens: 0}"
    )
    router.decode.chunks, router.decode.chunk_s = 10_000, 0.2
    taken: list[socket.socket] = []
    asked: list[socket.socket] = []
    for _ in range(CLIENTS):
        asked.append(knock(router, posting()))
        if not at_once:
            asked[-1].recv(1, socket.MSG_PEEK)
    for connection in asked:
        answer = connection.recv(4096)
        if status_of(answer) == 200:
            taken.append(connection)
            continue
        assert refused(answer) == 503
        assert b"short of file descriptors" in answer
        assert b"retry-after: 1" in answer.lower()
        connection.close()
    assert 20 < len(taken) < CLIENTS
    assert open_in(router) < LIMIT

    # Those taken end well, no engine is blamed, and there is room again.
    router.decode.chunks = router.decode.chunk_s = 0
    for connection in taken:
        connection.settimeout(END_S)
        text = b""
        while not text.endswith(b"0\r\n\r\n"):
            piece = connection.recv(1 << 16)
            assert piece, text[-300:]
            text += piece
        assert b"[DONE]" in text
        connection.close()
    until(lambda: complete(router.url).status_code == 200)
    assert client().get(f"{router.url}/ready", timeout=20).json()["ready"]
    assert "cannot be reached" not in router.text
    assert router.text.count("file descriptors are in use") == 1


def test_several_processes_have_one_history_and_one_list_of_failures(
    start: Callable[..., Router],
) -> None:
    """Whichever process answers, and after one of them was killed."""
    router = start("--processes", "3")
    url = f"{router.url}/ui/state?since=0"

    def states() -> list[dict[str, Any]]:
        # A new connection each: the kernel gives them to different processes.
        return [httpx.get(url, timeout=10).json() for _ in range(12)]

    until(lambda: states()[0]["history"]["samples"])
    router.decode.status = 500
    for _ in range(12):
        answer = httpx.post(f"{router.url}/v1/completions", json={"prompt": [1], "model": "m"})
        assert answer.status_code == 500
    router.decode.status = 200
    time.sleep(1.1)  # documents are up to a second old
    for state in states():
        assert sum(group["count"] for group in state["failure_groups"]) == 12
        assert len(state["failures"]) == 12
    until(lambda: sum(s["failed"] or 0 for s in states()[0]["history"]["samples"]) > 5)
    samples = [state["history"]["samples"] for state in states()]
    assert 5 < sum(sample["failed"] or 0 for sample in samples[0]) < 7  # 12 in two seconds
    firsts = {tuple(one["at"] for one in each)[:2] for each in samples}
    assert len(firsts) == 1

    before = samples[0][0]["at"]
    children = router.children()
    for child in children[:2]:
        child.kill()
    until(lambda: len(set(router.children()) - set(children)) == 2)
    until(lambda: states()[0]["history"]["samples"][-1]["at"] > time.time() - 4)
    history = states()[0]["history"]
    assert history["samples"][0]["at"] == before
    restarted = [event for event in history["events"] if event["kind"] == "restarted"]
    assert len(restarted) == 2
    assert all(event["engine"].startswith("router process ") for event in restarted)
