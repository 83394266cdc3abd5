"""A request that offers another protocol is an ordinary one, wherever its bytes are cut."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.conftest import Setup, wait_for
from unit.router.test_fuzz import bounded, connect, rest, status

Make = Callable[..., Setup]
BODY = {"model": "m", "prompt": "the whole of it"}
OFFERS = {
    "java": ["Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAA", "Upgrade: h2c"],
    "curl": ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"],
    "websocket": ["connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"],
    "twice": ["upgrade: foo/2", "connection: keep-alive, Upgrade", "upgrade: bar"],
    "unnamed": ["connection: upgrade", "upgrade:"],
}


def framed(body: bytes, framing: str) -> tuple[list[str], bytes]:
    if framing == "length":
        return [f"content-length: {len(body)}"], body
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return ["transfer-encoding: chunked"], chunks + b"0\r\nupgrade: trailer\r\n\r\n"


def posting(
    content: Any,
    offer: Sequence[str],
    framing: str = "length",
    *more: str,
    path: str = "/v1/completions",
) -> bytes:
    fields, body = framed(json.dumps(content).encode(), framing)
    lines = [f"POST {path} HTTP/1.1", "Host: x", *offer, *fields, *more]
    return "\r\n".join([*lines, "", ""]).encode() + body


def end() -> bytes:
    return b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def send_pieces(connection: socket.socket, data: bytes, cuts: Sequence[int]) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for begin, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        connection.sendall(data[begin:stop])
        time.sleep(0.002)  # so that the router reads it alone


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_the_body_behind_an_offer(setup: Setup, offer: str, framing: str, pause_s: float) -> None:
    request = posting(BODY, OFFERS[offer], framing)
    head = request.index(b"\r\n\r\n") + 4
    with connect(setup) as connection:
        connection.sendall(request[:head])
        time.sleep(pause_s)
        connection.sendall(request[head:] + end())
        answer = rest(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 2, answer
    assert [body["prompt"] for body in setup.decode.bodies] == [BODY["prompt"]]


def test_a_body_that_is_a_request_is_no_request(setup: Setup) -> None:
    smuggled = "GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    fields = [*OFFERS["curl"], f"content-length: {len(smuggled)}"]
    head = "\r\n".join(["POST /v1/embeddings HTTP/1.1", "Host: x", *fields, "", ""])
    with connect(setup) as connection:
        connection.sendall(head.encode())
        time.sleep(0.05)
        connection.sendall(smuggled.encode() + end())
        answer = rest(connection)
    assert answer.count(b"HTTP/1.1 ") == 2
    assert json.dumps(smuggled)[1:-1].encode() in answer


def test_expect_100_continue_with_an_offer(setup: Setup) -> None:
    request = posting(BODY, OFFERS["curl"], "length", "expect: 100-continue", "x: y")
    head = request.index(b"\r\n\r\n") + 4
    with connect(setup) as connection:
        connection.sendall(request[:head])
        assert status(connection.recv(25)) == 100
        connection.sendall(request[head:] + end())
        assert rest(connection).count(b"HTTP/1.1 200 ") == 2


def test_an_offer_does_not_lift_a_limit(make: Make) -> None:
    setup = make(limits={"max_body_bytes": 1000, "receive_timeout_s": 0.3})
    with connect(setup) as connection:
        connection.sendall(posting({**BODY, "x": "y" * 2000}, OFFERS["java"]))
        assert status(connection.recv(4096)) == 413
    with connect(setup) as connection:
        connection.sendall(posting(BODY, OFFERS["java"])[:-1])
        assert status(rest(connection)) == 408
    assert setup.decode.bodies == []


BAD_FRAMING = [
    ["content-length: 1", "transfer-encoding: chunked"],
    ["transfer-encoding: gzip"],
    ["content-length: 1", "content-length: 2"],
]


@pytest.mark.parametrize("fields", BAD_FRAMING)
def test_bad_framing_is_refused_with_an_offer_too(setup: Setup, fields: list[str]) -> None:
    lines = ["POST /v1/embeddings HTTP/1.1", "Host: x", *OFFERS["java"], *fields, "", ""]
    with connect(setup) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"0\r\n\r\n" + end())
        answer = rest(connection)
    assert status(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1
    assert "/v1/embeddings" not in setup.decode.asked


def test_offers_in_thousands_of_pipelined_requests(setup: Setup) -> None:
    offer = "\r\n".join(["GET /health HTTP/1.1", "host: x", *OFFERS["curl"], "", ""]).encode()
    with connect(setup) as connection:
        connection.settimeout(60)
        connection.sendall(offer * 2000 + end())
        assert rest(connection).count(b"HTTP/1.1 200 ") == 2001


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[str], bytes, list[int]]:
    """The prompts of pipelined requests, their bytes, and where these are cut."""
    prompts = draw(st.lists(st.text(st.characters(codec="ascii"), max_size=30), max_size=4))
    data = b""
    for prompt in prompts:
        offer = draw(st.sampled_from([*OFFERS.values(), []]))
        framing = draw(st.sampled_from(["length", "chunked"]))
        more = draw(st.sampled_from([[], ["expect: 100-continue"], ["content-type: text/plain"]]))
        data += posting({"model": "m", "prompt": prompt}, offer, framing, *more)
    data += end()
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=6).map(sorted))
    return prompts, data, cuts


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_any_cut_of_any_requests(setup: Setup, examples: int) -> None:
    @bounded(examples)
    @given(stream=streams())
    def check(stream: tuple[list[str], bytes, list[int]]) -> None:
        prompts, data, cuts = stream
        setup.decode.bodies.clear()
        with connect(setup) as connection:
            send_pieces(connection, data, cuts)
            answer = rest(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP/1.1 ") == len(prompts) + 1
        assert [body["prompt"] for body in setup.decode.bodies] == prompts

    check()


def test_a_client_that_leaves_behind_an_offer(setup: Setup) -> None:
    with connect(setup) as connection:
        connection.sendall(posting(BODY, OFFERS["java"])[:-3])
    protocol: Any = setup.server._server.config.http_protocol_class
    assert wait_for(lambda: protocol.bodies.bytes == 0)
    assert setup.decode.bodies == []
