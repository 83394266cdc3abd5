"""The two legs of a handoff as the bench sends them, to HTTP servers that answer like engines."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from disagg.bench.first_token.link_engines import Engines, carry, places
from disagg.bench.first_token.pairs import Pair, example, nixl, ours
from disagg.errors import StartupError
from disagg.testing import network
from disagg.testing.network import Link
from disagg.testing.vllm_server import VllmServer

WHY_NOT = network.why_not()
PROMPT = list(range(300, 700))
PARAMS = {"remote_engine_id": "p", "remote_prefill_cached_tokens": 0}


class Engine(BaseHTTPRequestHandler):
    """Answers with tokens 7 and 8. The class holds what one engine was asked."""

    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, dict(self.headers)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer(body))

    def log_message(self, *args: object) -> None:
        """Not printed."""


class FakeServer(ThreadingHTTPServer):
    """One engine. params: what its prefill leg answers. cached: tokens that decode was handed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Engine)
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.params: dict[str, Any] = dict(PARAMS)
        self.cached, self.status = 399, 200
        self.barrier: threading.Barrier | None = None

    def answer(self, body: dict[str, Any]) -> bytes:
        if self.barrier is not None:
            self.barrier.wait(10)
        choice = {"token_ids": [7, 8]}
        if not body.get("stream"):
            answer = {"choices": [choice], "kv_transfer_params": self.params}
            return json.dumps(answer).encode()
        usage = {"prompt_tokens_details": {"cached_tokens": self.cached}}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        return b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events)


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    with FakeServer() as prefill, FakeServer() as decode:
        for one in (prefill, decode):
            threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True).start()
        yield [prefill, decode]
        for one in (prefill, decode):
            one.shutdown()


@contextmanager
def engines(fakes: list[FakeServer], tmp_path: Path, pair: Pair | None = None) -> Iterator[Engines]:
    log = tmp_path / "log"
    log.write_text("the end of its log\n")
    servers = [
        VllmServer(name, tmp_path, log, port=fake.server_address[1])
        for name, fake in zip(("prefill", "decode"), fakes, strict=True)
    ]
    with ThreadPoolExecutor(2) as legs:
        yield Engines(pair or ours("tcp", tmp_path), servers, places(None), legs)


def test_serial_hands_the_params_over(fakes: list[FakeServer], tmp_path: Path) -> None:
    with engines(fakes, tmp_path) as made:
        answer = made.serial(PROMPT)
    assert answer.tokens == [7, 8]
    assert 0 < answer.prefilled_s <= answer.first_s
    (prefill, _), (decode, _) = fakes[0].asked[0], fakes[1].asked[0]
    assert (prefill["max_tokens"], prefill["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    # Without the prefill engine's count of cached tokens: decode then reports its own.
    assert decode["kv_transfer_params"] == {"remote_engine_id": "p"}
    assert made.invitation is None


def test_streamed_sends_both_legs_at_once(fakes: list[FakeServer], tmp_path: Path) -> None:
    fakes[0].params["disagg_invitation"] = {"ticket": "come in"}
    with engines(fakes, tmp_path) as made:
        made.serial(PROMPT)
        assert made.invitation == {"ticket": "come in"}
        # Neither answers before the other was asked.
        fakes[0].barrier = fakes[1].barrier = threading.Barrier(2)
        assert made.streamed(PROMPT).tokens == [7, 8]
        made.streamed(PROMPT)
    keys = []
    for (prefill, _), (decode, _) in zip(fakes[0].asked[1:], fakes[1].asked[1:], strict=True):
        leg = prefill["kv_transfer_params"]
        assert leg["do_remote_decode"] is True
        key = leg["disagg_stream"]
        assert decode["kv_transfer_params"] == {
            "do_remote_prefill": True,
            "disagg_stream": key,
            "disagg_invitation": {"ticket": "come in"},
        }
        keys.append(key)
    assert [len(bytes.fromhex(key)) for key in keys] == [16, 16]
    assert keys[0] != keys[1]


def test_connectors_of_others(fakes: list[FakeServer], tmp_path: Path) -> None:
    """ExampleConnector has no params; NIXL's push needs one request id for both legs."""
    with engines(fakes, tmp_path, example(tmp_path)) as made:
        made.serial(PROMPT)
    assert [one.asked[0][0].get("kv_transfer_params") for one in fakes] == [None, None]
    pytest.importorskip("nixl")
    with engines(fakes, tmp_path, nixl("cpu", "tcp", push=True)) as made:
        made.serial(PROMPT)
    ids = [{k.lower(): v for k, v in one.asked[1][1].items()}["x-request-id"] for one in fakes]
    assert ids[0] == ids[1] != ""


def test_decode_that_computed_the_prompt_is_no_measurement(
    fakes: list[FakeServer], tmp_path: Path
) -> None:
    fakes[1].cached = 256
    with (
        engines(fakes, tmp_path) as made,
        pytest.raises(StartupError, match="decode was handed 256 of 400 tokens") as raised,
    ):
        made.serial(PROMPT)
    assert raised.value.log_tail == "the end of its log"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_leg_names_its_engine(
    fakes: list[FakeServer], tmp_path: Path, failing: int
) -> None:
    fakes[failing].status = 500
    name = ("prefill", "decode")[failing]
    with engines(fakes, tmp_path) as made, pytest.raises(StartupError, match=f"^{name}: .*500"):
        made.serial(PROMPT)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_each_engine_has_a_network_of_its_own() -> None:
    with Link() as link:
        prefill, decode = places(link)
        assert (prefill.address, decode.address) == link.addresses
        with prefill.inside(), FakeServer() as there, decode.inside():
            assert there.server_address[0] == "127.0.0.1"
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", there.server_address[1]), 5)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_plain_sockets_carry_all_bytes_over_the_link() -> None:
    size = (3 << 20) + 17
    with Link() as link:
        link.pace(10**9)
        before = link.sent(0)
        carry(link, size)
        assert size < link.sent(0) - before < 1.1 * size
        assert link.sent(1) < 0.1 * size  # only acknowledgements
