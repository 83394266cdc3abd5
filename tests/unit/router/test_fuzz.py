"""Fuzzing: whatever a client sends, the router answers and survives.

Requests are made from the router's OpenAPI description, and byte by byte over raw sockets. While
the engines work, a client's mistake must never get a 5xx. The engines are fakes that accept
everything.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from unit.router.conftest import AS_OPERATOR, Setup, wait_for

from disagg.testing.http import client

Make = Callable[..., Setup]
WAIT_S = 30.0
# The fake engines accept what vLLM would refuse, so refusals are not checked.
HELD = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
POSTS, GETS = ["/v1/completions", "/v1/chat/completions"], ["/v1/models", "/health", "/ready"]
OPERATIONS = [
    *(("POST", path, mode) for path in POSTS for mode in GenerationMode),
    *(("GET", path, GenerationMode.POSITIVE) for path in [*GETS, "/metrics"]),
]


def bounded(examples: int) -> Callable[[Any], Any]:
    """The same examples in every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_the_openapi_description(
    setup: Setup, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{setup.url}/openapi.json")

    @bounded(20)
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case[Any]) -> None:
        case.validate_response(case.call(timeout=WAIT_S), checks=HELD)

    check()


# ---- byte by byte --------------------------------------------------------------------------

BODY = b'{"model": "m", "prompt": "x", "stream": true}'


def head(line: str, *fields: str) -> bytes:
    return "\r\n".join([line, "host: x", *fields, "", ""]).encode("latin-1")


def posting(body: bytes = BODY, path: str = "/v1/completions", *fields: str) -> bytes:
    return head(f"POST {path} HTTP/1.1", f"content-length: {len(body)}", *fields) + body


def chunked(*parts: bytes) -> bytes:
    return head("POST /v1/completions HTTP/1.1", "transfer-encoding: chunked") + b"".join(parts)


def connect(setup: Setup) -> socket.socket:
    host, port = setup.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def rest(connection: socket.socket) -> bytes:
    """All bytes until the router closes or resets the connection."""
    received = bytearray()
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return bytes(received)


def exchange(setup: Setup, request: bytes, *, ends: bool = False, pause_s: float = 0.0) -> bytes:
    """The answer to these bytes. `ends`: the client then closes its side, after a pause."""
    with connect(setup) as connection:
        try:
            connection.sendall(request)
            if ends:
                time.sleep(pause_s)
                connection.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass  # refused before all was sent
        return rest(connection)


def closing(request: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)


def status(answer: bytes) -> int:
    first = answer.split(b"\r\n", 1)[0].split(b" ")
    assert first[0] == b"HTTP/1.1", answer[:200]
    return int(first[1])


def refused(answer: bytes) -> int:
    """The status of an error, which must have the API's format."""
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"]
    assert error["code"] == status(answer)
    return status(answer)


def in_flight(setup: Setup) -> float:
    lines = client().get(f"{setup.url}/metrics", timeout=WAIT_S).text.splitlines()
    shown = [line for line in lines if line.startswith("disagg_router_in_flight{")]
    return sum(float(line.rpartition(" ")[2]) for line in shown)


@pytest.fixture
def setup(make: Make, caplog: pytest.LogCaptureFixture) -> Iterator[Setup]:
    """A router that must still serve after the test. Neither the router nor an engine may have
    logged an exception."""
    setup = make()
    yield setup
    assert client().post(f"{setup.url}/v1/completions", content=BODY).status_code == 200
    assert wait_for(lambda: in_flight(setup) == 0, WAIT_S)
    exceptions = [
        record
        for record in caplog.get_records("call")
        # The fake engine's server says so where the router has left.
        if record.exc_info and not isinstance(record.exc_info[1], ConnectionResetError)
    ]
    assert not exceptions, "\n".join(map(logging.Formatter().format, exceptions))


NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 100,
    b"GET\r\n\r\n",
    b"get /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    b"BREW /pot HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\nhost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\nhost: x\n : y\n\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    head("GET /v1/mo\0dels HTTP/1.1"),
    head("GET /v1/mod els HTTP/1.1"),
    head("GET http://evil HTTP/1.1"),
    head("CONNECT evil:80 HTTP/1.1"),
    head("GET /v1/models HTTP/1.1", "x\0y: z"),
    head("GET /v1/models HTTP/1.1", "x: a\rx-evil: b"),
    head("GET /v1/models HTTP/1.1", "no colon"),
    *(head("POST /v1/completions HTTP/1.1", f"content-length: {n}") for n in ("x", "-1", "1e3")),
    head("POST /v1/completions HTTP/1.1", f"content-length: {10**30}"),
    head("POST /v1/completions HTTP/1.1", "content-length: 1", "content-length: 2") + b"{}",
    head("POST /v1/embeddings HTTP/1.1", "content-length: 1", "transfer-encoding: chunked")
    + b"0\r\n\r\n",
    head("POST /v1/embeddings HTTP/1.1", "transfer-encoding: chunked, gzip") + b"0\r\n\r\n",
    chunked(b"zz\r\n"),
    chunked(b"2\r\n{}garbage\r\n"),
    chunked(b"2\r\n{}\r\n", b"-1\r\n"),
    chunked(b"f" * 40 + b"\r\n"),
]


def test_malformed_http(setup: Setup) -> None:
    for request in NOT_HTTP:
        assert refused(exchange(setup, request)) == 400, request
    assert setup.decode.bodies == []


HEADS = {
    "one field": head("GET /v1/models HTTP/1.1", "x: " + "y" * 100_000),
    "one without end": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 1_000_000,
    "a name without end": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"y" * 1_000_000,
    "many fields": head("GET /v1/models HTTP/1.1", *(f"x{n}: y" for n in range(1000))),
    "a path": head(f"GET /{'x' * 100_000} HTTP/1.1"),
    "a path without end": b"GET /" + b"x" * 1_000_000,
    "trailers": chunked(b"2\r\n{}\r\n0\r\n", b"x: y\r\n" * 1000),
}


def test_large_heads(setup: Setup) -> None:
    for name, request in HEADS.items():
        assert refused(exchange(setup, request)) == 431, name


ODD = [
    head("GET /v1/models%00 HTTP/1.1"),
    head("GET /v1/models%0d%0ax-evil:%20b HTTP/1.1"),
    head("GET /v1/models?%0d%0ax-evil:%20b HTTP/1.1"),
    head("GET /v1/models?q=\xe9 HTTP/1.1"),
    head("GET /v1/\xe9 HTTP/1.1"),
    head("GET /%zz%%% HTTP/1.1"),
    head("GET //evil/../%2e%2e/x HTTP/1.1"),
    head("GET http://evil/x?y HTTP/1.1"),
    head("GET /v1/models HTTP/1.1", "x: \x80\xff", "x: again"),
    head("GET /v1/models HTTP/1.1", "x: folded", "\tx-evil: b"),
    head("GET /v1/models HTTP/1.1", "x-request-id: a\tb", "x-request-id: c"),
    head("GET /v1/models HTTP/1.1", "connection: upgrade", "upgrade: tls/1.0"),
    head("GET /v1/models HTTP/1.1", "connection: upgrade, http2-settings", "upgrade: h2c"),
    head("GET /v1/models HTTP/1.1", "host: again", "content-length: 0"),
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    posting(b"\xff\xfe\x00", "/v1/chat/completions"),
    posting(b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "/v1/chat/completions"),
    posting(b'{"messages": ' + b'{"content":' * 10_000 + b"1" + b"}" * 10_001),
    posting(b'{"prompt": [' + b"[1]," * 100_000 + b"[1]]}"),
    posting(b'{"prompt": [1e999, -1, 99999999999999999999999999]}'),
    posting(b'{"prompt": [null, true], "max_tokens": "x", "stream": 7, "stream_options": []}'),
    posting(b'{"prompt": 1, "prompt": 2, "messages": 3, "model": []}'),
    posting(BODY, "/v1/completions", "expect: 200-maybe"),
    posting(BODY, "/v1/completions", "content-encoding: gzip"),
    chunked(b"2d;ext=\xff\r\n" + BODY + b"\r\n", b"0\r\nx-evil: b\r\n\r\n"),
]


def test_odd_requests(setup: Setup) -> None:
    for request in ODD:
        assert 200 <= status(exchange(setup, closing(request))) < 500, request
    assert not any("x-evil" in headers for headers in setup.decode.headers)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A request with some bytes lost, changed, doubled or added."""
    request = bytearray(draw(st.sampled_from([posting(), *ODD])))[:2000]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(request)))
        end = min(len(request), start + draw(st.integers(0, 30)))
        piece = bytes(request[start:end])
        token = st.sampled_from([b"\r\n", b"\r\n\r\n", b":", b"\0", b" ", b"chunked", b"0"])
        request[start:end] = draw(st.one_of(st.just(piece * 2), st.binary(max_size=20), token))
    return bytes(request)


@pytest.mark.parametrize("examples", [150, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pause_s", [0.0, 0.01])
def test_mutated_requests(setup: Setup, pause_s: float, examples: int) -> None:
    """The client closes its side at once, while the router still works, or after a pause."""

    @bounded(examples)
    @given(request=mutations())
    def check(request: bytes) -> None:
        answer = exchange(setup, request, ends=True, pause_s=pause_s)
        # All bytes may have been part of one request, which the close has ended.
        assert not answer or status(answer) < 500

    check()


# Strings with a meaning in URLs.
TARGETS = st.lists(
    st.sampled_from([*"/[]:@?#%;&=.\\x0é", "//", "%2f", "%00", "..", "v1", "models"]), max_size=8
).map(lambda parts: "/" + "".join(parts))


@pytest.mark.parametrize("examples", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_target(setup: Setup, examples: int) -> None:
    """Including targets that name a host if they are parsed as a URL."""

    @bounded(examples)
    @given(target=TARGETS)
    def check(target: str) -> None:
        operator = f"authorization: {AS_OPERATOR['authorization']}"
        answer = exchange(setup, head(f"GET {target} HTTP/1.1", "connection: close", operator))
        assert status(answer) in (200, 307, 400, 404), answer  # `/` leads to `/ui`

    check()


FIELD = st.tuples(
    st.sampled_from(["x", "accept", "content-type", "authorization", "traceparent", "cookie"]),
    st.binary(max_size=12).filter(lambda value: not set(value) & set(b"\r\n\0")),
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_any_header(setup: Setup, path: str) -> None:
    body = BODY.replace(b"true", b"false")

    @bounded(200)
    @given(fields=st.lists(FIELD, max_size=4, unique_by=lambda field: field[0]))
    def check(fields: list[tuple[str, bytes]]) -> None:
        said = [f"{name}: {value.decode('latin-1')}" for name, value in fields]
        answer = exchange(setup, posting(body, path, "connection: close", *said))
        assert status(answer) in (200, 400, 401, 415), answer

    check()


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_of_100_mb_is_refused_and_not_kept(make: Make, framing: str) -> None:
    setup, piece = make(limits={"max_body_bytes": 1 << 20}), b" " * (1 << 20)
    process = psutil.Process()
    before = most = process.memory_info().rss
    with connect(setup) as connection:
        if framing == "length":
            connection.sendall(head("POST /v1/embeddings HTTP/1.1", f"content-length: {100 << 20}"))
        else:
            connection.sendall(head("POST /v1/embeddings HTTP/1.1", "transfer-encoding: chunked"))
            piece = b"100000\r\n" + piece + b"\r\n"
        for _ in range(100):
            connection.sendall(piece)
            most = max(most, process.memory_info().rss)
        answer = connection.recv(4096)
    assert refused(answer) == 413
    assert most - before < 32 << 20
    assert wait_for(lambda: client().get(f"{setup.url}/health").status_code == 200, WAIT_S)


# ---- slow clients --------------------------------------------------------------------------


def dribble(connection: socket.socket, data: bytes) -> bytes:
    """Sends byte after byte until the router closes; returns its answer."""
    connection.settimeout(0.04)
    received, deadline = b"", time.monotonic() + WAIT_S
    for byte in itertools.chain(data, itertools.repeat(data[-1])):
        assert time.monotonic() < deadline, "still open"
        try:
            connection.send(bytes([byte]))
            if not (more := connection.recv(4096)):
                return received
            received += more
        except TimeoutError:
            continue
        except ConnectionError:
            return received
    raise AssertionError


SLOW = {
    "head": b"GET /v1/models HTTP/1.1\r\nx: yyyyyy",
    "body": head("POST /v1/completions HTTP/1.1", "content-length: 1000") + b"{",
    "chunks": chunked(b"1\r\n{\r\n1;xx"),
}


@pytest.mark.parametrize("part", SLOW)
@pytest.mark.parametrize("earlier", [b"", head("GET /health HTTP/1.1")])
def test_a_request_that_arrives_too_slowly(make: Make, part: str, earlier: bytes) -> None:
    setup = make(limits={"receive_timeout_s": 0.3})
    with connect(setup) as connection:
        if earlier:
            connection.sendall(earlier)
            assert status(connection.recv(4096)) == 200
        connection.sendall(SLOW[part][:-1])
        assert refused(dribble(connection, SLOW[part][-1:])) == 408
    assert setup.decode.bodies == []


def test_a_connection_without_a_request(make: Make) -> None:
    setup = make(limits={"receive_timeout_s": 0.3, "keep_alive_s": 0.4})
    with connect(setup) as connection:
        assert rest(connection) == b""
    with connect(setup) as connection:
        assert dribble(connection, b"\r\n") == b""


def test_an_upload_that_continues_after_its_refusal(make: Make) -> None:
    setup = make(limits={"receive_timeout_s": 0.5, "max_body_bytes": 10})
    with connect(setup) as connection:
        connection.sendall(head("POST /v1/embeddings HTTP/1.1", "content-length: 1000") + b" " * 20)
        answer = dribble(connection, b" ")
    assert refused(answer) == 413


def test_waiting_for_an_answer_is_no_timeout(make: Make) -> None:
    setup = make(limits={"receive_timeout_s": 0.2})
    setup.decode.chunk_s = 0.2
    with connect(setup) as connection:
        connection.sendall(posting() + b"GET /v1/models HT")
        first, _, second = rest(connection).partition(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert status(first) == 200
    assert first.count(b"HTTP/1.1") == 1
    assert refused(second) == 408


def test_garbage_behind_a_request_does_not_get_into_its_answer(setup: Setup) -> None:
    setup.decode.chunk_s = 0.1
    with connect(setup) as connection:
        connection.sendall(posting())
        answer = connection.recv(4096)
        connection.sendall(b"\0garbage\r\n\r\n")
        answer += rest(connection)
    assert answer.count(b"HTTP/1.1") == 1
    assert b"[DONE]" not in answer


def test_an_unread_answer(make: Make) -> None:
    setup = make(limits={"unread_timeout_s": 0.3})
    # Buffers hold some MB before the engine has to wait; large chunks fill them soon.
    setup.decode.chunks, setup.decode.padding = 1_000_000, 16 << 10
    with connect(setup) as connection:
        connection.sendall(posting())
        assert wait_for(setup.decode.left.is_set, WAIT_S)
    assert wait_for(lambda: in_flight(setup) == 0, WAIT_S)


# ---- clients that disconnect, and pipelining -----------------------------------------------


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_client_disconnects_at_any_byte(setup: Setup, how: str) -> None:
    setup.decode.chunk_s = 0.01
    request = posting()
    for sent in [0, 1, 20, request.index(b"\r\n\r\n") + 2, len(request) - 1, len(request)]:
        for reads in (False, True):
            with connect(setup) as connection:
                if how == "reset":
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                connection.sendall(request[:sent])
                if reads and sent == len(request):
                    connection.recv(300)
    assert wait_for(lambda: in_flight(setup) == 0, WAIT_S)
    with connect(setup) as connection:
        connection.sendall(posting(BODY, "/v1/embeddings", "connection: close"))
        assert status(rest(connection)) == 200


def test_many_pipelined_requests(setup: Setup) -> None:
    bodies = [b'{"model": "m", "prompt": "%d"}' % number for number in range(30)]
    last = posting(b"{}", "/v1/embeddings", "connection: close")
    with connect(setup) as connection:
        connection.sendall(b"".join(map(posting, bodies)) + last)
        answer = rest(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 31
    prompts = [int(body["prompt"]) for body in setup.decode.bodies]
    assert prompts == list(range(30))


@pytest.mark.parametrize("limit", [1000, 10])
def test_expect_100_continue(make: Make, limit: int) -> None:
    setup = make(limits={"max_body_bytes": limit})
    request = posting(BODY, "/v1/embeddings", "expect: 100-continue", "connection: close")
    with connect(setup) as connection:
        connection.sendall(request[: -len(BODY)])
        assert status(connection.recv(25)) == 100
        connection.sendall(BODY)
        answer = rest(connection)
    assert status(answer) == (200 if limit == 1000 else 413)
