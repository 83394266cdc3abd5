"""`bench router`: the load's own checks, ratios, and one small run over real processes."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from disagg.bench.results import Output, newest
from disagg.bench.router import load as router_load
from disagg.bench.router import run as router
from disagg.bench.router.fake_engine import CHUNKS
from disagg.bench.router.peers import PEERS
from disagg.bench.router.report import RouterCase, Sample, rows, tables, targets
from disagg.errors import ConfigError
from disagg.testing.launch import launch

EVENT = b'data: {"n": 1}\n\n'
LAST = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        yield listening


def answers(server: socket.socket, pieces: list[bytes], events: int = CHUNKS) -> router_load.Batch:
    """What the load makes of one answer that comes in these pieces, then the connection's end."""

    def serve() -> None:
        connection, _ = server.accept()
        connection.settimeout(10)
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        load = router_load.RouterLoad(url, clients=1, requests=1, stream=True, events=events)
        return router_load.run(load)
    finally:
        thread.join(10)


def test_an_answer_may_be_cut_into_pieces_anywhere(server: socket.socket) -> None:
    events = EVENT * CHUNKS + LAST
    cut = len(EVENT) + 3  # a chunk's end in mid-event, in the word that is looked for
    answer = HEAD + chunk(events[:cut]) + chunk(events[cut:]) + b"0\r\n\r\n"
    batch = answers(server, [answer[:10], answer[10:-3], answer[-3:]])
    assert len(batch.first) == len(batch.whole) == 1
    assert 0 < batch.first[0] <= batch.whole[0] <= batch.wall


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + chunk(EVENT * (CHUNKS - 1) + LAST) + b"0\r\n\r\n",
        HEAD + chunk(EVENT * CHUNKS) + b"0\r\n\r\n",
        HEAD.replace(b"200", b"503") + chunk(EVENT * CHUNKS + LAST) + b"0\r\n\r\n",
        HEAD + chunk(EVENT * CHUNKS + LAST),
    ],
    ids=["an event short", "not done", "an error", "cut"],
)
def test_a_wrong_answer_ends_the_run(server: socket.socket, answer: bytes) -> None:
    with pytest.raises(RuntimeError, match=r"not the answer expected|connection was lost"):
        answers(server, [answer])


def test_a_router_that_leaves_the_prefill_leg_out_is_found() -> None:
    with ExitStack() as stack:
        url, _ = launch(stack, "decode", router._engine("decode", 0))
        load = router_load.RouterLoad(url, clients=1, requests=1, stream=False)
        assert router_load.run(replace(load, as_decode=True)).first
        with pytest.raises(RuntimeError, match="the prefill leg was left out"):
            router_load.run(load)


def sample(rate: float, first: float, cpu: float) -> Sample:
    return Sample(100, 100 / rate, first, first, first, first, cpu, 0.1, 0.1)


def test_ratios_are_of_one_round_and_their_median_counts() -> None:
    case = RouterCase("stream", 16)
    ours = [sample(100, 0.1, 1), sample(10, 0.2, 1), sample(300, 0.3, 2)]
    peer = [sample(50, 0.1, 1), sample(5, 0.1, 2), sample(900, 0.1, 5)]
    mine, theirs = rows({(case, "vllm-router"): peer, (case, "ours"): ours})
    assert (mine["target"], theirs["target"]) == ("ours", "vllm-router")
    assert (mine["requests_s"], mine["chunks_s"]) == (100, 100 * CHUNKS)
    assert (mine["requests_s_over_peer"], mine["first_p50_over_peer"]) == (2, 2)
    assert mine["cpu_over_peer"] == 0.5
    assert mine["cpu_s_per_million_chunks"] == round(4 / 300 / CHUNKS * 1e6, 2)
    assert theirs["requests_s_over_peer"] is mine["requests_s_over_ours"] is None
    (met,) = targets({"rows": [mine, theirs]})
    assert met is not None
    assert (met.at, met.measured, met.met) == ("16 clients, streams", 2, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"targets": ["pigeon"]}, "no such target"), ({"clients": [0]}, "at least 1")],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, list[str]], message: str) -> None:
    plan: dict[str, Any] = {
        "requests": 1,
        "rounds": 1,
        "clients": [1],
        "modes": ["whole"],
        "targets": ["direct"],
    }
    with pytest.raises(ConfigError, match=message):
        router.RouterBenchPlan(pace_ms=0, **{**plan, **wrong}).check()


def test_a_small_run(tmp_path: Path) -> None:
    plan = router.RouterBenchPlan(8, 1, [1, 4], ["stream", "whole"], ["direct", "ours"], 0)
    assert router.run(plan, Output(tmp_path / "figures.json", tmp_path / "results")) == 0
    report = json.loads((tmp_path / "figures.json").read_text())
    found = {(row["mode"], row["clients"], row["target"]): row for row in report["rows"]}
    assert set(found) == {(m, c, t) for m in plan.modes for c in plan.clients for t in plan.targets}
    for (mode, clients, target), row in found.items():
        assert row["requests"] == max(8, 4 * clients)
        assert 0 < row["first_p50_ms"] <= row["whole_p50_ms"] <= row["whole_p99_ms"]
        assert (row["chunks_s"] is not None) == (mode == "stream")
        assert (row["cpu_router_ms"] is None) == (target == "direct")
    memory = report["memory_mb"]["ours"]
    assert memory["processes"] == 1
    assert 20 < memory["start"] <= memory["most"]
    _, result = newest(tmp_path / "results")["router"]
    assert [len(table.rows) for table in result.tables] == [4, 4, 1]
    assert result.targets == []  # there was no peer
    assert result.figures == report


# ---- peers with engines of their own ----------------------------------------------------------


def test_a_stream_may_have_other_events(server: socket.socket) -> None:
    events = EVENT * (CHUNKS + 1) + LAST
    answer = HEAD + chunk(events[:100]) + chunk(events[100:]) + b"0\r\n\r\n"
    batch = answers(server, [answer], events=CHUNKS + 1)
    assert len(batch.whole) == 1


def test_peers_are_rows_with_their_engines() -> None:
    case = RouterCase("whole", 16)
    names = ("ours", "vllm-router", "dynamo", "ray-serve-llm")
    made = rows({(case, name): [sample(100, 0.1, 1)] for name in reversed(names)})
    assert [row["target"] for row in made] == list(names)
    assert [row["requests_s_over_peer"] for row in made] == [1, None, None, None]
    memory = {name: {"processes": 2, "start": 10.0, "most": 20.0} for name in names}
    report = {"rows": made, "pace_ms": 0, "memory_mb": memory}
    whole, routers = tables({**report, "peers": {"dynamo": {"ai-dynamo": "1.6.1"}}})
    assert [row["versions"] for row in routers.rows] == ["", "", "ai-dynamo 1.6.1", ""]
    assert [row["router CPU, ms per request"] for row in whole.rows] == [10, 10, 10, 10]
    engines = [row["engines"] for row in routers.rows]
    assert engines[:2] == ["the fake engines"] * 2
    assert "mocker" in str(engines[2])
    assert "Ray" in str(engines[3])
    assert {row["most memory, MB"] for row in routers.rows} == {20}


def test_a_peer_that_is_not_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # peers are looked for in its .cache
    names = ["direct", "ours", "dynamo", "ray-serve-llm"]
    plan = router.RouterBenchPlan(4, 1, [1], ["whole"], names, 0)
    assert router.run(plan, Output(tmp_path / "figures.json")) == 0
    report = json.loads((tmp_path / "figures.json").read_text())
    assert [row["target"] for row in report["rows"]] == ["direct", "ours"]
    assert report["peers"] == {}
    said = capsys.readouterr().out
    for name in names[2:]:
        assert f"{name}: left out: not installed; to install it:\n" in said
        assert PEERS[name].install in said


def test_a_peer_that_answers_wrong_is_left_out_from_then_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = router.RouterBenchPlan(4, 1, [1], ["whole"], ["direct", "vllm-router"], 0)
    with ExitStack() as stack:
        url, engine = launch(stack, "decode", router._engine("decode", 0))
        targets = {name: router._Target(url, None, [engine]) for name in plan.targets}
        samples = router._measure(plan, targets, Console())
        assert [name for _, name in samples] == [*targets] == ["direct"]
        with pytest.raises(RuntimeError, match="the prefill leg was left out"):
            router._measure(plan, {"ours": targets["direct"]}, Console())
    assert "vllm-router: left out from here on: " in capsys.readouterr().out


def test_versions_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packages = tmp_path / ".cache/dynamo-venv/lib/python3.11/site-packages"
    for name in ("ai_dynamo-1.6.1", "ai_dynamo_runtime-1.6.2", "aiohttp-3"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    assert PEERS["dynamo"].versions() == {"ai-dynamo": "1.6.1", "ai-dynamo-runtime": "1.6.2"}


def test_the_page_says_how_to_install_peers() -> None:
    page = (Path(__file__).parents[4] / "docs/benchmarks/router.md").read_text()
    for peer in PEERS.values():
        assert peer.install in page


def test_what_a_server_started_ends_with_it() -> None:
    script = (
        "import http.server, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "http.server.HTTPServer.allow_reuse_address = True\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()\n"
    )
    with ExitStack() as stack:
        _, process = launch(stack, "parent", [sys.executable, "-c", script, "{port}"])
        (child,) = process.children()
        assert child.is_running()
    _, alive = psutil.wait_procs([process, child], timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
